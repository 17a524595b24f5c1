"""Labs whose nodes run stand-ins for traffic engines, behind the interface of real nodes."""

from __future__ import annotations

import queue
import time

from house import HOUSE

from faultbed.testbed.errors import CommandFailed
from faultbed.testbed.inventory import lab_inventory
from faultbed.traffic.flows import flow_run


def node_ns():
    """Return the time of the engines' hosts, which differs from the controller's."""
    return time.monotonic_ns() - 77_000 * 10**9


class Engine:
    """Stand-in for one host's engine: it accepts every connection, and `on_start` decides what happens then."""

    def __init__(self, lab, host):
        self.lab, self.host = lab, host
        self.out = queue.Queue()
        self.qpn = 16
        self.generation = -1
        self.labels = []
        self.ended = False

    def emit(self, event, **fields):
        self.out.put({"event": event, **fields})

    def send(self, message):
        getattr(self, f"do_{message.pop('do')}")(**message)

    def receive(self, *, timeout_s):
        try:
            return self.out.get(timeout=min(timeout_s, 0.05))
        except queue.Empty:
            raise CommandFailed("silence") from None

    def close(self):
        self.ended = True

    def do_clock(self, seq=None):
        self.emit("clock", monotonic_ns=node_ns(), seq=seq)

    def do_task(self, task, **_):
        self.emit("task", task=task)

    def do_qp(self, task, conn, generation, psn, flow_label):
        self.qpn += 1
        self.labels.append(flow_label)
        self.generation = generation
        self.emit("qp", task=task, conn=conn, generation=generation, end={"qpn": self.qpn, "psn": psn})

    def do_connect(self, task, conn, generation, peer):
        answer = "join_failed" if self.lab.dead_from is not None and generation >= self.lab.dead_from else "joined"
        self.emit(answer, task=task, conn=conn, generation=generation, error="no route")

    def do_go(self, task, conn, generation):
        if task == "tx" and generation == 1:
            self.emit("recovered", task=task, conn=conn, generation=1, at_ns=node_ns())
            self.done()

    def do_start(self, task):
        self.lab.on_start(self)

    def do_stop(self, task):
        self.done()

    def do_quit(self):
        self.out.put(None)

    def error(self, status="RETRY_EXC_ERR"):
        self.emit(
            "qp_error", task="tx", conn=0, generation=self.generation, qpn=self.qpn, status=status, at_ns=node_ns()
        )

    def done(self):
        now_ns = node_ns()
        totals = [{"conn": 0, "messages": 10, "first_ns": now_ns, "last_ns": now_ns}]
        self.emit("sample", task="tx", start_ns=now_ns, sizes=[40960, 0])
        self.emit("done", task="tx", start_ns=now_ns - 1_000_000, end_ns=now_ns, totals=totals, rnr=self.lab.rnr)


class Lab:
    """A lab whose nodes are engines; `on_start` is called for each engine that is started."""

    engine = Engine
    kind = "soft"
    rnr = None
    inventory_model = lab_inventory.load(HOUSE / "inventory" / "soft.yml")
    topology = inventory_model.topology

    def __init__(self, on_start, dead_from=None):
        self.on_start, self.dead_from = on_start, dead_from
        self.engines = []

    def open_module(self, name, _module):
        self.engines.append(self.engine(self, name))
        return self.engines[-1]

    def start(self, on_event=None, **change):
        spec = {"src": "host1", "dst": "host3", "message_bytes": 4096, "duration_s": 1.0, "peer_deadline_s": 0.6}
        return flow_run.start(self, flow_run.FlowSpec(**{**spec, **change}), on_event)


RANK_OF = {"host1": 0, "host2": 1, "host3": 2, "host4": 3}
FIELDS = ("at_ns", "what", "iteration", "step", "peer", "qpn", "segment", "psn")


def lane(peer, direction, qpn, state, *, step):
    where = {"peer": peer, "direction": direction, "qpn": qpn, "state": state, "step": step}
    return {**where, "begun": 2, "done": 1, "segments": 4}


class RankEngine(Engine):
    """An engine of ranks: it ends at once, or calls the lab's `on_start`. It answers `dump` and `forget`."""

    def do_start(self, task):
        self.lab.on_start(self)

    def do_dump(self, task):
        self.emit(
            "flight",
            task=task,
            phase="comm",
            iteration=3,
            lanes=[lane(1, "in", 9, "lost", step=2), lane(3, "out", 8, "up", step=4)],
            fields=FIELDS,
            entries=[[time.monotonic_ns(), "post", 3, 2, 1, 9, 0, 256]],
        )

    def do_forget(self):
        self.emit("sample", task="rank0", start_ns=0, sizes=[7])  # too late for anybody
        self.emit("forgotten")

    def do_go(self, task, conn, generation):
        if generation == 1:
            self.emit("redone", task=task, conn=conn, generation=1, segments=3, size_bytes=12288)
            self.emit("recovered", task=task, conn=conn, generation=1, at_ns=time.monotonic_ns())
            self.over()

    def over(self):
        now_ns = time.monotonic_ns()
        task = f"rank{RANK_OF[self.host]}"
        self.emit(
            "iteration", task=task, index=0, start_ns=now_ns - 2000, end_ns=now_ns, compute_ns=0, comm_ns=1000,
            wait_ns=0, wrong=0, phases_ns=[1000],
        )  # fmt: skip
        self.emit("done", task=task, start_ns=now_ns - 2000, end_ns=now_ns, iterations=1, wrong=0)


class RankLab(Lab):
    """A lab whose engines run ranks."""

    engine = RankEngine


class NothingStarts:
    """A lab on which the start of any program fails the test."""

    kind = "soft"
    topology = Lab.topology

    def node(self, name, *_words):
        raise AssertionError(f"{name} was touched")

    open_module = node
