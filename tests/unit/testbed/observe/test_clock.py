"""Clock offsets between the controller and its nodes."""

import time

import engine_labs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import changed, synthetic_run
from waiting import until

from faultbed.harness.analysis.observe import observe
from faultbed.testbed.observe.clock import ClockOffset, Exchange, drifted_ns, estimate, measure_by, renewed, widened
from faultbed.traffic.engine.engine_client import Engines

DELAYS = st.integers(min_value=0, max_value=50_000_000)


@given(
    offset=st.integers(min_value=-(10**15), max_value=10**15),
    rounds=st.lists(st.tuples(st.integers(min_value=0, max_value=10**12), DELAYS, DELAYS), min_size=1, max_size=8),
)
def test_clock_true_offset_is_within_the_stated_error(offset, rounds):
    """With any delays in the two directions, the error of the estimate is at most the stated one."""
    exchanges = [
        Exchange(sent_ns=at, node_ns=at + there - offset, received_ns=at + there + back) for at, there, back in rounds
    ]
    estimated = estimate(exchanges)
    assert abs(estimated.offset_ns - offset) <= estimated.error_ns
    assert estimated.to_controller(5) == 5 + estimated.offset_ns


def test_clock_shortest_round_trip_decides():
    slow = Exchange(sent_ns=0, node_ns=0, received_ns=1_000_000)
    quick = Exchange(sent_ns=100, node_ns=150, received_ns=200)
    assert estimate([slow, quick]).offset_ns == 0
    assert estimate([slow, quick]).error_ns == 50


OFFSETS = st.integers(min_value=-(10**9), max_value=10**9)


@given(
    before=OFFSETS, moved=OFFSETS, errors=st.tuples(DELAYS, DELAYS), wrong=st.tuples(st.floats(-1, 1), st.floats(-1, 1))
)
def test_clock_drift_is_at_most_the_true_movement(before, moved, errors, wrong):
    """The reported drift never exceeds the true one, whatever the errors of both measurements."""
    first, second = (
        ClockOffset(offset_ns=true + int(share * error), error_ns=error)
        for true, share, error in zip((before, before + moved), wrong, errors, strict=True)
    )
    assert drifted_ns(first, second) <= abs(moved)
    assert drifted_ns(first, second) >= abs(moved) - 2 * sum(errors)


class DriftingNode:
    """A node whose clock runs too fast by `ppm`, behind a channel with unequal delays, in simulated time."""

    def __init__(self, monkeypatch, *, ppm, there_ns, back_ns):
        self.now_ns, self.ppm, self.there_ns, self.back_ns = 10**12, ppm, there_ns, back_ns
        monkeypatch.setattr("faultbed.testbed.observe.clock.time.monotonic_ns", lambda: self.now_ns)

    def node_ns(self, at_ns):
        return at_ns + int((at_ns - 10**12) * self.ppm / 1e6) - 77_000

    def ask(self):
        self.now_ns += self.there_ns
        answer = self.node_ns(self.now_ns)
        self.now_ns += self.back_ns
        return answer


@given(
    ppm=st.floats(-500, 500),
    minutes=st.floats(0, 60),
    there_ns=DELAYS,
    back_ns=DELAYS,
    share=st.floats(0, 1),
)
def test_widened_offset_of_a_drifting_clock_always_covers_the_truth(ppm, minutes, there_ns, back_ns, share):
    """This holds for time stamps of the node at any moment between the two measurements."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        node = DriftingNode(monkeypatch, ppm=ppm, there_ns=there_ns, back_ns=back_ns)
        first = measure_by(node.ask)
        begin_ns = node.now_ns
        node.now_ns += int(minutes * 60e9)
        end_ns = node.now_ns
        result = widened(first, measure_by(node.ask))
    at_ns = begin_ns + int(share * (end_ns - begin_ns))

    assert result.offset_ns == first.offset_ns
    assert abs(result.to_controller(node.node_ns(at_ns)) - at_ns) <= result.error_ns + 2  # ns of rounding


def test_first_offset_alone_does_not_cover_a_clock_that_drifts(monkeypatch):
    """50 ppm over 20 minutes are 60 ms, far more than a round trip of 2 ms, so offsets need `widened`."""
    node = DriftingNode(monkeypatch, ppm=50, there_ns=10**6, back_ns=10**6)
    first = measure_by(node.ask)
    node.now_ns += 20 * 60 * 10**9
    at_ns = node.now_ns
    wrong_ns = abs(first.to_controller(node.node_ns(at_ns)) - at_ns)

    assert wrong_ns > 10 * first.error_ns
    assert widened(first, measure_by(node.ask)).error_ns >= wrong_ns
    assert renewed(first, measure_by(node.ask)).error_ns <= 2 * 10**6


def drifting_engines(monkeypatch, lab):
    """Return engines whose hosts' clocks jump ahead by 50 ms after the first measurement."""
    engines = Engines.start(lab, ["host1", "host3"])
    plain = engine_labs.node_ns
    monkeypatch.setattr(engine_labs, "node_ns", lambda: plain() + 50_000_000)
    return engines


def test_engines_widen_clocks_holds_the_drift_of_every_host(monkeypatch):
    with drifting_engines(monkeypatch, engine_labs.Lab(lambda _: None)) as engines:
        before = dict(engines.offsets)
        engines.widen_clocks(timeout_s=20.0)
        for host, offset in engines.offsets.items():
            assert offset.offset_ns == before[host].offset_ns
            assert offset.error_ns >= 50_000_000
        assert engines.events.empty(), "answers about clocks are no events of the traffic"


def test_engines_widen_clocks_ignores_an_answer_of_an_earlier_round(monkeypatch):
    """A late answer of an earlier round would look like a clock that is behind."""
    with Engines.start(engine_labs.Lab(lambda _: None), ["host1"]) as engines:
        before = engines.offsets["host1"]
        channel = engines._channels["host1"]
        channel.out.put({"event": "clock", "monotonic_ns": engine_labs.node_ns() - 10**10, "seq": 0})
        engines.widen_clocks(timeout_s=20.0)
        assert engines.offsets["host1"].error_ns < before.error_ns + 10**9


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_engines_widen_clocks_does_not_wait_for_an_engine_that_is_gone(monkeypatch, when):
    with drifting_engines(monkeypatch, engine_labs.Lab(lambda _: None)) as engines:
        before = dict(engines.offsets)
        engine = engines._channels["host3"]
        if when == "before":
            engine.do_quit()
            until(lambda: engines._gone)
        else:
            monkeypatch.setattr(engine, "send", lambda _message: engine.do_quit())
        began = time.monotonic()
        engines.widen_clocks(timeout_s=60.0)
        assert time.monotonic() - began < 30
        assert engines.offsets["host1"].error_ns >= 50_000_000
        assert engines.offsets["host3"] == before["host3"]


def test_run_clock_error_holds_the_drift_during_the_run(monkeypatch):
    """After the hosts' clocks have moved by 50 ms, the result of a flow has an error of at least that."""
    plain = engine_labs.node_ns

    def on_start(engine):
        monkeypatch.setattr(engine_labs, "node_ns", lambda: plain() + 50_000_000)
        engine.done()

    result = engine_labs.Lab(on_start).start().wait(60.0)

    assert min(result.clock_error_ns.values()) >= 50_000_000


def test_after_clear_interval_holds_the_error_of_the_target_clock():
    """The removal is stamped with the clock of the fault's target, so its error is part of the interval."""
    run, change = synthetic_run(), msgspec.structs.replace

    def off(receipt):
        return change(receipt, cleared=change(receipt.cleared, clock_error_ns=70_000_000))

    faults = tuple(change(fault, receipt=off(fault.receipt)) for fault in run.injected.faults)
    plain, reported = observe(run).metrics, observe(changed(run, faults=faults)).metrics
    names = [name for name, one in plain.items() if name.startswith("after_clear.") and one.value and one.interval]

    assert names
    for name in names:
        assert reported[name].interval.high == pytest.approx(plain[name].interval.high + 0.07)
