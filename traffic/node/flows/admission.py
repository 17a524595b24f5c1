"""Receiver-driven admission: a sender to an RNIC sends a chain only when the receiving host grants it, in turn.

At most `admit` chains are in flight to the RNIC, however many senders there are. An incast then queues at the senders
instead of at the receiver's switch port (as with the grants of Homa and NDP, but for chains instead of packets). The
last request of a chain is a write with immediate, by which the receiver knows that the chain has arrived. A grant is an
empty write with immediate; its value is the number of messages in the sender's chains. A sender without more data sends
an immediate of 0.
"""

from __future__ import annotations

from collections import deque

from faultbed.traffic.node.flows.flow import CREDIT_ID, FlowReceiver, FlowSender
from faultbed.traffic.node.flows.grants import Grants
from faultbed.traffic.node.task import RECV_ID, Conn
from faultbed.traffic.node.verbs import VERBS, Rnic, recv_request, request

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["AdmittedReceiver", "AdmittedSender"]

RECEIVES = 16
LEAVE_ID = 1 << 60


_GRANTS: dict[str, Grants] = {}
"""Grants of this engine by RNIC, shared by all flows to that RNIC."""


class AdmittedReceiver(FlowReceiver):
    """The end that grants chains."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.grants = _GRANTS.setdefault(rnic.name, Grants(spec["admit"]))
        self.receive = recv_request(RECV_ID, self.buffer.mr)

    def capacity(self, conn: Conn) -> tuple[int, int]:
        return 8, RECEIVES

    def joined(self, conn: Conn) -> None:
        if conn.number not in self.credits:
            credit = request("write-imm", wr_id=CREDIT_ID, mr=self.buffer.mr, address=0, size=0, signalled=True)
            self.credits[conn.number] = credit
        for _ in range(RECEIVES):
            conn.qp.post_recv(self.receive)

    def go(self, conn: Conn, now_ns: int) -> None:
        conn.outstanding = 0
        self._grant(self.grants.join(conn), now_ns)

    def down(self, conn: Conn, now_ns: int) -> None:
        self._grant(self.grants.leave(conn), now_ns)

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        if conn.state in ("joined", "up"):
            conn.qp.post_recv(self.receive)
        self._grant(self.grants.arrived(conn) if imm else self.grants.leave(conn), now_ns)

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        pass

    def _grant(self, granted: list[Conn], now_ns: int) -> None:
        for conn in granted:
            credit, _ = conn.task.credits[conn.number]  # type: ignore[attr-defined]  # an AdmittedReceiver
            credit.imm_data = conn.peer["chain"]
            conn.count_request(now_ns)
            conn.qp.post_send(credit)

    def close(self) -> None:
        _GRANTS.pop(self.rnic.name, None)
        super().close()


class AdmittedSender(FlowSender):
    """The end that waits for grants. Grants use the credit counter of `FlowSender`."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.window = 0
        self.departure, self._departure_sge = request(
            "write-imm", wr_id=LEAVE_ID, mr=self.buffer.mr, address=0, size=0, signalled=True
        )
        self.departed: set[int] = set()
        self.regrant: dict[int, deque[int]] = {}

    def capacity(self, conn: Conn) -> tuple[int, int]:
        sends, receives = super().capacity(conn)
        return sends + 1, receives

    def endpoint(self, conn: Conn) -> dict[str, Any]:
        if conn.number not in self.lanes:
            lane = self.lanes[conn.number] = self._make_lane(len(self.lanes))
            for index in range(0, len(lane.keep), lane.batch):
                last, _ = lane.keep[index]
                last.opcode = VERBS["write-imm"]
                last.imm_data = lane.batch
        return {**super().endpoint(conn), "chain": self.lanes[conn.number].batch}

    def go(self, conn: Conn, now_ns: int) -> None:
        if self.running:
            conn.outstanding = 0
            self.departed.discard(conn.number)
            # Chains in flight on the lost queue pair: the receiver no longer counts their grants and grants them again.
            self.regrant[conn.number] = deque(self.lanes[conn.number].in_flight)
            self._fill(conn, now_ns)
            self._depart_if_done(conn, now_ns)

    def _post(self, conn: Conn, now_ns: int) -> bool:
        lane = self.lanes[conn.number]
        if not (regrant := self.regrant.get(conn.number)):
            return super()._post(conn, now_ns)
        if conn.state != "up" or lane.uncredited + lane.batch > 0:  # not granted
            return False
        lane.uncredited += lane.batch
        conn.count_request(now_ns)
        conn.qp.post_send(lane.heads[regrant.popleft()])
        return True

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        if wr_id != LEAVE_ID:
            super().on_send(conn, wr_id, now_ns)
            self._depart_if_done(conn, now_ns)

    def stop(self, now_ns: int) -> None:
        super().stop(now_ns)
        for conn in self.conns.values():
            self._depart_if_done(conn, now_ns)

    def _depart_if_done(self, conn: Conn, now_ns: int) -> None:
        lane = self.lanes[conn.number]
        over = self.stopping_ns is not None or lane.left == 0
        if over and conn.state == "up" and not lane.in_flight and conn.number not in self.departed:
            self.departed.add(conn.number)
            conn.count_request(now_ns)
            conn.qp.post_send(self.departure)
