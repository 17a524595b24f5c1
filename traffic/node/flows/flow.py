"""A flow: requests of one size and verb on N QPs, kept `depth` deep, for a duration or a number of messages.

Requests are posted as chains of `batch`, of which only the last is signalled: one system call and one completion per
batch. A chain is built once and posted again when it has completed. After a rebuild, the chains that had not completed
are posted on the new QP. The receiver's CPU takes part only in sends and writes with immediate. It posts receives and
returns credits, so that each message finds a receive. A credit is an empty write with immediate; its value is the
number of messages that have arrived.

With `late_ns` the receiver sends no credits, and at most one receive is posted at a time, `late_ns` after the previous
message arrived. Most messages then find no receive. The sender's RNIC gets an RNR NAK, waits for the receiver's
`min_rnr_timer` and retries, up to `rnr_retry` times.

`spread` distributes messages over the QPs: each QP has its own (`each`), the QPs take turns (`round-robin`), or every
message is split into parts, one per QP (`split`).
"""

from __future__ import annotations

import time
from collections import deque

from faultbed.traffic.node.flows import buffer
from faultbed.traffic.node.flows.late import LateReceives
from faultbed.traffic.node.flows.latencies import Latencies
from faultbed.traffic.node.flows.pacer import Pacer
from faultbed.traffic.node.flows.rnr import RnrCount
from faultbed.traffic.node.task import RECV_ID, Conn, Task
from faultbed.traffic.node.verbs import Rnic, recv_request, request

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

__all__ = ["FlowReceiver", "FlowSender"]

DRAIN_NS = 3_000_000_000
CREDIT_ID = 1 << 61
CREDITS_IN_FLIGHT = 8
RECEIVED = ("send", "write-imm")
"""Verbs whose messages each consume a receive."""
SEND_WINDOW = 2
"""Number of posted receives, as a multiple of the sender's depth."""


class _Lane:
    """The chains of one connection: idle ones, and those in flight, oldest first."""

    def __init__(self) -> None:
        self.heads: list[Any] = []
        self.keep: list[Any] = []  # all requests and SGEs of all chains, which are linked only by C pointers
        self.idle: deque[int] = deque()
        self.in_flight: deque[int] = deque()
        self.posted_ns: dict[int, int] = {}
        self.batch = 1
        self.left: int | None = None  # messages still to be posted; None: no limit but the duration
        self.messages = 0
        self.uncredited = 0  # messages for which no credit has come yet
        self.first_ns = 0
        self.last_ns = 0


class FlowReceiver(Task):
    """The passive end: memory to be written into, read or added to; for sends also receives."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.slow = LateReceives(spec["late_ns"])
        self.receives = 0
        if spec["verb"] in RECEIVED:
            self.receives = 1 if self.slow.ns else SEND_WINDOW * spec["depth"]
        self.credit_at = max(1, self.receives // 4)
        self.buffer = buffer.make(rnic, self.memory_bytes(), spec["gpu"])
        size = spec["part_bytes"] if spec["verb"] == "send" else 0
        self.receive = recv_request(RECV_ID, self.buffer.mr, size) if self.receives else None
        self.credits: dict[int, Any] = {}
        self.uncredited: dict[int, int] = {}

    def memory_bytes(self) -> int:
        """Return the size of the memory that receives data."""
        return int(self.spec["part_bytes"])

    def initial_receives(self, conn: Conn) -> Iterable[Any]:
        """Return the receives to post on a new QP."""
        return [self.receive] * self.receives

    def next_receive(self, conn: Conn, imm: int) -> Any:
        """Return the receive to post after a message has consumed one."""
        return self.receive

    def capacity(self, conn: Conn) -> tuple[int, int]:
        return 8, max(1, self.receives)

    def endpoint(self, conn: Conn) -> dict[str, Any]:
        return {"rkey": self.buffer.mr.rkey, "base": self.buffer.address}

    def joined(self, conn: Conn) -> None:
        self.uncredited[conn.number] = 0
        if self.receives:
            if conn.number not in self.credits:
                self.credits[conn.number] = request(
                    "write-imm", wr_id=CREDIT_ID, mr=self.buffer.mr, address=0, size=0, signalled=True
                )
            for receive_request in self.initial_receives(conn):
                conn.qp.post_recv(receive_request)

    def go(self, conn: Conn, now_ns: int) -> None:
        conn.outstanding = 0
        self._send_credit(conn, now_ns)

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        if self.slow.ns:
            self.slow.post(conn, self.receive)
            self.wake_ns = self.slow.due_ns
            return
        receive = self.next_receive(conn, imm)
        if conn.state in ("joined", "up"):
            self.late_receives.post(conn, receive)
        self.uncredited[conn.number] += 1
        self._send_credit(conn, now_ns)

    def wake(self, now_ns: int) -> None:
        self.slow.wake(now_ns)
        self.wake_ns = self.slow.due_ns

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        self._send_credit(conn, now_ns)

    def _send_credit(self, conn: Conn, now_ns: int) -> None:
        uncredited = self.uncredited[conn.number]
        if not self.receives or self.slow.ns or conn.state != "up" or conn.outstanding >= CREDITS_IN_FLIGHT:
            return
        if uncredited >= self.credit_at:
            credit, _ = self.credits[conn.number]
            credit.imm_data = uncredited
            self.uncredited[conn.number] = 0
            conn.count_request(now_ns)
            conn.qp.post_send(credit)

    def close(self) -> None:
        super().close()
        self.slow.clear()
        self.buffer.close()


class FlowSender(Task):
    """The active end: keeps its connections filled with requests, and reports what was completed."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.size = spec["part_bytes"]
        self.verb = spec["verb"]
        self.in_turn = spec["spread"] == "round-robin"
        self.turn = 0
        gets_credits = self.verb in RECEIVED and not spec["late_ns"]
        self.window = SEND_WINDOW * spec["depth"] if gets_credits else None
        self.rnr = RnrCount(rnic.name) if spec["late_ns"] else None
        self.buffer = buffer.make(rnic, self.memory_bytes(), spec["gpu"])
        self.receive = recv_request(RECV_ID, self.buffer.mr)
        self.lanes: dict[int, _Lane] = {}
        self.pacer: Pacer | None = None
        if spec["rate_bps"] or spec["on_ns"]:
            self.pacer = Pacer(rate_bps=spec["rate_bps"], on_ns=spec["on_ns"], off_ns=spec["off_ns"])
        self.latencies = Latencies() if spec["latency"] else None
        self.started_ns = 0
        self.end_ns: int | None = None
        self.stopping_ns: int | None = None

    def memory_bytes(self) -> int:
        """Return the size of the memory that is sent from."""
        return int(self.spec["part_bytes"])

    def capacity(self, conn: Conn) -> tuple[int, int]:
        return self.spec["depth"], 2 * CREDITS_IN_FLIGHT

    def endpoint(self, conn: Conn) -> dict[str, Any]:
        return {"rkey": self.buffer.mr.rkey, "base": self.buffer.address}

    def joined(self, conn: Conn) -> None:
        lane = self.lanes.get(conn.number)
        if lane is None:
            lane = self.lanes[conn.number] = self._make_lane(len(self.lanes))
        lane.uncredited = 0
        for work_request, _ in lane.keep:
            if self.verb == "atomic":
                work_request.set_wr_atomic(conn.peer["rkey"], conn.peer["base"], 1, 0)
            elif self.verb not in ("send", "send-imm"):
                work_request.set_wr_rdma(conn.peer["rkey"], conn.peer["base"])
        if self.window is not None:
            for _ in range(2 * CREDITS_IN_FLIGHT):
                conn.qp.post_recv(self.receive)

    def _make_lane(self, place: int) -> _Lane:
        lane = _Lane()
        lane.batch = self.spec["batch"]
        total = self.spec["messages"]
        if total is not None:
            share, rest = (total, 0) if self.spec["spread"] == "split" else divmod(total, self.spec["qps"])
            lane.left = share + (1 if place < rest else 0)
            # Chains are posted whole, so their length is the longest that divides the share.
            lane.batch = next(b for b in range(lane.batch, 0, -1) if lane.left % b == 0)
        for index in range(max(1, self.spec["depth"] // lane.batch)):
            following = None
            for position in range(lane.batch):
                built = request(
                    self.verb,
                    wr_id=index,
                    mr=self.buffer.mr,
                    address=self.buffer.address,
                    size=self.size,
                    signalled=position == 0,  # built from the tail: the first one built is the last of the chain
                )
                if following is not None:
                    built[0].next_wr = following
                following = built[0]
                lane.keep.append(built)
            lane.heads.append(following)
            lane.idle.append(index)
        return lane

    def begin(self, now_ns: int) -> None:
        self.running = True
        if self.rnr is not None:
            self.rnr.begin()
        self.started_ns = now_ns
        self.sampled_ns = now_ns
        self.series.start(now_ns)
        if self.pacer is not None:
            self.pacer.start(now_ns)
        if self.spec["duration_ms"] is not None:
            self.end_ns = now_ns + self.spec["duration_ms"] * 1_000_000
        self.wake(now_ns)

    def wake(self, now_ns: int) -> None:
        self.wake_ns = None
        conns = list(self.conns.values())
        if not self.in_turn:  # the first QP gets most of a shared rate, so another one is first each time
            self.turn = (self.turn + 1) % len(conns)
        for conn in conns[self.turn :] + conns[: self.turn]:
            self._fill(conn, now_ns)

    def go(self, conn: Conn, now_ns: int) -> None:
        if not self.running:
            return
        lane = self.lanes[conn.number]
        conn.outstanding = 0
        for index in lane.in_flight:
            lane.uncredited += lane.batch
            conn.count_request(now_ns)
            conn.qp.post_send(lane.heads[index])
        self._fill(conn, now_ns)

    def _fill(self, conn: Conn, now_ns: int) -> None:
        if self.in_turn:
            numbers = list(self.lanes)
            while self._post(self.conns[numbers[self.turn]], now_ns):
                self.turn = (self.turn + 1) % len(numbers)
        else:
            while self._post(conn, now_ns):
                pass

    def _post(self, conn: Conn, now_ns: int) -> bool:
        """Post one chain on a connection, if there is one and the window and the rate allow it."""
        lane = self.lanes[conn.number]
        if conn.state != "up" or not lane.idle or self.stopping_ns is not None or lane.left == 0:
            return False
        if self.window is not None and lane.uncredited + lane.batch > self.window:
            return False
        if self.pacer is not None and not self.pacer.take(now_ns, lane.batch * self.size):
            self.wake_ns = self.pacer.wake_ns
            return False
        index = lane.idle.popleft()
        lane.in_flight.append(index)
        lane.uncredited += lane.batch
        if lane.left is not None:
            lane.left -= lane.batch
        self.before_post(conn, index)
        conn.count_request(now_ns)
        conn.qp.post_send(lane.heads[index])
        return True

    def before_post(self, conn: Conn, index: int) -> None:
        """Prepare for posting chain `index` of a connection for the first time since it was idle."""
        if self.latencies is not None:
            self.lanes[conn.number].posted_ns[index] = time.monotonic_ns()

    def extra_results(self) -> dict[str, Any]:
        """Return fields for the `done` event, besides those of every flow."""
        return {}

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        if conn.state in ("joined", "up"):
            conn.qp.post_recv(self.receive)
        self.lanes[conn.number].uncredited -= imm
        if self.running:
            self._fill(conn, now_ns)

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        lane = self.lanes[conn.number]
        lane.in_flight.remove(wr_id)
        lane.idle.append(wr_id)
        lane.messages += lane.batch
        lane.last_ns = now_ns
        if not lane.first_ns:
            lane.first_ns = now_ns
        if self.latencies is not None:
            self.latencies.add(now_ns - lane.posted_ns[wr_id])
        self.series.add(now_ns, lane.batch * self.size)
        self._fill(conn, now_ns)
        if not lane.in_flight:
            self._end_if_done(now_ns)

    def stop(self, now_ns: int) -> None:
        if self.stopping_ns is None:
            self.stopping_ns = now_ns
            self.wake_ns = None
            self._end_if_done(now_ns)

    def tick(self, now_ns: int) -> None:
        if not self.running or self.finished:
            return
        self.check_deadlines(now_ns)
        self.sample(now_ns)
        if self.end_ns is not None and now_ns >= self.end_ns:
            self.stop(now_ns)
        self._end_if_done(now_ns)

    def _end_if_done(self, now_ns: int) -> None:
        if self.finished or not self.running:
            return
        lanes = self.lanes.values()
        quiet = not any(lane.in_flight for lane in lanes)
        over = self.stopping_ns is not None or all(lane.left == 0 for lane in lanes)
        late = self.stopping_ns is not None and now_ns - self.stopping_ns > DRAIN_NS
        if over and (quiet or late):
            self.finished = True
            if self.latencies is not None:  # messages still in flight have taken at least this long
                for lane in lanes:
                    for wr_id in lane.in_flight:
                        self.latencies.add(now_ns - lane.posted_ns[wr_id])
            self.sample(now_ns, last=True)
            self.emit(
                "done",
                task=self.name,
                start_ns=self.started_ns,
                end_ns=self._measured_until(now_ns),
                undrained=sum(len(lane.in_flight) * lane.batch for lane in lanes),
                latencies_ns=self.latencies.values_ns if self.latencies is not None else None,
                latencies_every=self.latencies.every if self.latencies is not None else 1,
                rnr=self.rnr.growth() if self.rnr is not None else None,
                last_value=int.from_bytes(self.buffer.read(8), "little") if self.verb == "atomic" else None,
                totals=[
                    {
                        "conn": number,
                        "messages": lane.messages,
                        "first_ns": lane.first_ns,
                        "last_ns": lane.last_ns,
                    }
                    for number, lane in self.lanes.items()
                ],
                **self.extra_results(),
            )

    def _measured_until(self, now_ns: int) -> int:
        """Return the end of the time over which goodput counts. A flow that stalled at its end must not look faster."""
        if any(lane.in_flight for lane in self.lanes.values()):
            return now_ns
        last_ns = max((lane.last_ns for lane in self.lanes.values()), default=now_ns)
        return last_ns if self.stopping_ns is None else max(last_ns, self.stopping_ns)

    def close(self) -> None:
        super().close()
        self.buffer.close()
