"""The pattern makes every misplaced, stale or damaged element visible, and reductions are exact in every type."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traffic.node import elements, pattern
from traffic.node.pattern import Pattern

TYPES = st.sampled_from(sorted(elements.STORED))


@given(
    ranks=st.integers(2, 128),
    iteration=st.integers(0, 1000),
    dtype=TYPES,
    redop=st.sampled_from(["sum", "max", "avg"]),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=80)
def test_reduced_in_any_order_the_inputs_are_the_expected_result(ranks, iteration, dtype, redop, order):
    of = Pattern(ranks, dtype, redop)
    inputs = [of.period(rank, iteration) for rank in range(ranks)]
    order.shuffle(inputs)
    reduce = elements.reducer(dtype, redop)
    total = inputs[0].copy()
    for other in inputs[1:]:
        reduce(total, other)
    if redop == "avg":
        elements.average(total, ranks, dtype)
    assert pattern.count_wrong(total, of.reduced(list(range(ranks)), iteration)) == 0


@given(index=st.integers(0, 20_000), size=st.integers(1, 20_000))
def test_any_part_is_known_by_its_index(index, size):
    period = Pattern(4, "fp32", "sum").period(2, 1)
    whole, part = np.empty(index + size, dtype=np.float32), np.empty(size, dtype=np.float32)
    pattern.fill(whole, period)
    pattern.fill(part, period, index)
    assert (part == whole[index:]).all()
    assert pattern.count_wrong(part, period, index) == 0
    part[size // 2] += 1
    assert pattern.count_wrong(part, period, index) == 1


@pytest.mark.parametrize("dtype", sorted(elements.STORED))
@pytest.mark.parametrize("ranks", [2, 8, 128])
def test_what_is_of_another_place_rank_or_iteration_is_seen(dtype, ranks):
    """Even of numbers as small as bf16 needs for 128 ranks, a good part differs."""
    of = Pattern(ranks, dtype, "sum")
    data = np.empty(64 * 1024, dtype=elements.STORED[dtype])
    pattern.fill(data, of.period(1, 3))
    for other in (of.period(0, 3), of.period(1, 4)):
        assert pattern.count_wrong(data, other) > 0.3 * len(data)
    data[16384:32768] = data[:16384].copy()
    assert pattern.count_wrong(data, of.period(1, 3)) > 0.3 * 16384


def test_not_a_number_is_wrong():
    data = np.empty(5000, dtype=np.float32)
    period = Pattern(4, "fp32", "sum").reduced([0, 1, 2, 3], 0)
    pattern.fill(data, period)
    data[17] = np.nan
    assert pattern.count_wrong(data, period) == 1


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100))
def test_bf16_is_the_nearest_one_ties_to_even(value):
    exact = np.array([value], dtype=np.float32)
    bits = int(elements._narrowed(exact)[0])
    found = abs(float(elements._widened(np.array([bits], dtype=np.uint16))[0]) - value)
    for other in (bits - 1, bits + 1):
        if 0 <= other & 0x7FFF < 0x7F80 and 0 <= other < 1 << 16:
            beside = abs(float(elements._widened(np.array([other], dtype=np.uint16))[0]) - value)
            assert found < beside or (found == beside and bits % 2 == 0)
