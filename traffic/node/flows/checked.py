"""Flows whose every byte is verified: sends and writes with immediate by the receiver, reads by the reader.

`faultbed.traffic.node.flows.content` defines the bytes. Each message in flight has its own slot at both ends. A slot
is filled before the message is posted and verified when it has arrived. Only then is it reused: the receive is posted
again, or the sender of a write gets a credit.

After a rebuild the sender repeats the messages that were not acknowledged. Messages that the receiver had not yet
verified are lost. The first message on a new QP may therefore have any number near the expected one.
"""

from __future__ import annotations

import functools
from collections import deque

from faultbed.traffic.node.flows.content import Content, Verifier
from faultbed.traffic.node.flows.flow import FlowReceiver, FlowSender
from faultbed.traffic.node.task import RECV_ID, Conn
from faultbed.traffic.node.verbs import Rnic, recv_request

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

__all__ = ["CheckedReceiver", "CheckedSender"]

QUIET_NS = 500_000_000


class CheckedReceiver(FlowReceiver):
    """The end that verifies what was sent or written, or holds the data that is read."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.size = spec["part_bytes"]
        self.content = Content(self.size)
        self.verifiers: dict[int, Verifier] = {}
        self.requests: dict[int, deque[tuple[int, Any]]] = {}
        self.started_ns = self.last_ns = 0
        self.stopping_ns: int | None = None
        if spec["verb"] == "write-imm":
            self.credit_at = 1  # the sender has no spare slot, so every credit counts
        if spec["verb"] == "read":
            self.buffer.write(0, self.content.of(0, 0))

    def slots(self) -> int:
        """Return the number of slots per QP: one per receive, or one per write in flight."""
        return self.receives if self.spec["verb"] == "send" else int(self.spec["depth"])

    def memory_bytes(self) -> int:
        size: int = self.spec["part_bytes"]
        return size if self.spec["verb"] == "read" else self.spec["qps"] * self.slots() * size

    def endpoint(self, conn: Conn) -> dict[str, Any]:
        self._verifier(conn)
        base = 0 if self.spec["verb"] == "read" else self._offset(conn, 0)
        return {"rkey": self.buffer.mr.rkey, "base": self.buffer.address + base}

    def _verifier(self, conn: Conn) -> Verifier:
        if conn.number not in self.verifiers:
            self.verifiers[conn.number] = Verifier(self.content, conn.number)
        return self.verifiers[conn.number]

    def _offset(self, conn: Conn, slot: int) -> int:
        place = list(self.verifiers).index(conn.number)
        return int((place * self.slots() + slot) * self.size)

    def initial_receives(self, conn: Conn) -> Iterable[Any]:
        if self.spec["verb"] != "send":
            return super().initial_receives(conn)
        if conn.number not in self.requests:
            offsets = [self._offset(conn, slot) for slot in range(self.receives)]
            self.requests[conn.number] = deque(
                (offset, recv_request(RECV_ID, self.buffer.mr, self.size, offset)) for offset in offsets
            )
        return [receive for _, receive in self.requests[conn.number]]

    def joined(self, conn: Conn) -> None:
        verifier = self._verifier(conn)
        verifier.is_rebuilt = conn.generation > 0
        super().joined(conn)

    def next_receive(self, conn: Conn, imm: int) -> Any:
        verifier = self.verifiers[conn.number]
        if self.spec["verb"] == "send":  # receives complete in the order in which they were posted
            self.requests[conn.number].rotate(-1)
            offset, receive = self.requests[conn.number][-1]
        else:
            offset, receive = self._offset(conn, imm % self.slots()), super().next_receive(conn, imm)
        verifier.verify(self.buffer.read(self.size, offset), functools.partial(self.buffer.recount, offset))
        return receive

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        self.last_ns = now_ns
        super().on_recv(conn, imm, now_ns)

    def begin(self, now_ns: int) -> None:
        self.running = True
        self.started_ns = now_ns

    def stop(self, now_ns: int) -> None:
        self.stopping_ns = now_ns

    def tick(self, now_ns: int) -> None:
        if not self.running or self.finished or self.stopping_ns is None:
            return
        if now_ns - max(self.stopping_ns, self.last_ns) > QUIET_NS:
            self.finished = True
            self.emit(
                "done",
                task=self.name,
                start_ns=self.started_ns,
                end_ns=self.last_ns or self.started_ns,
                totals=[],
                checked_bytes=sum(verifier.checked for verifier in self.verifiers.values()),
                wrong_bytes=sum(verifier.wrong for verifier in self.verifiers.values()),
                recounted_bytes=sum(verifier.recounted for verifier in self.verifiers.values()),
            )


class CheckedSender(FlowSender):
    """The active end: fills each message with its content, or verifies it with `read`. A chain is one message."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.content = Content(self.size)
        self.posted_messages: dict[int, int] = {}  # by connection, in the order of their slots in memory
        self.checked = self.wrong = self.recounted = 0
        if self.verb == "write-imm":
            self.window = spec["depth"]

    def memory_bytes(self) -> int:
        return int(self.spec["qps"] * self.spec["depth"] * self.spec["part_bytes"])

    def _offset(self, conn: Conn, slot: int) -> int:
        place = list(self.posted_messages).index(conn.number)
        return int((place * self.spec["depth"] + slot) * self.size)

    def joined(self, conn: Conn) -> None:
        self.posted_messages.setdefault(conn.number, 0)
        super().joined(conn)
        for slot, (work_request, sge) in enumerate(self.lanes[conn.number].keep):
            sge.addr = self.buffer.address + self._offset(conn, slot)
            if self.verb == "write-imm":
                work_request.set_wr_rdma(conn.peer["rkey"], conn.peer["base"] + slot * self.size)
                work_request.imm_data = slot

    def before_post(self, conn: Conn, index: int) -> None:
        if self.verb == "read":
            self.buffer.write(self._offset(conn, index), bytes(self.size))
        else:
            number = self.posted_messages[conn.number]
            self.posted_messages[conn.number] = number + 1
            self.buffer.write(self._offset(conn, index), self.content.of(conn.number, number))
        super().before_post(conn, index)

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        if self.verb == "read":
            verifier = Verifier(self.content, 0)
            offset = self._offset(conn, wr_id)
            verifier.verify(self.buffer.read(self.size, offset), functools.partial(self.buffer.recount, offset))
            self.checked += verifier.checked
            self.wrong += verifier.wrong
            self.recounted += verifier.recounted
        super().on_send(conn, wr_id, now_ns)

    def extra_results(self) -> dict[str, Any]:
        if self.verb != "read":
            return {}
        return {"checked_bytes": self.checked, "wrong_bytes": self.wrong, "recounted_bytes": self.recounted}
