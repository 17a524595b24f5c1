"""Recovery, dip and lost bytes, on series of which the right answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis import timeline
from harness.record.measurements import Iteration, RankSeries, Sample

S = 1_000_000_000
MS = 1_000_000
STEP = 100 * MS
RATE = 10_000_000  # bytes/s


def series(bins):
    return timeline.Goodput(t0_ns=0, step_ns=STEP, bytes=np.asarray(bins, dtype=np.float64))


def steady(seconds, holes=(), noise=0.0):
    """Steady goodput with `holes` of (start_s, end_s, share that is left)."""
    draw = np.random.default_rng(3)
    bins = np.full(int(seconds * 10), RATE / 10) * (1 + noise * draw.standard_normal(int(seconds * 10)))
    for start, end, left in holes:
        bins[round(start * 10) : round(end * 10)] *= left
    return series(bins)


def measure(one, fired_s, cleared_s, until_s=None, window_ns=S):
    base = timeline.baseline(one, first_fault_ns=int(fired_s * S), window_ns=window_ns)
    assert base is not None
    until_ns = None if until_s is None else int(until_s * S)
    return timeline.impact(one, base, fired_ns=int(fired_s * S), cleared_ns=int(cleared_s * S), until_ns=until_ns)


def test_an_outage_is_measured_to_the_bin():
    one = measure(steady(30, [(10, 11.3, 0.0)]), 10, 11)

    assert one.recovery_ns == 1_300 * MS
    assert one.after_clear_ns == 300 * MS
    assert one.min_ratio == pytest.approx(0.0)
    assert one.lost_bytes == pytest.approx(1.3 * RATE)
    assert not one.censored


@given(st.integers(min_value=2, max_value=60), st.floats(min_value=0.0, max_value=0.7))
def test_recovery_equals_the_outage_whatever_its_length_and_depth(length, left):
    one = measure(steady(30, [(10, 10 + length / 10, left)]), 10, 10.2)

    assert one.recovery_ns == length * STEP
    assert one.lost_bytes == pytest.approx((1 - left) * RATE * length / 10)


def test_no_dip_is_recovery_in_no_time():
    one = measure(steady(30, noise=0.03), 10, 11)

    assert one.recovery_ns == 0
    assert one.lost_bytes == 0
    assert one.min_ratio > 0.9


def test_a_relapse_within_the_hold_is_the_same_outage():
    assert measure(steady(30, [(10, 11, 0.0), (11.6, 12.2, 0.0)]), 10, 11).recovery_ns == 2_200 * MS


def test_a_dip_long_after_the_fault_is_not_its_doing():
    assert measure(steady(30, [(10, 10.5, 0.0), (20, 21, 0.0)]), 10, 10.5).recovery_ns == 500 * MS


def test_a_dip_that_begins_only_when_the_fault_is_lifted_counts():
    assert measure(steady(30, [(13, 14, 0.0)]), 10, 12.5).recovery_ns == 4 * S


def test_never_back_is_censored_with_a_lower_bound():
    one = measure(steady(30, [(10, 30, 0.2)]), 10, 12)

    assert one.censored
    assert one.recovered_ns is None
    assert 18 * S <= one.recovery_ns <= 20 * S


def test_the_next_fault_ends_what_can_be_known_of_this_one():
    one = measure(steady(30, [(10, 20, 0.1)]), 10, 11, until_s=14)

    assert one.censored
    assert one.recovery_ns <= 4 * S


def test_a_fault_in_the_last_moment_says_nothing():
    assert measure(steady(12), 11.8, 11.9) is None


def test_bursts_are_not_dips_when_the_window_holds_two_iterations():
    bins = np.zeros(300)
    bins[::7] = RATE
    ranks = [
        RankSeries(
            rank=0,
            iterations=tuple(
                Iteration(index=i, start_ns=i * 700 * MS, compute_ns=600 * MS, comm_ns=100 * MS, wait_ns=0)
                for i in range(40)
            ),
        )
    ]
    window_ns = timeline.rolling_window_ns(ranks, STEP)

    assert window_ns == 1_400 * MS
    assert measure(series(bins), 10, 11, window_ns=window_ns).recovery_ns == 0


def test_a_short_or_silent_start_is_no_baseline():
    assert timeline.baseline(steady(30), first_fault_ns=3 * S, window_ns=S) is None
    assert timeline.baseline(steady(30, [(0, 30, 0.0)]), first_fault_ns=10 * S, window_ns=S) is None
    assert timeline.baseline(steady(30), first_fault_ns=10 * S, window_ns=5 * S) is None


def test_the_floor_is_below_the_mean_and_comes_from_the_start_only():
    base = timeline.baseline(steady(30, [(15, 30, 0.0)], noise=0.1), first_fault_ns=10 * S, window_ns=S)

    assert 0.8 * RATE < base.floor < base.mean
    assert base.end_ns == 10 * S
    assert base.healthy == pytest.approx(0.95 * base.floor)


samples = st.lists(
    st.tuples(st.integers(min_value=0, max_value=9_900), st.integers(min_value=0, max_value=10**9)),
    max_size=40,
)


@given(samples)
def test_laying_samples_on_the_grid_keeps_every_byte(points):
    one = timeline.goodput([Sample(t * MS, size) for t, size in points], start_ns=0, end_ns=10 * S, sample_ns=100 * MS)

    assert len(one.bytes) == 100
    assert one.bytes.sum() == pytest.approx(sum(size for _, size in points))


@given(st.lists(st.floats(min_value=0, max_value=1e9), min_size=10, max_size=80))
def test_rolling_is_the_plain_mean_of_each_window(bins):
    expected = [sum(bins[i : i + 10]) for i in range(len(bins) - 9)]

    np.testing.assert_allclose(timeline.rolling(series(bins), S), expected, rtol=1e-6, atol=1.0)


def test_series_on_different_grids_are_not_added():
    with pytest.raises(ValueError, match="same grid"):
        timeline.total([series([1.0]), series([1.0, 2.0])])


def job(length_ms, count):
    return [
        RankSeries(
            rank=rank,
            iterations=tuple(
                Iteration(
                    index=i,
                    start_ns=i * length_ms * MS,
                    compute_ns=length_ms * MS // 2,
                    comm_ns=length_ms * MS // 4,
                    wait_ns=length_ms * MS // 4,
                )
                for i in range(count)
            ),
        )
        for rank in range(2)
    ]


def test_job_times_are_compared_over_the_iterations_both_finished():
    found = timeline.job_time_ratio(job(600, 50), job(400, 75))

    assert found.iterations == 50
    assert found.ratio == pytest.approx(1.5)
    assert timeline.job_time_ratio(job(600, 50), job(600, 0)) is None
