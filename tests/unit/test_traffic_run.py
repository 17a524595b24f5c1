"""A run always ends in a typed outcome, and every rebuild of a QP is in its result.

The engines here speak the real protocol over real queues, without verbs: what is tested is the controller.
"""

from __future__ import annotations

import queue
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from testbed import inventory
from testbed.errors import CommandFailed, LabError
from traffic import flow
from traffic.plan import QpParams


def node_ns():
    """The time of the engines' hosts, which is not the controller's."""
    return time.monotonic_ns() - 77_000 * 10**9


class Engine:
    """One host's engine: connects whatever it is asked to; `on_start` decides what happens then."""

    def __init__(self, lab, host):
        self.lab, self.host = lab, host
        self.out = queue.Queue()
        self.qpn = 16
        self.generation = -1
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

    def do_clock(self):
        self.emit("clock", monotonic_ns=node_ns())

    def do_task(self, task, **_):
        self.emit("task", task=task)

    def do_qp(self, task, conn, generation, psn):
        self.qpn += 1
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
    kind = "soft"
    rnr = None
    topology = inventory.load(Path("inventory/soft.yml")).topology

    def __init__(self, on_start, dead_from=None):
        self.on_start, self.dead_from = on_start, dead_from
        self.engines = []

    def node(self, name):
        lab = self

        class Node:
            def open(self, _argv):
                lab.engines.append(Engine(lab, name))
                return lab.engines[-1]

        return Node()

    def python(self, module):
        return [module]

    def ensure_code(self, name):
        pass

    def start(self, on_event=None, **change):
        spec = {"src": "host1", "dst": "host3", "message_bytes": 4096, "duration_s": 1.0, "peer_deadline_s": 0.6}
        return flow.start(self, flow.FlowSpec(**{**spec, **change}), on_event)


def test_a_clean_flow_is_completed_and_counted():
    events = []
    lab = Lab(lambda engine: engine.done())
    result = lab.start(events.append).wait(10)
    assert (result.outcome, result.where, result.rebuilds) == ("completed", None, ())
    assert result.size_bytes == 40960
    assert result.goodput_bps == pytest.approx(40960 * 8 * 1000)
    assert [event["event"] for event in events] == ["qps", "ready", "sample", "done"]
    assert all(engine.ended for engine in lab.engines)
    assert result.to_dict()["spec"]["qp"]["retry_cnt"] == 6


def test_when_an_engine_stood_still_is_told_in_the_controllers_time():
    """Once it was moved by the hosts' offset twice, and what stood still before the job counted as in it."""

    def stood(engine):
        now_ns = node_ns()
        engine.emit("standstill", start_ns=now_ns - 5, end_ns=now_ns)
        engine.done()

    begun_ns = time.monotonic_ns()
    running = Lab(stood).start()
    running.wait(10)
    (one,) = running.standstills
    assert one.end_ns - one.start_ns == 5
    assert begun_ns - 10**9 < one.end_ns < time.monotonic_ns() + 10**9


@pytest.mark.parametrize(("transport", "label"), [("rc", 77), ("uc", 77), ("ud", 0)])
def test_a_connection_says_by_what_its_port_is_chosen(transport, label):
    lab = Lab(lambda engine: engine.done())
    with lab.start(qp=QpParams(flow_label=label), transport=transport, verb="send") as running:
        assert [(one.transport, one.flow_label) for one in running.connections] == [(transport, label)]
        running.abort("it has been seen")


def test_a_lost_qp_is_rebuilt_and_reported():
    running = Lab(lambda engine: engine.error()).start()
    result = running.wait(10)
    (rebuild,) = result.rebuilds
    assert result.outcome == "recovered"
    assert rebuild.attempts == 1
    assert rebuild.error_ns <= rebuild.rebuilt_ns <= rebuild.recovered_ns
    assert result.connections[0].generation == 1
    assert [error.status for error in result.qp_errors] == ["RETRY_EXC_ERR"]


@pytest.mark.parametrize(
    ("naks", "status", "outcome"),
    [(0, None, "none"), (7, None, "waited"), (None, None, "unknown"), (7, "RNR_RETRY_EXC_ERR", "exceeded")],
)
def test_what_late_receives_came_to_is_typed_and_names_its_counter(naks, status, outcome):
    def on_start(engine):
        engine.done() if status is None else engine.error(status)

    lab = Lab(on_start)
    if naks is not None:
        lab.rnr = {"naks": {"counter": "rcvd_rnr_err", "count": naks}}
    result = lab.start(verb="send", late_receives_ms=5.0).wait(10)
    assert (result.rnr.outcome, result.rnr.naks, result.rnr.lost_qps) == (outcome, naks, 1 if status else 0)
    assert ("rcvd_rnr_err" in str(result.rnr)) == (naks is not None)
    assert result.to_dict()["rnr"]["outcome"] == outcome


def test_a_peer_that_stays_away_is_a_failure_that_says_where():
    result = Lab(lambda engine: engine.error(), dead_from=1).start().wait(20)
    assert result.outcome == "failed"
    assert result.where.startswith("host1:rxe0 -> host3:rxe0: unreachable for 1 s")
    assert len(result.rebuilds) == 1
    assert result.rebuilds[0].recovered_ns is None


def test_an_engine_that_dies_is_a_failure_that_says_where():
    result = Lab(lambda engine: engine.do_quit()).start().wait(10)
    assert result.outcome == "failed"
    assert "host1: the traffic engine is gone" in result.where


def test_what_an_engine_cannot_do_is_a_failure():
    lab = Lab(lambda engine: engine.emit("error", error="the soft GPU is gone", where="tx"))
    assert lab.start().wait(10).where == "host1, tx: the soft GPU is gone"


def test_a_run_in_which_nothing_moves_ends():
    result = Lab(lambda engine: None).start(stall_deadline_s=0.3).wait(10)
    assert "nothing moved" in result.where


def test_stop_brings_an_orderly_end():
    running = Lab(lambda engine: None).start()
    running.stop()
    assert running.wait(10).outcome == "completed"


def test_waiting_has_a_deadline_and_leaves_nothing():
    lab = Lab(lambda engine: None)
    with pytest.raises(LabError, match="not over"):
        lab.start().wait(0.2)
    assert all(engine.ended for engine in lab.engines)


def test_a_run_that_cannot_connect_does_not_start(monkeypatch):
    monkeypatch.setattr("traffic.run.SETUP_TIMEOUT_S", 0.5)
    lab = Lab(lambda engine: None, dead_from=0)
    with pytest.raises(LabError, match=r"did not start: .*host1:rxe0 -> host3:rxe0"):
        lab.start()
    assert all(engine.ended for engine in lab.engines)


@pytest.mark.parametrize(("wrong", "outcome"), [(0, "completed"), (3, "failed")])
def test_a_wrong_byte_is_a_failure_that_says_where(wrong, outcome):
    """The receiver is told to stop when the sender is done, and says what it has looked at."""

    class Looking(Engine):
        def done(self):
            if self.host == "host1":
                super().done()
            else:
                now_ns = node_ns()
                looked = {"totals": [], "checked_bytes": 40960, "wrong_bytes": wrong}
                self.emit("done", task="rx", start_ns=now_ns, end_ns=now_ns, **looked)

    class LookingLab(Lab):
        def node(self, name):
            def open_(_argv):
                self.engines.append(Looking(self, name))
                return self.engines[-1]

            return SimpleNamespace(open=open_)

    lab = LookingLab(lambda engine: engine.done() if engine.host == "host1" else None)
    result = lab.start(verb="send", check=True).wait(10)
    assert (result.outcome, result.checked_bytes, result.wrong_bytes) == (outcome, 40960, wrong)
    assert result.where == ("host1 -> host3: 3 of 40960 bytes are wrong" if wrong else None)
    assert result.size_bytes == 40960, "of the sender"


def test_over_an_unreliable_transport_the_receiver_says_what_came():
    """It is told to stop when the sender is done, and the flow is over when it has counted."""

    def on_start(engine):
        if engine.host == "host1":
            engine.done()

    class Counting(Engine):
        def do_stop(self, task):
            now_ns = time.monotonic_ns()
            totals = [{"conn": 0, "messages": 7, "first_ns": now_ns, "last_ns": now_ns}]
            self.emit("done", task=task, start_ns=now_ns, end_ns=now_ns, totals=totals)

    class CountingLab(Lab):
        def node(self, name):
            lab = self

            class Node:
                def open(self, _argv):
                    lab.engines.append(Counting(lab, name))
                    return lab.engines[-1]

            return Node()

    result = CountingLab(on_start).start(transport="ud", verb="send").wait(10)
    assert (result.outcome, result.sent, result.messages, result.size_bytes) == ("completed", 10, 7, 7 * 4096)
    assert Lab(lambda engine: engine.done()).start().wait(10).sent == 10
