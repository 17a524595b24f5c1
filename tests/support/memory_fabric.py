"""A fabric inside the test's process, for ranks and flows of the engine: a write copies memory after a delay.

This module replaces `faultbed.traffic.node.verbs`, and with it pyverbs. No message is lost. Only a fabric with
`rnr_retry` fails a message: one without a posted receive is repeated after `min_rnr_ns`, at most `rnr_retry` times. On
an `unreliable` fabric a request completes when it is posted. A message is lost there if no receive is posted, or if
`spoilt` returns None.

Time is that of `CLOCK`, which also replaces `time` in the engine's modules: a wait takes no real time, and other load
of this machine has no effect.
"""

from __future__ import annotations

import ctypes
import heapq
import importlib
import sys
import time
import types
from collections import deque
from types import SimpleNamespace

VERBS = {"write": 0, "write-imm": 1, "send": 2, "read": 3, "atomic": 4, "send-imm": 5}
RECV_ID = 1 << 62  # of faultbed.traffic.node.task
TICK_NS = 50_000_000
USERS = (
    "task", "ranks.lane", "ranks.send_lane", "ranks.recv_lane", "ranks.executor", "ranks.rank", "flows.flow",
    "flows.admission", "flows.checked", "flows.unreliable", "flows.numbered", "flows.echo",
)  # fmt: skip
PYVERBS = {
    "pyverbs": (),
    "pyverbs.enums": ("IBV_QPT_UC", "IBV_QPT_UD"),
    "pyverbs.addr": ("AH", "AHAttr"),
    "pyverbs.qp": ("QP", "QPAttr", "QPCap", "QPInitAttr"),
}
"""Names that the imported modules need; they are never called, because the fabric has queue pairs of its own."""
READING_NS = 2_000


class Clock:
    """A clock that advances by `READING_NS` with each reading, and by the length of each wait."""

    def __init__(self):
        self.ns = 1_000_000_000_000

    def monotonic_ns(self):
        self.ns += READING_NS
        return self.ns

    def sleep(self, seconds):
        self.ns += round(seconds * 1e9)

    def wait_until(self, at_ns):
        self.ns = max(self.ns, at_ns)


CLOCK = Clock()


class Request:
    def __init__(self, verb, *, wr_id, mr, address, size, signalled):
        self.opcode, self.wr_id, self.signalled = VERBS[verb], wr_id, signalled
        self.next_wr, self.imm_data, self.remote = None, 0, 0
        self.sge = SimpleNamespace(addr=address, length=size)

    def set_wr_rdma(self, _rkey, address):
        self.remote = address


def request(verb, **fields):
    made = Request(verb, **fields)
    return made, made.sge


def write_request(*, imm, **fields):
    return request("write-imm" if imm else "write", **fields)


class Rnic:
    def __init__(self, name):
        self.name = name

    def register(self, address, _size):
        return SimpleNamespace(rkey=1, lkey=1, buf=address, close=lambda: None)


class RcQp:
    qpn, psn = 1, 256

    def __init__(self, fabric, conn):
        self.fabric, self.conn, self.last_ns = fabric, conn, 0
        self.receives, self.held, self.naks = deque(), deque(), 0

    def post_recv(self, request):
        self.receives.append(request)

    def post_send(self, head):
        chain = []
        while head is not None:
            data = ctypes.string_at(head.sge.addr, head.sge.length) if head.sge.length else b""
            if head.opcode == VERBS["read"]:
                data = head.sge.addr, head.sge.length
            chain.append((head.opcode, head.remote, data, head.imm_data, head.wr_id, head.signalled))
            head = head.next_wr
        self.fabric.carry(self, chain)

    def close(self):
        pass


def modules(monkeypatch):
    """Import new copies of the engine's modules on this fabric; the originals are restored after the test."""
    fake = types.ModuleType("faultbed.traffic.node.verbs")
    fake.__dict__.update(
        STATUS={13: "RNR_RETRY_EXC_ERR"}, VERBS=VERBS, RcQp=RcQp, Rnic=Rnic, request=request,
        write_request=write_request,
        recv_request=lambda _id, mr, size=0, offset=0: SimpleNamespace(address=mr.buf + offset, size=size), gid_of=str,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    for name, inside in PYVERBS.items():
        made = types.ModuleType(name)
        made.__dict__.update(dict.fromkeys(inside))
        monkeypatch.setitem(sys.modules, name, made)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, made)
    for name in USERS:
        monkeypatch.delitem(sys.modules, f"faultbed.traffic.node.{name}", raising=False)
    made = {name: importlib.import_module(f"faultbed.traffic.node.{name}") for name in USERS}
    for name in USERS:  # and so do those that were there, or none
        monkeypatch.setitem(sys.modules, f"faultbed.traffic.node.{name}", made[name])
    for name, module in list(sys.modules.items()):
        if name.startswith("faultbed.traffic.node.") and getattr(module, "time", None) is time:
            monkeypatch.setattr(module, "time", CLOCK)
    return SimpleNamespace(**{name.rpartition(".")[2]: module for name, module in made.items()})


class Fabric:
    def __init__(self, choice, delay_ns=1_000_000, rnr_retry=None, min_rnr_ns=640_000, *, unreliable=False):
        self.choice, self.delay_ns, self.unreliable = choice, delay_ns, unreliable
        self.rnr_retry, self.min_rnr_ns, self.naks = rnr_retry, min_rnr_ns, 0
        self.queue, self.number, self.events = [], 0, []
        self.data_under_way, self.most_under_way = 0, 0
        self.tasks = {}

    def emit_for(self, name):
        return lambda event, **fields: self.events.append((name, event, fields))

    def connection(self, node, number, src, dst):
        ends = [node.task.Conn(self.tasks[name], number) for name in (src, dst)]
        for end, other in (ends, ends[::-1]):
            end.other, end.generation, end.qp = other, 0, RcQp(self, end)
            end.task.conns[number] = end
        return ends

    def connect(self, connections):
        for end in (end for ends in connections for end in ends):
            end.reported_endpoint = {**end.task.endpoint(end), "psn": 256}
        for end in (end for ends in connections for end in ends):
            end.peer = end.other.reported_endpoint
            end.state = "joined"
            end.task.joined(end)
        for end in (end for ends in connections for end in ends):
            end.state = "up"
            end.task.go(end, CLOCK.monotonic_ns())

    def carry(self, qp, chain):
        now_ns = CLOCK.monotonic_ns()
        qp.last_ns = max(now_ns + self.choice.randint(0, self.delay_ns), qp.last_ns + 1)
        if any(data for _, _, data, *_ in chain):
            self.data_under_way += 1
            self.most_under_way = max(self.most_under_way, self.data_under_way)
        if self.unreliable:
            for _, _, _, _, wr_id, signalled in chain:
                self.later(now_ns, qp.conn, (None, 0, b"", 0, wr_id, signalled))
            chain = [(*message[:-1], False) for message in chain]
        self.later(qp.last_ns, qp.conn, *chain)

    def later(self, at_ns, conn, *chain):
        self.number += 1
        heapq.heappush(self.queue, (at_ns, self.number, conn, list(chain)))

    def run(self, names, seconds=20.0):
        for name in names:
            self.tasks[name].begin(CLOCK.monotonic_ns())
        deadline_ns, tick_ns = CLOCK.monotonic_ns() + int(seconds * 1e9), 0
        while not all(self.tasks[name].finished for name in names):
            now_ns = CLOCK.monotonic_ns()
            assert now_ns < deadline_ns, "they wait for each other"
            for task in self.tasks.values():
                task.late_receives.wake(now_ns)
                if task.wake_ns is not None and now_ns >= task.wake_ns:
                    task.wake(now_ns)
                if now_ns >= tick_ns:
                    task.late_receives.check_fault()
                    task.tick(now_ns)
            tick_ns = tick_ns if now_ns < tick_ns else now_ns + TICK_NS
            if self.queue and self.queue[0][0] <= now_ns:
                self.deliver(heapq.heappop(self.queue), now_ns)
            else:
                CLOCK.wait_until(min(self.due(tick_ns)))

    def due(self, tick_ns):
        """Yield the times of the next tick, delivery and wake-ups."""
        yield tick_ns
        if self.queue:
            yield self.queue[0][0]
        for task in self.tasks.values():
            yield from (at for at in (task.wake_ns, task.late_receives.due_ns) if at is not None)

    def drain(self):
        """Deliver all messages in flight: an unreliable sender has completed when it has sent."""
        while self.queue:
            self.deliver(heapq.heappop(self.queue), CLOCK.monotonic_ns())

    def deliver(self, item, now_ns):
        _, _, conn, chain = item
        self.data_under_way -= any(data for _, _, data, *_ in chain)
        if self.unreliable:
            for message in chain:
                self.arrive_or_be_lost(conn, message, now_ns)
            return
        if self.rnr_retry is None:
            self.arrive(conn, chain, now_ns)
            return
        conn.qp.held.extend(chain)
        if not conn.qp.naks or not chain:  # an empty one: what was not ready is tried again
            self.arrive_if_ready(conn, now_ns)

    def arrive_or_be_lost(self, conn, message, now_ns):
        into, receives = None, conn.other.qp.receives
        if message[0] is not None:
            message = self.spoilt(*message)
            if message is None or not receives:
                return
            into = receives.popleft()
            if message[0] in (VERBS["send"], VERBS["send-imm"]) and message[2]:  # at its end: before it is a GRH
                ctypes.memmove(into.address + into.size - len(message[2]), message[2], len(message[2]))
        self.arrive(conn, [message], now_ns)

    def arrive_if_ready(self, conn, now_ns):
        """Deliver messages that need a receive, in order. The first one without a receive blocks all later ones."""
        qp, taking = conn.qp, (VERBS["send"], VERBS["write-imm"])
        while qp.held and conn.state == "up":
            if qp.held[0][0] in taking:
                if not conn.other.qp.receives:
                    self.not_ready(conn, now_ns)
                    return
                into = conn.other.qp.receives.popleft()
                if qp.held[0][0] == VERBS["send"]:
                    assert into.size >= len(qp.held[0][2])
                    ctypes.memmove(into.address, qp.held[0][2], len(qp.held[0][2]))
            qp.naks = 0
            self.arrive(conn, [self.spoilt(*qp.held.popleft())], now_ns)

    def spoilt(self, *message):
        """Return a message as it arrives; tests replace this method."""
        return message

    def not_ready(self, conn, now_ns):
        self.naks += 1
        conn.qp.naks += 1
        if conn.qp.naks > self.rnr_retry:
            conn.task.completion(conn, SimpleNamespace(status=13, wr_id=conn.qp.held[0][4]), now_ns)
            conn.task.settle(now_ns)
            return
        self.later(now_ns + self.min_rnr_ns, conn)

    def arrive(self, conn, chain, now_ns):
        for opcode, remote, data, imm, wr_id, signalled in chain:
            if opcode == VERBS["read"]:
                ctypes.memmove(data[0], remote, data[1])
            elif data and remote:  # a send has no place to go to
                ctypes.memmove(remote, data, len(data))
            if opcode in (VERBS["send"], VERBS["send-imm"], VERBS["write-imm"]):
                arrived = SimpleNamespace(status=0, wr_id=RECV_ID, imm_data=imm)
                conn.other.task.completion(conn.other, arrived, now_ns)
            if signalled:
                conn.task.completion(conn, SimpleNamespace(status=0, wr_id=wr_id), now_ns)
        conn.other.task.settle(now_ns)
        conn.task.settle(now_ns)
