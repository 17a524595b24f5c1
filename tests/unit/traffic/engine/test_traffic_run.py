"""A run always ends with a typed outcome, and its result has every rebuild of a QP.

The engines here use the real protocol over real queues, without verbs. The controller is under test.
"""

from __future__ import annotations

import threading
import time

import pytest
from engine_labs import Engine, Lab, node_ns
from waiting import until

from faultbed.testbed.errors import LabError
from faultbed.traffic.engine.task_specs import QpParams


def test_flow_without_errors_completes_with_counts():
    events = []
    lab = Lab(lambda engine: engine.done())
    result = lab.start(events.append).wait(10)
    assert (result.outcome, result.where, result.rebuilds) == ("completed", None, ())
    assert result.size_bytes == 40960
    assert result.goodput_bps == pytest.approx(40960 * 8 * 1000)
    assert [event["event"] for event in events] == ["qps", "ready", "sample", "done"]
    assert all(engine.ended for engine in lab.engines)
    assert result.to_dict()["spec"]["qp"]["retry_cnt"] == 6


def test_standstill_is_reported_in_controller_time():
    """The clock offset used to be applied twice, so standstills before the job counted as in the job."""

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
def test_connection_reports_flow_label_and_transport(transport, label):
    lab = Lab(lambda engine: engine.done())
    with lab.start(qp=QpParams(flow_label=label), transport=transport, verb="send") as running:
        assert [(connection.transport, connection.flow_label) for connection in running.connections] == [
            (transport, label)
        ]
        running.abort("it has been seen")


@pytest.mark.parametrize(("base", "labels"), [(0, [1, 2, 3, 1]), (9, [9, 10, 11, 9])])
def test_flows_with_entropy_share_flow_labels_in_turn(base, labels):
    """Each engine receives the label of each of its QPs, and the connections report it."""
    lab = Lab(lambda engine: engine.done())
    with lab.start(qps=4, entropy=3, qp=QpParams(flow_label=base)) as running:
        assert [connection.flow_label for connection in running.connections] == labels
        running.abort("it has been seen")
    for engine in lab.engines:
        assert engine.labels == labels


def test_lost_qp_is_rebuilt_and_reported():
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
def test_late_receives_outcome_is_typed_and_names_its_counter(naks, status, outcome):
    def on_start(engine):
        engine.done() if status is None else engine.error(status)

    lab = Lab(on_start)
    if naks is not None:
        lab.rnr = {"naks": {"counter": "rcvd_rnr_err", "count": naks}}
    result = lab.start(verb="send", late_receives_ms=5.0).wait(10)
    assert (result.rnr.outcome, result.rnr.naks, result.rnr.lost_qps) == (outcome, naks, 1 if status else 0)
    assert ("rcvd_rnr_err" in str(result.rnr)) == (naks is not None)
    assert result.to_dict()["rnr"]["outcome"] == outcome


def test_unreachable_peer_is_a_failure_with_its_location():
    result = Lab(lambda engine: engine.error(), dead_from=1).start().wait(20)
    assert result.outcome == "failed"
    assert result.where.startswith("host1:rxe0 -> host3:rxe0: unreachable for 1 s")
    assert len(result.rebuilds) == 1
    assert result.rebuilds[0].recovered_ns is None


def test_lost_engine_is_a_failure_with_its_location():
    result = Lab(lambda engine: engine.do_quit()).start().wait(10)
    assert result.outcome == "failed"
    assert "host1: the traffic engine is gone" in result.where


def test_engine_error_is_a_failure():
    lab = Lab(lambda engine: engine.emit("error", error="the soft GPU is gone", where="tx"))
    assert lab.start().wait(10).where == "host1, tx: the soft GPU is gone"


def test_run_without_progress_ends():
    result = Lab(lambda engine: None).start(stall_deadline_s=0.3).wait(10)
    assert "nothing moved" in result.where


def test_stop_ends_a_run_in_order():
    running = Lab(lambda engine: None).start()
    running.stop()
    assert running.wait(10).outcome == "completed"


def test_wait_times_out_and_leaves_nothing_running():
    lab = Lab(lambda engine: None)
    with pytest.raises(LabError, match="not over"):
        lab.start().wait(0.2)
    assert all(engine.ended for engine in lab.engines)


def test_wait_error_warns_that_the_aborted_run_may_still_be_ending(monkeypatch):
    """The run's thread waits for an engine that answers slowly, as over SSH."""
    monkeypatch.setattr("faultbed.traffic.engine.running_traffic.ABORT_TIMEOUT_S", 0.3)
    release = threading.Event()
    lab = Lab(lambda engine: engine.emit("sample", task="tx", start_ns=node_ns(), sizes=[4096, 0]))
    with lab.start(lambda event: event["event"] == "sample" and release.wait(20)) as running:
        with pytest.raises(LabError, match=r"not over after 0 s; aborted 0\.3 s ago, it may still be ending"):
            running.wait(0.2)
        assert not running.is_over
        release.set()
    until(lambda: running.is_over)
    with pytest.raises(LabError, match="not over after 0 s; it was ended"):
        Lab(lambda engine: None).start().wait(0.2)


def test_run_that_cannot_connect_does_not_start(monkeypatch):
    monkeypatch.setattr("faultbed.traffic.engine.running_traffic.SETUP_TIMEOUT_S", 0.5)
    lab = Lab(lambda engine: None, dead_from=0)
    with pytest.raises(LabError, match=r"did not start: .*host1:rxe0 -> host3:rxe0"):
        lab.start()
    assert all(engine.ended for engine in lab.engines)


@pytest.mark.parametrize(("wrong", "outcome"), [(0, "completed"), (3, "failed")])
def test_wrong_byte_is_a_failure_with_its_location(wrong, outcome):
    """The receiver stops when the sender is done, and reports the number of checked bytes."""

    class Looking(Engine):
        def done(self):
            if self.host == "host1":
                super().done()
            else:
                now_ns = node_ns()
                looked = {"totals": [], "checked_bytes": 40960, "wrong_bytes": wrong}
                self.emit("done", task="rx", start_ns=now_ns, end_ns=now_ns, **looked)

    class LookingLab(Lab):
        engine = Looking

    lab = LookingLab(lambda engine: engine.done() if engine.host == "host1" else None)
    result = lab.start(verb="send", check=True).wait(10)
    assert (result.outcome, result.checked_bytes, result.wrong_bytes) == (outcome, 40960, wrong)
    assert result.where == ("host1 -> host3: 3 of 40960 bytes are wrong" if wrong else None)
    assert result.size_bytes == 40960, "of the sender"


def test_unreliable_flow_counts_what_the_receiver_reports():
    """The receiver stops when the sender is done, and the flow ends with the receiver's count."""

    def on_start(engine):
        if engine.host == "host1":
            engine.done()

    class Counting(Engine):
        def do_stop(self, task):
            now_ns = time.monotonic_ns()
            totals = [{"conn": 0, "messages": 7, "first_ns": now_ns, "last_ns": now_ns}]
            self.emit("done", task=task, start_ns=now_ns, end_ns=now_ns, totals=totals)

    class CountingLab(Lab):
        engine = Counting

    result = CountingLab(on_start).start(transport="ud", verb="send").wait(10)
    assert (result.outcome, result.sent, result.messages, result.size_bytes) == ("completed", 10, 7, 7 * 4096)
    assert Lab(lambda engine: engine.done()).start().wait(10).sent == 10


def test_failed_unreliable_flow_counts_arrived_bytes_once():
    """Both ends report samples: what the sender sent is no goodput, least of all beside what arrived of it."""

    def on_start(engine):
        task, sizes = ("tx", [8192, 4096]) if engine.host == "host1" else ("rx", [4096, 0])
        engine.emit("sample", task=task, start_ns=node_ns(), sizes=sizes)
        if engine.host == "host3":  # the second one to start
            engine.emit("error", error="out of memory", where="rx")

    result = Lab(on_start).start(transport="ud", verb="send").wait(10)
    assert (result.outcome, result.size_bytes) == ("failed", 4096)
