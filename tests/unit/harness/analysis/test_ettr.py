"""Effective training time ratio: lost time lowers it, and it agrees with the published formula where it must."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import MS, T0, S, changed, synthetic_run

from faultbed.harness.analysis.ettr import ettr
from faultbed.harness.analysis.observe import observe
from faultbed.harness.analysis.prediction import predictions
from faultbed.harness.analysis.timeline import Baseline, Impact
from faultbed.harness.record.evidence.workload_evidence import Iteration, RankSeries

BASE = Baseline(start_ns=T0, end_ns=T0 + S, mean=1e6, floor=9e5, window_ns=S)


def impact(lost_ns):
    """An impact that cost this much time at a goodput of 1 MB/s."""
    return Impact(
        fired_ns=T0,
        cleared_ns=T0,
        recovered_ns=T0,
        recovery_ns=lost_ns,
        after_clear_ns=0,
        censored=False,
        min_ratio=0.0,
        lost_bytes=lost_ns / 1e9 * 1e6,
    )


def job(count, *, stall_ns=0, at=50, ingest_ns=0):
    """Two ranks, iterations of 100 ms one after the other, and one stall before iteration `at`."""
    steps, now = [], T0
    for index in range(count):
        now += stall_ns if index == at else 0
        step = Iteration(
            index=index, start_ns=now, compute_ns=60 * MS, comm_ns=30 * MS, wait_ns=10 * MS, ingest_ns=ingest_ns
        )
        steps.append(step)
        now = step.end_ns
    series = tuple(RankSeries(rank=rank, iterations=tuple(steps)) for rank in (0, 1))
    return changed(synthetic_run(), series=series, end_ns=now)


@given(count=st.integers(20, 200), stall_ms=st.integers(0, 20_000), ingest_ms=st.integers(0, 50))
def test_ettr_loses_only_stalls_and_storage_waits(count, stall_ms, ingest_ms):
    """The ratio measured from iterations equals the one predicted from the bytes that a stall withheld."""
    run = job(count, stall_ns=stall_ms * MS, at=10, ingest_ns=ingest_ms * MS)
    one = ettr(run, BASE, [impact(stall_ms * MS)], first_fault_ns=T0 + 9 * (100 + ingest_ms) * MS)
    assert one.healthy_ns == pytest.approx(100 * MS)
    assert one.ratio == pytest.approx(count * 100 / (count * (100 + ingest_ms) + stall_ms))
    assert one.predicted == pytest.approx(one.ratio)


def test_ettr_without_faults_is_one():
    one = ettr(job(30), BASE, (), first_fault_ns=T0 + 100 * S)
    assert (one.ratio, one.predicted) == (1.0, 1.0)


def test_ettr_without_healthy_iterations_is_none():
    assert ettr(job(30), BASE, (), first_fault_ns=T0 + 250 * MS) is None
    flow = changed(job(30), series=(RankSeries(rank=0),))
    assert ettr(flow, BASE, (), first_fault_ns=T0 + 100 * S) is None
    one = observe(flow).metrics["ettr"]
    assert (one.value, one.detail.partition(",")[0]) == (None, "not a job with iterations")


def test_ettr_interval_comes_from_the_fault_free_iterations_before_and_after():
    run, first_ns, settled_ns = job(60, stall_ns=S, at=30), T0 + 2 * S, T0 + 4 * S
    one = ettr(run, BASE, (), first_fault_ns=first_ns, settled_ns=settled_ns)
    assert one.interval().low == pytest.approx(one.ratio)
    assert one.interval().high == pytest.approx(one.ratio)
    assert "before the faults 20 fault-free iterations" in one.interval().method
    assert "after them 30 fault-free iterations" in one.interval().method
    moved = replace(one, settled_ns=tuple(2 * took_ns for took_ns in one.settled_ns)).interval()
    assert (moved.low, moved.high) == (pytest.approx(one.ratio), pytest.approx(2 * one.ratio)), "either level may be it"


@pytest.mark.parametrize(
    ("first_ms", "settled_ms"), [(400, 4000), (2000, 6600), (2000, None)], ids=["before", "after", "never settled"]
)
def test_ettr_with_one_control_only_has_no_interval(first_ms, settled_ms):
    """Four iterations before the faults, or after them, know nothing of their noise."""
    settled_ns = None if settled_ms is None else T0 + settled_ms * MS
    run = job(60, stall_ns=S, at=30)
    assert ettr(run, BASE, (), first_fault_ns=T0 + first_ms * MS, settled_ns=settled_ns).interval() is None


@pytest.mark.parametrize(
    "changes",
    [{"failure": "no spare is left", "workload": {}}, {"failure": None, "workload": {"iterations": 50}}],
    ids=["failed", "stopped"],
)
def test_ettr_of_a_run_that_ends_in_an_outage_counts_the_outage(changes):
    """30 iterations in 3 s, and then nothing for 27 s until the run ended: the ratio used to be 1."""
    run = changed(job(30), end_ns=T0 + 30 * S, **changes)
    for first_fault_ns in (T0 + 3 * S, T0 + 100 * S):
        one = ettr(run, None, (), first_fault_ns=first_fault_ns)
        assert one.healthy_ns == pytest.approx(100 * MS)
        assert one.ratio == pytest.approx(0.1)
        assert one.interval() is None, "no fault-free time is known after the outage"
    whole = changed(run, failure=None, workload={"iterations": 30})
    assert ettr(whole, None, (), first_fault_ns=T0 + 100 * S).ratio == 1, "the time after the last iteration is no loss"


def test_ettr_is_a_metric_with_a_prediction():
    run = synthetic_run()
    observed = observe(run)
    value = observed.metrics["ettr"].value
    assert 0.75 < value < 1
    (output,) = (prediction for prediction in predictions(run, observed) if prediction.what.startswith("effective"))
    assert output.measured == f"{value:.3f}"
    assert float(output.predicted) == pytest.approx(value, abs=0.1)
