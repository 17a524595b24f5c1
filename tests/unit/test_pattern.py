"""The pattern makes every misplaced, stale or damaged element visible."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from traffic.node import pattern


@given(ranks=st.integers(2, 8), iteration=st.integers(0, 1000), elements=st.integers(1, 20_000))
@settings(max_examples=50, deadline=None)
def test_sum_of_the_inputs_is_the_expected_result(ranks, iteration, elements):
    total = np.zeros(elements, dtype=np.float32)
    for rank in range(ranks):
        part = np.empty(elements, dtype=np.float32)
        pattern.fill(part, pattern.values(rank, iteration))
        total += part
    assert pattern.count_wrong(total, pattern.expected(ranks, iteration)) == 0
    total[elements // 2] += 1
    assert pattern.count_wrong(total, pattern.expected(ranks, iteration)) == 1


def test_a_segment_in_the_wrong_place_is_seen():
    data = np.empty(64 * 1024, dtype=np.float32)
    pattern.fill(data, pattern.expected(4, 3))
    data[16384:32768] = data[:16384].copy()
    assert pattern.count_wrong(data, pattern.expected(4, 3)) > 16000


def test_the_result_of_the_iteration_before_is_seen():
    data = np.empty(10_000, dtype=np.float32)
    pattern.fill(data, pattern.expected(4, 3))
    assert pattern.count_wrong(data, pattern.expected(4, 4)) > 9_000


def test_not_a_number_is_wrong():
    data = np.empty(5000, dtype=np.float32)
    pattern.fill(data, pattern.expected(2, 0))
    data[17] = np.nan
    assert pattern.count_wrong(data, pattern.expected(2, 0)) == 1
