"""Flows over unreliable transports: the sender reports what it sent, the receiver reports what arrived.

Nothing is acknowledged: a send completes when it has left the RNIC. A message does not arrive if one of its packets is
lost, or if no receive is posted for it. An unreliable connection (UC) carries sends, and writes with immediate, which
its receiver can count. Unreliable datagrams (UD) are sends of at most one MTU. Their receive buffer begins with 40
bytes for a GRH (IBTA 11.4.1.2: over RoCE v2 the IP header is at its end).

The receiver ends after it was stopped and nothing has arrived for `QUIET_NS`.
"""

from __future__ import annotations

import pyverbs.enums as e
from pyverbs.addr import AH, AHAttr
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

from faultbed.traffic.node.flows.flow import FlowReceiver, FlowSender
from faultbed.traffic.node.task import RECV_ID, Conn
from faultbed.traffic.node.verbs import RcQp, Rnic, recv_request

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["UnreliableReceiver", "UnreliableSender"]

GRH_BYTES = 40
QKEY = 0x11111111
QUIET_NS = 500_000_000
RECEIVES = 256
"""Number of posted receives. It is large because no credits limit the sender."""


class UcQp(RcQp):
    """One end of an unreliable connection."""

    kind = e.IBV_QPT_UC


class UdQp(RcQp):
    """A datagram QP with one peer. It is in RTS as soon as it is created; `connect` resolves the peer's address."""

    def __init__(self, rnic: Rnic, *, sends: int, receives: int, psn: int, params: dict[str, Any]) -> None:
        self.rnic = rnic
        self.params = params
        self.psn = psn
        self.ah: AH | None = None
        cap = QPCap(max_send_wr=sends, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        init = QPInitAttr(qp_type=e.IBV_QPT_UD, scq=rnic.cq, rcq=rnic.cq, cap=cap, sq_sig_all=0)
        attr = QPAttr(port_num=1)
        attr.qkey = QKEY
        attr.sq_psn = psn
        self.qp = QP(rnic.pd, init, attr)
        self.qpn = self.qp.qp_num
        self.post_send = self.qp.post_send
        self.post_recv = self.qp.post_recv

    def connect(self, peer: dict[str, Any]) -> None:
        self.ah = AH(self.rnic.pd, attr=AHAttr(gr=self.route_to(peer), is_global=1, port_num=1))

    def close(self) -> None:
        super().close()
        if self.ah is not None:
            self.ah.close()


QPS = {"uc": UcQp, "ud": UdQp}


class UnreliableSender(FlowSender):
    """Sends as fast as it may, without feedback about what arrived."""

    has_arrived = False

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.window = None
        self.transport = QPS[spec["transport"]]
        if self.verb == "write":
            self.verb = "write-imm"

    def make_qp(self, **options: Any) -> RcQp:
        return self.transport(self.rnic, **options)

    def joined(self, conn: Conn) -> None:
        super().joined(conn)
        if isinstance(conn.qp, UdQp):
            for work_request, _ in self.lanes[conn.number].keep:
                work_request.set_wr_ud(conn.qp.ah, conn.peer["qpn"], QKEY)


class UnreliableReceiver(FlowReceiver):
    """Counts arriving messages."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        self.front = GRH_BYTES if spec["transport"] == "ud" else 0
        super().__init__(name, rnic, {**spec, "part_bytes": spec["part_bytes"] + self.front}, emit)
        self.transport = QPS[spec["transport"]]
        self.size = spec["part_bytes"]
        self.receives = RECEIVES
        self.receive = recv_request(RECV_ID, self.buffer.mr, self.size + self.front if spec["verb"] == "send" else 0)
        self.counts: dict[int, list[int]] = {}
        self.started_ns = self.last_ns = 0
        self.stopping_ns: int | None = None

    def make_qp(self, **options: Any) -> RcQp:
        return self.transport(self.rnic, **options)

    def joined(self, conn: Conn) -> None:
        self.counts.setdefault(conn.number, [0, 0, 0])
        for _ in range(self.receives):
            conn.qp.post_recv(self.receive)

    def go(self, conn: Conn, now_ns: int) -> None:
        conn.outstanding = 0

    def begin(self, now_ns: int) -> None:
        self.running = True
        self.started_ns = self.sampled_ns = now_ns
        self.series.start(now_ns)

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        conn.qp.post_recv(self.receive)
        self._count(conn, now_ns)

    def _count(self, conn: Conn, now_ns: int) -> None:
        """Count a message as arrived."""
        count = self.counts[conn.number]
        count[0] += 1
        count[1] = count[1] or now_ns
        count[2] = self.last_ns = now_ns
        if self.running:
            self.series.add(now_ns, self.size)

    def stop(self, now_ns: int) -> None:
        self.stopping_ns = now_ns

    def tick(self, now_ns: int) -> None:
        if not self.running or self.finished:
            return
        self.sample(now_ns)
        if self.stopping_ns is not None and now_ns - max(self.stopping_ns, self.last_ns) > QUIET_NS:
            self.finished = True
            self.sample(now_ns, last=True)
            totals = [
                {"conn": number, "messages": count, "first_ns": first_ns, "last_ns": last_ns}
                for number, (count, first_ns, last_ns) in self.counts.items()
            ]
            end_ns = self.last_ns or self.started_ns
            extra = self.extra_results()
            self.emit("done", task=self.name, start_ns=self.started_ns, end_ns=end_ns, totals=totals, **extra)

    def extra_results(self) -> dict[str, Any]:
        """Return fields for the `done` event, besides those of every flow."""
        return {}
