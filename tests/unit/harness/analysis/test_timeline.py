"""Recovery, dip and lost bytes, on synthetic series with a known answer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.analysis import timeline
from faultbed.harness.record.evidence.workload_evidence import Iteration, RankSeries, Sample

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


def test_impact_of_an_outage_is_measured_to_the_bin():
    one = measure(steady(30, [(10, 11.3, 0.0)]), 10, 11)

    assert one.recovery_ns == 1_300 * MS
    assert one.after_clear_ns == 300 * MS
    assert one.min_ratio == pytest.approx(0.0)
    assert one.lost_bytes == pytest.approx(1.3 * RATE)
    assert not one.censored


@given(st.integers(min_value=2, max_value=60), st.floats(min_value=0.0, max_value=0.7))
def test_impact_recovery_equals_the_outage_at_any_length_and_depth(length, left):
    one = measure(steady(30, [(10, 10 + length / 10, left)]), 10, 10.2)

    assert one.recovery_ns == length * STEP
    assert one.lost_bytes == pytest.approx((1 - left) * RATE * length / 10)


def test_impact_without_a_dip_has_zero_recovery():
    one = measure(steady(30, noise=0.03), 10, 11)

    assert one.recovery_ns == 0
    assert one.lost_bytes == 0
    assert one.min_ratio > 0.9


def test_impact_relapse_within_the_hold_is_the_same_outage():
    assert measure(steady(30, [(10, 11, 0.0), (11.6, 12.2, 0.0)]), 10, 11).recovery_ns == 2_200 * MS


def test_impact_excludes_a_dip_long_after_the_fault():
    assert measure(steady(30, [(10, 10.5, 0.0), (20, 21, 0.0)]), 10, 10.5).recovery_ns == 500 * MS


def test_impact_includes_a_dip_that_begins_when_the_fault_is_lifted():
    assert measure(steady(30, [(13, 14, 0.0)]), 10, 12.5).recovery_ns == 4 * S


def test_impact_without_recovery_is_censored_with_a_lower_bound():
    one = measure(steady(30, [(10, 30, 0.2)]), 10, 12)

    assert one.censored
    assert one.recovered_ns is None
    assert 18 * S <= one.recovery_ns <= 20 * S


def test_impact_is_censored_at_the_next_fault():
    one = measure(steady(30, [(10, 20, 0.1)]), 10, 11, until_s=14)

    assert one.censored
    assert one.recovery_ns <= 4 * S


def test_impact_of_a_fault_in_the_last_moment_is_unknown():
    assert measure(steady(12), 11.8, 11.9) is None


def test_impact_bursts_are_no_dips_if_the_window_holds_two_iterations():
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


def test_baseline_needs_a_long_and_active_start():
    assert timeline.baseline(steady(30), first_fault_ns=3 * S, window_ns=S) is None
    assert timeline.baseline(steady(30, [(0, 30, 0.0)]), first_fault_ns=10 * S, window_ns=S) is None
    assert timeline.baseline(steady(30), first_fault_ns=10 * S, window_ns=5 * S) is None


def test_baseline_floor_is_below_the_mean_and_from_the_start_only():
    base = timeline.baseline(steady(30, [(15, 30, 0.0)], noise=0.1), first_fault_ns=10 * S, window_ns=S)

    assert 0.8 * RATE < base.floor < base.mean
    assert base.end_ns == 10 * S
    assert base.healthy == pytest.approx(0.95 * base.floor)


samples = st.lists(
    st.tuples(st.integers(min_value=0, max_value=9_900), st.integers(min_value=0, max_value=10**9)),
    max_size=40,
)


@given(samples)
def test_grid_keeps_every_byte_of_the_samples(points):
    one = timeline.goodput([Sample(t * MS, size) for t, size in points], start_ns=0, end_ns=10 * S, sample_ns=100 * MS)

    assert len(one.bytes) == 100
    assert one.bytes.sum() == pytest.approx(sum(size for _, size in points))


@given(st.lists(st.floats(min_value=0, max_value=1e9), min_size=10, max_size=80))
def test_rolling_mean_equals_the_mean_of_each_window(bins):
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
    result = timeline.job_time_ratio(job(600, 50), job(400, 75))

    assert result.iterations == 50
    assert result.ratio == pytest.approx(1.5)
    assert timeline.job_time_ratio(job(600, 50), job(600, 0)) is None


# Censoring: values that the data do not show are bounds.


def test_impact_data_end_before_the_dip_is_censored():
    """The job ends 1.2 s after the fault fired. The dip might only have come with the BGP hold timer, after 3 s."""
    one = measure(steady(11.2, noise=0.03), 10, 11.25)

    assert (one.censored, one.recovery_ns, one.recovered_ns) == (True, 0, None)
    assert one.reason == "no dip yet when the data end 1.2 s after it fired, before it was cleared"


def test_impact_next_fault_before_any_dip_is_censored():
    one = measure(steady(40), 10, 30, until_s=11.5)

    assert (one.censored, one.recovery_ns) == (True, 0)


def test_impact_recovered_for_less_than_the_hold_is_censored_at_the_return():
    one = measure(steady(13.8, [(10, 12, 0.0)]), 10, 11)

    assert one.censored
    assert one.recovery_ns == 2 * S
    assert "not yet for long enough" in one.reason


def test_impact_fault_that_was_never_cleared_is_censored():
    """The fault was active until the end of the data, although goodput recovered earlier."""
    one = measure(steady(30, [(10, 12, 0.0)]), 10, 30)

    assert (one.censored, one.recovery_ns) == (True, 2 * S)


def test_impact_unsteady_fault_free_start_is_censored():
    """A stall before the fault puts the floor near 0, so nothing could fall below it."""
    one = measure(steady(40, [(4, 5.5, 0.01), (10, 20, 0.1)]), 10, 20)

    assert one.censored
    assert "too unsteady" in one.reason


holes = st.lists(st.tuples(st.integers(100, 250), st.integers(1, 60), st.floats(0, 1)), max_size=4)


@given(holes, st.integers(0, 80), st.integers(105, 300), st.integers(0, 40))
def test_impact_of_truncated_data_never_contradicts_the_whole(holes, lasts, end, noise):
    """With less data, an uncensored value equals that of the whole run, and a censored one is not above it."""
    whole = steady(40, [(at / 10, (at + length) / 10, left) for at, length, left in holes], noise=noise / 1000)
    cut = series(whole.bytes[:end])
    base = timeline.baseline(whole, first_fault_ns=10 * S, window_ns=S)
    fault = {"fired_ns": 10 * S, "cleared_ns": 10 * S + lasts * STEP}
    full, part = timeline.impact(whole, base, **fault), timeline.impact(cut, base, **fault)

    assert full is not None
    if part is None:
        return
    if part.censored:
        assert part.recovery_ns <= full.recovery_ns
        assert part.reason
    else:
        assert not full.censored
        assert (part.recovery_ns, part.after_clear_ns) == (full.recovery_ns, full.after_clear_ns)
        assert cut.end_ns >= fault["cleared_ns"] + timeline.HOLD_NS
        assert cut.end_ns >= part.recovered_ns + timeline.HOLD_NS


# Several faults: a dip belongs to the fault that caused it.


def two_faults(one, first, second):
    windows = {
        name: timeline.Window(start_ns=round(fired * S), fired_ns=round(fired * S), cleared_ns=round(cleared * S))
        for name, (fired, cleared) in {"first": first, "second": second}.items()
    }
    base = timeline.baseline(one, first_fault_ns=10 * S, window_ns=S)
    assert base is not None
    return timeline.impacts(one, base, windows)


def test_impacts_first_dip_after_the_second_firing_is_assigned_to_neither():
    """The first fault is active for 20 s and takes effect after 3 s; the second is harmless and active for 1 s in
    between."""
    impacts = two_faults(steady(40, [(13, 30, 0.1)]), (10, 30), (11.5, 12.5))

    assert (impacts["first"].censored, impacts["first"].recovery_ns) == (True, 0)
    assert "second began" in impacts["first"].reason
    assert (impacts["second"].censored, impacts["second"].recovery_ns) == (True, 0)
    assert "the dip may be that of first" in impacts["second"].reason


def test_impacts_of_distant_faults_contain_only_their_own_dip():
    impacts = two_faults(steady(60, [(10, 13, 0.0), (30, 32, 0.2)]), (10, 12), (30, 31))

    assert [(impact.censored, impact.recovery_ns) for impact in impacts.values()] == [(False, 3 * S), (False, 2 * S)]


def test_impacts_second_fault_during_an_unrecovered_first_is_censored():
    """The outage of the first fault lasts 25 s and covers the second fault, which was harmless."""
    impacts = two_faults(steady(60, [(10, 35, 0.0)]), (10, 12), (30, 31))

    assert impacts["first"].censored
    assert impacts["first"].recovery_ns >= 18 * S
    assert (impacts["second"].censored, impacts["second"].recovery_ns) == (True, 0)


def test_impacts_armed_fault_without_observed_firing_is_a_suspect():
    one = steady(40, [(16, 18, 0.1)])
    base = timeline.baseline(one, first_fault_ns=10 * S, window_ns=S)
    result = timeline.impacts(
        one,
        base,
        {
            "unseen": timeline.Window(start_ns=10 * S, fired_ns=None, cleared_ns=20 * S),
            "seen": timeline.Window(start_ns=15 * S, fired_ns=15 * S, cleared_ns=17 * S),
        },
    )

    assert list(result) == ["seen"]
    assert result["seen"].censored


@given(
    st.integers(100, 200),
    st.integers(5, 100),
    st.integers(100, 250),
    st.integers(5, 100),
    st.integers(0, 60),
    st.integers(5, 100),
)
def test_impacts_dip_of_one_fault_is_never_assigned_to_the_other(at1, lasts1, at2, lasts2, delay, dips):
    """Only the first fault lowers goodput: from `delay` on, for `dips`, and at the latest until a hold time after its
    end."""
    at2 = at1 + 1 + abs(at2 - at1)
    begin = min(at1 + delay, at1 + lasts1)
    one = steady(70, [(begin / 10, (begin + dips) / 10, 0.1)])
    impacts = two_faults(one, (at1 / 10, (at1 + lasts1) / 10), (at2 / 10, (at2 + lasts2) / 10))

    assert impacts["second"].recovery_ns == 0
    first = impacts.get("first")  # none: the second one began within one window
    if first is not None:
        assert first.censored or first.recovery_ns == (begin + dips - at1) * STEP
        assert first.recovery_ns <= (begin + dips - at1) * STEP


# The harness's own reads are no part of the baseline.


def test_baseline_excludes_reads_of_the_harness():
    """Reading the counters costs the job 80 % of its goodput for 1.5 s before the fault."""
    one = steady(30, [(8.0, 9.5, 0.2)])
    quiet = timeline.baseline(one, first_fault_ns=10 * S, window_ns=S, reads=[(8 * S, int(9.5 * S))])
    loaded = timeline.baseline(one, first_fault_ns=10 * S, window_ns=S)

    assert loaded.floor < 0.5 * RATE
    assert quiet.floor == pytest.approx(RATE)
    assert quiet.mean == pytest.approx(RATE)


def test_baseline_reads_that_leave_too_little_is_none():
    reads = [(0, 3 * S), (int(4.5 * S), 5 * S)]

    assert timeline.baseline(steady(30), first_fault_ns=6 * S, window_ns=S, reads=reads) is None
    assert timeline.baseline(steady(30), first_fault_ns=9 * S, window_ns=S, reads=reads) is not None


def test_baseline_stretch_shorter_than_a_window_counts_for_the_mean_only():
    """A read splits 9 s into stretches of 4.4 s and 3.1 s. A window of 3.5 s fits only into the first."""
    one = steady(30, [(6.5, 9.6, 0.8)])
    base = timeline.baseline(
        one, first_fault_ns=int(9.6 * S), window_ns=int(3.5 * S), reads=[(int(5.4 * S), int(6.4 * S))]
    )

    assert base.floor == pytest.approx(RATE)
    assert 0.9 * RATE < base.mean < RATE


@given(st.lists(st.tuples(st.integers(-20, 320), st.integers(0, 50)), max_size=6))
def test_baseline_ignores_bytes_during_reads(reads):
    """The bytes in bins of reads change neither the mean nor the floor."""
    windows = [(at * STEP, (at + length) * STEP) for at, length in reads]
    plain = steady(30, noise=0.1)
    other = series(plain.bytes.copy())
    for at, length in reads:
        if at + length > 0:
            other.bytes[max(at, 0) : at + length + 1] = 0
    args = {"first_fault_ns": 20 * S, "window_ns": S, "reads": windows}
    a, b = timeline.baseline(plain, **args), timeline.baseline(other, **args)

    assert a == b


def test_lowest_share_is_that_of_the_slowest_second_after_the_warm_up():
    """A second at a third of the rate, in 20 s; a slow first second is the warm-up's."""
    one = steady(20, [(0, 1, 0.1), (9, 10, 1 / 3)])
    mean = (19 - 2 / 3) / 19
    assert timeline.lowest_share(one, until_ns=20 * S, window_ns=S) == pytest.approx(1 / 3 / mean)
    assert timeline.lowest_share(one, until_ns=9 * S, window_ns=S) == pytest.approx(1)


@pytest.mark.parametrize("one", [series([]), steady(3), steady(20, [(0, 20, 0.0)])])
def test_lowest_share_of_too_little_goodput_is_unknown(one):
    assert timeline.lowest_share(one, until_ns=20 * S, window_ns=S) is None
