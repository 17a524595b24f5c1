"""An RC elephant: RDMA writes of one size on N QPs, kept `depth` deep, for a time or a number of messages.

Requests are posted as chains of `batch` writes of which only the last is signalled: one system call and one completion
a batch. A chain is made once and posted again when it has completed; after a rebuild the chains that had not
completed are posted again on the new QP. The receiver's CPU takes no part.
"""

from __future__ import annotations

import mmap
from collections import deque

from traffic.node.task import Conn, Task
from traffic.node.verbs import Rnic, write_request

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["FlowReceiver", "FlowSender"]

DRAIN_NS = 3_000_000_000


class _Buffer:
    """Page-aligned memory, registered."""

    def __init__(self, rnic: Rnic, size: int) -> None:
        import ctypes

        self.memory = mmap.mmap(-1, size)
        self._view = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._view)
        self.mr = rnic.register(self.address, size)

    def close(self) -> None:
        self.mr.close()
        del self._view
        self.memory.close()


class _Lane:
    """The chains of one connection: idle ones and those in flight, oldest first."""

    def __init__(self) -> None:
        self.heads: list[Any] = []
        self.keep: list[Any] = []  # every request and SGE of every chain: the links between them are C pointers
        self.idle: deque[int] = deque()
        self.flying: deque[int] = deque()
        self.batch = 1
        self.left: int | None = None  # messages still to be posted; None: until the time is over
        self.messages = 0
        self.first_ns = 0
        self.last_ns = 0


class FlowReceiver(Task):
    """The passive end: memory to be written into."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.buffer = _Buffer(rnic, spec["message_bytes"])

    def capacity(self, conn: Conn) -> tuple[int, int]:
        return 1, 1

    def endpoint(self, conn: Conn) -> dict[str, Any]:
        return {"rkey": self.buffer.mr.rkey, "base": self.buffer.address}

    def close(self) -> None:
        super().close()
        self.buffer.close()


class FlowSender(Task):
    """The active end."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.size = spec["message_bytes"]
        self.buffer = _Buffer(rnic, self.size)
        self.lanes: dict[int, _Lane] = {}
        self.started_ns = 0
        self.end_ns: int | None = None
        self.stopping_ns: int | None = None

    def capacity(self, conn: Conn) -> tuple[int, int]:
        return self.spec["depth"], 1

    def endpoint(self, conn: Conn) -> dict[str, Any]:
        return {"rkey": self.buffer.mr.rkey, "base": self.buffer.address}

    def joined(self, conn: Conn) -> None:
        lane = self.lanes.get(conn.number)
        if lane is None:
            lane = self.lanes[conn.number] = self._make_lane(conn)
        for request, _ in lane.keep:
            request.set_wr_rdma(conn.peer["rkey"], conn.peer["base"])

    def _make_lane(self, conn: Conn) -> _Lane:
        lane = _Lane()
        lane.batch = self.spec["batch"]
        total = self.spec["messages"]
        if total is not None:
            share, rest = divmod(total, self.spec["qps"])
            lane.left = share + (1 if conn.number < rest else 0)
            # Chains are posted whole: the longest that divides the share.
            lane.batch = next(b for b in range(lane.batch, 0, -1) if lane.left % b == 0)
        for index in range(max(1, self.spec["depth"] // lane.batch)):
            following = None
            for place in range(lane.batch):
                signalled = place == 0  # built from the tail: the first made is the last of the chain
                made = write_request(
                    wr_id=index,
                    mr=self.buffer.mr,
                    address=self.buffer.address,
                    size=self.size,
                    imm=False,
                    signalled=signalled,
                )
                if following is not None:
                    made[0].next_wr = following
                following = made[0]
                lane.keep.append(made)
            lane.heads.append(following)
            lane.idle.append(index)
        return lane

    def begin(self, now_ns: int) -> None:
        self.running = True
        self.started_ns = now_ns
        self.sampled_ns = now_ns
        self.series.start(now_ns)
        if self.spec["duration_ms"] is not None:
            self.end_ns = now_ns + self.spec["duration_ms"] * 1_000_000
        for conn in self.conns.values():
            self._fill(conn, now_ns)

    def go(self, conn: Conn, now_ns: int) -> None:
        if not self.running:
            return
        lane = self.lanes[conn.number]
        conn.outstanding = 0
        for index in lane.flying:
            self.posted(conn, now_ns)
            conn.rc.post_send(lane.heads[index])
        self._fill(conn, now_ns)

    def _fill(self, conn: Conn, now_ns: int) -> None:
        lane = self.lanes[conn.number]
        while conn.state == "up" and lane.idle and self.stopping_ns is None and lane.left != 0:
            index = lane.idle.popleft()
            lane.flying.append(index)
            if lane.left is not None:
                lane.left -= lane.batch
            self.posted(conn, now_ns)
            conn.rc.post_send(lane.heads[index])

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        lane = self.lanes[conn.number]
        lane.flying.remove(wr_id)
        lane.idle.append(wr_id)
        lane.messages += lane.batch
        lane.last_ns = now_ns
        if not lane.first_ns:
            lane.first_ns = now_ns
        self.series.add(now_ns, lane.batch * self.size)
        self._fill(conn, now_ns)
        if not lane.flying:
            self._end_if_done(now_ns)

    def stop(self, now_ns: int) -> None:
        if self.stopping_ns is None:
            self.stopping_ns = now_ns
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
        quiet = not any(lane.flying for lane in lanes)
        over = self.stopping_ns is not None or all(lane.left == 0 for lane in lanes)
        late = self.stopping_ns is not None and now_ns - self.stopping_ns > DRAIN_NS
        if over and (quiet or late):
            self.finished = True
            self.sample(now_ns, last=True)
            self.emit(
                "done",
                task=self.name,
                start_ns=self.started_ns,
                end_ns=max((lane.last_ns for lane in lanes), default=now_ns),
                undrained=sum(len(lane.flying) * lane.batch for lane in lanes),
                totals=[
                    {
                        "conn": number,
                        "messages": lane.messages,
                        "first_ns": lane.first_ns,
                        "last_ns": lane.last_ns,
                    }
                    for number, lane in self.lanes.items()
                ],
            )

    def close(self) -> None:
        super().close()
        self.buffer.close()
