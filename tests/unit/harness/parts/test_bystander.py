"""Metrics of the bystander: their values, when they have none, and that a no-op fault never passes."""

import random

import msgspec
import pytest
from judged_runs import plan_of
from synthetic_run import MS, T0, S, changed, synthetic_run

from faultbed.harness.analysis.effects.fault_windows import acting_windows
from faultbed.harness.analysis.links.expected_load import expected_loads
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.judge import judge, observed_of
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.parts.bystander.bystander_evidence import BystanderEvidence
from faultbed.harness.parts.part import Planned
from faultbed.harness.record.evidence.workload_evidence import Sample
from faultbed.harness.report.plots.goodput_plot import goodput_chart
from faultbed.harness.verdict import Verdict

RUN = synthetic_run()
NAMES = ("bystander.goodput_ratio", "bystander.gap", "bystander.qp_errors")
FIRST = min(acting_windows(RUN).values(), key=lambda one: one.start_ns)


def with_bystander(rate_at, **words):
    """The made-up run beside a flow that carries `rate_at(ns)` bytes in each 100 ms, with 3 % of noise."""
    draw = random.Random(7)
    samples = tuple(
        Sample(t_ns=t_ns, bytes=round(rate_at(t_ns) * draw.gauss(1, 0.03)))
        for t_ns in range(T0, RUN.workload.end_ns, 100 * MS)
    )
    return BystanderEvidence(src="host2:rxe1", dst="host4:rxe1", samples=samples, **words)


def steady(_t_ns):
    return 50_000


def during(window, share):
    return lambda t_ns: 50_000 * (share if window.start_ns <= t_ns < window.cleared_ns else 1)


def seen(flow, run=RUN):
    """Return everything that is known of a run with this bystander."""
    return observed_of(run, Sealed() if flow is None else Sealed().having(flow))


def metrics_of(flow, run=RUN):
    return {name: seen(flow, run).metrics[name] for name in NAMES}


def test_bystander_that_no_fault_touches_has_a_ratio_of_one():
    metrics = metrics_of(with_bystander(steady))
    ratio = metrics["bystander.goodput_ratio"]
    assert ratio.value == pytest.approx(1, abs=0.03)
    assert ratio.interval.low < 1 < ratio.interval.high
    assert metrics["bystander.gap"].value == 0
    assert (metrics["bystander.gap"].interval.low, metrics["bystander.gap"].interval.high) == (0, pytest.approx(0.2))
    assert metrics["bystander.qp_errors"].value == 0


def test_slowed_bystander_has_its_ratio_and_the_responsible_fault():
    name, window = max(acting_windows(RUN).items(), key=lambda item: item[1].cleared_ns - item[1].start_ns)
    ratio = metrics_of(with_bystander(during(window, 0.5)))["bystander.goodput_ratio"]
    length_s = (window.cleared_ns - window.start_ns) / 1e9
    assert ratio.value == pytest.approx((0.5 * length_s + 1) / (length_s + 1), abs=0.04)
    assert f"around {name} " in ratio.detail


def test_bystander_silent_while_a_fault_is_removed_has_a_gap():
    end_ns = FIRST.cleared_ns
    flow = with_bystander(lambda t_ns: 0 if end_ns <= t_ns < end_ns + 600 * MS else 50_000)
    gap = metrics_of(flow)["bystander.gap"]
    assert gap.interval.low - 0.1 <= 0.6 <= gap.interval.high
    assert gap.detail.endswith("in the fault-free start 0.0 s")


@pytest.mark.parametrize(
    ("rate_at", "doubt"),
    [
        (lambda t_ns: 50_000 if t_ns < FIRST.start_ns - S else 0, "it carried nothing around"),
        (lambda t_ns: 50_000 if t_ns < RUN.workload.end_ns - 2 * S else 0, "it carried nothing at the end"),
    ],
)
def test_bystander_that_fell_silent_without_an_error_has_no_known_number_of_errors(rate_at, doubt):
    """A queue pair without data does not fail, and one that retries has not failed yet: 0 errors prove nothing."""
    flow = with_bystander(rate_at)
    errors = metrics_of(flow)["bystander.qp_errors"]
    assert (errors.value, errors.censored) == (0, True)
    assert doubt in errors.detail
    expectation = Expectation(metric=METRICS["bystander.qp_errors"], maximum=0)
    assert _verdict_of("bystander.qp_errors", flow, [expectation]) is Verdict.INCONCLUSIVE


def test_bystander_with_a_message_every_second_has_a_known_number_of_errors():
    errors = metrics_of(with_bystander(lambda t_ns: 50_000 if (t_ns - T0) % S == 200 * MS else 0))[
        "bystander.qp_errors"
    ]
    assert (errors.value, errors.censored) == (0, False)


def test_bystander_gap_that_the_end_of_data_cuts_is_censored_although_an_earlier_one_is_longer():
    last = max(acting_windows(RUN).values(), key=lambda one: one.cleared_ns)
    end_ns = last.cleared_ns + 900 * MS
    run = changed(RUN, end_ns=end_ns)
    flow = with_bystander(
        lambda t_ns: 0 if last.start_ns <= t_ns < last.start_ns + 600 * MS or t_ns >= end_ns - 400 * MS else 50_000
    )
    gap = metrics_of(flow, run)["bystander.gap"]
    assert gap.value == pytest.approx(0.6, abs=0.11)
    assert gap.censored


def test_bystander_that_failed_or_carried_nothing_decides_nothing():
    failed = metrics_of(with_bystander(steady, failure="host4:rxe1 is gone", qp_errors=(T0 + S, RUN.workload.end_ns)))
    assert failed["bystander.goodput_ratio"].value is None
    assert "host4:rxe1 is gone" in failed["bystander.gap"].detail
    assert failed["bystander.qp_errors"].value == 1
    assert "1 more failed before the first fault" in failed["bystander.qp_errors"].detail
    silent = BystanderEvidence(src="a:r", dst="b:r", samples=())
    assert metrics_of(silent)["bystander.gap"].value is None
    assert {one.value for one in metrics_of(None).values()} == {None}


@pytest.mark.parametrize(
    "words", [{"samples": ()}, {"samples": (Sample(t_ns=T0, bytes=0),)}, {"failure": "host4:rxe1 is gone"}], ids=str
)
def test_bystander_without_data_does_not_pass_a_bound_on_errors(words):
    """A queue pair that carries nothing does not fail."""
    flow = msgspec.structs.replace(with_bystander(steady), **words)
    expected = (Expectation(metric=METRICS["bystander.qp_errors"], maximum=0),)
    assert _verdict_of("bystander.qp_errors", flow, expected) is Verdict.INCONCLUSIVE
    lost = msgspec.structs.replace(flow, qp_errors=(RUN.workload.end_ns,))
    assert _verdict_of("bystander.qp_errors", lost, expected) is Verdict.FAIL


@pytest.mark.parametrize(("until_s", "expected"), [(0.9, Verdict.PASS), (2.5, Verdict.FAIL), (None, Verdict.FAIL)])
def test_bystander_gap_that_lasts_beyond_a_faults_removal_counts_whole(until_s, expected):
    """If only its part before the removal counted, a flow that died half a second later would have a gap of half a
    second."""
    last = max(acting_windows(RUN).values(), key=lambda one: one.cleared_ns)
    begin_ns = last.cleared_ns + S // 2
    end_ns = RUN.workload.end_ns if until_s is None else last.cleared_ns + round(until_s * S)
    flow = with_bystander(lambda t_ns: 0 if begin_ns <= t_ns < end_ns else 50_000)
    assert _verdict_of("bystander.gap", flow, (Expectation(metric=METRICS["bystander.gap"], maximum=1.0),)) is expected


def test_bystander_gap_that_the_end_of_the_data_cuts_short_is_at_least_that_long():
    last = max(acting_windows(RUN).values(), key=lambda one: one.cleared_ns)
    run = changed(RUN, end_ns=last.cleared_ns + S)
    flow = with_bystander(lambda t_ns: 0 if t_ns >= last.cleared_ns + S // 2 else 50_000)
    gap = metrics_of(flow, run)["bystander.gap"]
    assert (gap.value, gap.censored) == (pytest.approx(0.5, abs=0.11), True)


def test_bystander_without_faults_has_no_ratio():
    metrics = metrics_of(with_bystander(steady), changed(RUN, faults=()))
    assert metrics["bystander.goodput_ratio"].value is None
    assert metrics["bystander.gap"].value is None


@pytest.mark.parametrize(
    ("name", "bound"), [("bystander.goodput_ratio", {"minimum": 0.5}), ("bystander.gap", {"maximum": 1.0})]
)
def test_bystander_that_no_fault_touched_passes_only_if_the_faults_fired(name, bound):
    flow, expected = with_bystander(steady), (Expectation(metric=METRICS[name], **bound),)
    assert _verdict_of(name, flow, expected) is Verdict.PASS
    assert _verdict_of(name, flow, expected, synthetic_run(fired=False)) is Verdict.INCONCLUSIVE
    assert _verdict_of(name, None, expected) is Verdict.INCONCLUSIVE


def _verdict_of(name, flow, expected, run=RUN):
    before = Planned(plan=plan_of(run), expectations=expected)
    judgement = judge(before=before, run=run, observed=seen(flow, run)).verdict
    return next(check.verdict for check in judgement.checks if check.name.startswith(name))


@pytest.mark.usefixtures("drawn_anew")
def test_bystander_has_a_row_in_the_goodput_chart():
    assert "bystander host2:rxe1 to host4:rxe1" in goodput_chart(RUN, seen(with_bystander(steady)), []).wide
    assert "bystander" not in goodput_chart(RUN, seen(None), []).wide


def test_bystander_makes_bytes_of_links_unpredictable_and_round_trips():
    flow = with_bystander(steady, qp_errors=(T0 + S,), failure="host4:rxe1 is gone")
    assert "bystander" in expected_loads(RUN, seen(flow).beside).why
    assert msgspec.json.decode(msgspec.json.encode(flow), type=BystanderEvidence) == flow


@pytest.mark.parametrize(
    ("apart_ms", "error_ms", "verdict"),
    [
        (-20, 30, Verdict.INCONCLUSIVE),
        (+20, 30, Verdict.INCONCLUSIVE),
        (-20, 10, Verdict.PASS),
        (+20, 10, Verdict.FAIL),
    ],
)
def test_qp_error_of_the_bystander_within_the_clocks_error_of_the_arming_decides_nothing(apart_ms, error_ms, verdict):
    """An error of 20 ms in a clock decides whether this QP error is before or during the fault, so it decides
    nothing."""
    flow = with_bystander(steady, qp_errors=(FIRST.start_ns + apart_ms * MS,))
    receipts = [fault.receipt for fault in RUN.injected.faults]
    own_ns = max(receipt.armed.clock_error_ns or 0 for receipt in receipts if receipt is not None)
    assert own_ns < 10 * MS
    run = changed(RUN, clock_error_ns=error_ms * MS)
    expected = (Expectation(metric=METRICS["bystander.qp_errors"], maximum=0),)
    assert _verdict_of("bystander.qp_errors", flow, expected, run) is verdict


def test_bystander_evidence_with_a_sample_twice_is_refused():
    """Its bytes would count twice."""
    flow = with_bystander(steady)
    content = msgspec.json.encode(flow).replace(b"]],", b"],[%d,1]]," % flow.samples[-1].t_ns, 1)
    with pytest.raises(msgspec.ValidationError, match=r"bystander: the sample at .* appears twice"):
        msgspec.json.decode(content, type=BystanderEvidence)
