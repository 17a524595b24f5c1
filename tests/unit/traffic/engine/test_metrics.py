"""Traffic metrics: equal to those of nccl-tests and numpy; a timeline contains every byte of its samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.traffic.engine import traffic_metrics
from faultbed.traffic.engine.run_results import Iteration, Sample


def iteration(index=0, *, compute_ns=0, comm_ns=1000, wait_ns=0):
    return Iteration(
        index=index,
        start_ns=0,
        end_ns=compute_ns + comm_ns,
        compute_ns=compute_ns,
        comm_ns=comm_ns,
        wait_ns=wait_ns,
        wrong_elements=0,
    )


def test_busbw_equals_that_of_nccl_tests():
    # 128 MiB in 1 ms over 8 ranks: algbw 134.2 GB/s, busbw x 2(n-1)/n
    assert traffic_metrics.algbw_gbytes_per_s(1 << 27, 1_000_000) == pytest.approx(134.217728)
    assert traffic_metrics.busbw_gbytes_per_s("all-reduce", 8, 1 << 27, 1_000_000) == pytest.approx(134.217728 * 1.75)
    assert traffic_metrics.busbw_factor("all-gather", 4) == pytest.approx(0.75)


def test_goodput_is_in_bits_per_second():
    assert traffic_metrics.goodput_bps(125_000_000, 1_000_000_000) == 1e9
    assert traffic_metrics.goodput_bps(1, 0) == 0.0


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_equals_that_of_numpy(values, percent):
    assert traffic_metrics.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-3)


def test_percentile_of_no_values_is_nan():
    assert math.isnan(traffic_metrics.percentile([], 50))


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 1000)), max_size=20))
def test_timeline_contains_all_bytes(places):
    samples = [Sample(endpoint="a", start_ns=at, duration_ns=100, size_bytes=size) for at, size in places]
    bins = traffic_metrics.timeline(samples, start_ns=0, end_ns=1000, bin_ns=70)
    assert len(bins) == 15
    assert sum(bins) == pytest.approx(sum(size for _, size in places))


def test_timeline_splits_samples_that_cross_a_bin_edge():
    sample = Sample(endpoint="a", start_ns=50, duration_ns=100, size_bytes=100)
    assert traffic_metrics.timeline([sample], start_ns=0, end_ns=200, bin_ns=100) == (50.0, 50.0)


def test_operation_time_is_that_of_the_rank_that_waits_least():
    fast = [iteration(0, comm_ns=5000), iteration(1, comm_ns=900), iteration(2)]
    late = [iteration(0, comm_ns=1000), iteration(1, comm_ns=4000)]
    assert traffic_metrics.operation_times_ns([fast, late]) == (1000, 900)


def test_straggler_is_the_rank_with_the_longest_compute_time():
    ranks = [[iteration(compute_ns=compute_ns)] for compute_ns in (100, 110, 250, 90)]
    assert traffic_metrics.straggler(ranks) == traffic_metrics.Straggler(rank=2, ratio=2.5)


def test_straggler_without_compute_is_the_rank_that_waits_least():
    ranks = [[iteration(comm_ns=comm_ns)] for comm_ns in (2900, 3000, 1500, 3100)]
    assert traffic_metrics.straggler(ranks) == traffic_metrics.Straggler(rank=2, ratio=2.0)


def test_straggler_needs_two_ranks_that_did_something():
    with pytest.raises(ValueError, match="at least two ranks"):
        traffic_metrics.straggler([[iteration()], []])
