"""The data pattern reveals every misplaced, stale or damaged element, and reductions are exact in every type."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import samples

from faultbed.traffic.node.ranks import elements, pattern
from faultbed.traffic.node.ranks.pattern import Pattern
from faultbed.traffic.node.ranks.rank_memory import Memory

TYPES = st.sampled_from(sorted(elements.STORED))


@given(
    ranks=st.integers(2, 128),
    iteration=st.integers(0, 1000),
    dtype=TYPES,
    redop=st.sampled_from(["sum", "max", "avg"]),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=samples(80))
def test_pattern_reduced_in_any_order_is_the_expected_result(ranks, iteration, dtype, redop, order):
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
def test_pattern_fill_of_a_part_depends_on_its_index(index, size):
    period = Pattern(4, "fp32", "sum").period(2, 1)
    whole, part = np.empty(index + size, dtype=np.float32), np.empty(size, dtype=np.float32)
    pattern.fill(whole, period)
    pattern.fill(part, period, index)
    assert (part == whole[index:]).all()
    assert pattern.count_wrong(part, period, index) == 0
    part[size // 2] += 1
    assert pattern.count_wrong(part, period, index) == 1


@given(
    index=st.integers(0, 20_000),
    size=st.integers(1, 20_000),
    dtype=TYPES,
    redop=st.sampled_from(["sum", "max", "avg"]),
)
def test_pattern_part_of_a_period_verifies_exactly_its_own_elements(index, size, dtype, redop):
    of = Pattern(4, dtype, redop)
    for part, whole in (
        (of.period(2, 1, index, size), of.period(2, 1)),
        (of.reduced([0, 2], 1, index, size), of.reduced([0, 2], 1)),
    ):
        data = np.empty(size, dtype=elements.STORED[dtype])
        pattern.fill(data, whole, index)
        assert pattern.count_wrong(data, part) == 0
        bits = data.view(f"u{data.itemsize}")
        bits[-1] ^= 1
        assert pattern.count_wrong(data, part) == 1


@st.composite
def regions(draw):
    """Return disjoint regions of the memory of four ranks, some of them adjacent, and the memory's length."""
    made, end = [], 0
    for _ in range(draw(st.integers(1, 6))):
        offset = end + draw(st.sampled_from([0, 0, 3]))
        count = draw(st.sampled_from([1, 7, 300, pattern.PERIOD, 9000]))
        members = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
        made.append((offset, count, members, draw(st.integers(0, 10_000))))
        end = offset + count
    return made, end + 5


@given(
    of=regions(),
    dtype=TYPES,
    redop=st.sampled_from(["sum", "max", "avg"]),
    choice=st.randoms(use_true_random=False),
)
@settings(max_examples=samples(60), deadline=None)
def test_regions_match_separate_regions_and_count_every_wrong_element(of, dtype, redop, choice):
    (rows, length), of_ranks = of, Pattern(4, dtype, redop)
    data = np.zeros(length, dtype=elements.STORED[dtype])
    alone = data.copy()
    made = pattern.Regions(of_ranks, rows)
    for iteration in (3, 4):
        made.fill(data, iteration)
        for offset, count, members, index in rows:
            pattern.fill(alone[offset : offset + count], of_ranks.reduced(members, iteration, index, count))
        assert data.tobytes() == alone.tobytes()
        assert made.count_wrong(data, iteration) == 0
    places = sorted(offset + at for offset, count, *_ in rows for at in {0, count - 1, choice.randrange(count)})
    data.view(f"u{data.itemsize}")[places] ^= 1
    assert made.count_wrong(data, 4) == len(set(places))


@pytest.mark.parametrize("dtype", sorted(elements.STORED))
@pytest.mark.parametrize("ranks", [2, 8, 128])
def test_pattern_has_all_its_numbers_about_equally_often(dtype, ranks):
    of = Pattern(ranks, dtype, "sum")
    numbers = np.concatenate(
        [
            of.hashed(pattern.ranks_of([[1]]), pattern.places_of([0], pattern.PERIOD), iteration)[0]
            for iteration in range(8)
        ]
    )
    counts = np.bincount(numbers, minlength=of.values)
    assert len(counts) == of.values
    assert counts.min() > 0.5 * len(numbers) / of.values
    assert counts.max() < 1.5 * len(numbers) / of.values


@pytest.mark.parametrize("dtype", sorted(elements.STORED))
@pytest.mark.parametrize("ranks", [2, 8, 128])
def test_count_wrong_detects_other_positions_ranks_and_iterations(dtype, ranks):
    """Even with the small numbers that bf16 needs for 128 ranks, a good part of the elements differs."""
    of = Pattern(ranks, dtype, "sum")
    data = np.empty(64 * 1024, dtype=elements.STORED[dtype])
    pattern.fill(data, of.period(1, 3))
    for other in (of.period(0, 3), of.period(1, 4)):
        assert pattern.count_wrong(data, other) > 0.3 * len(data)
    data[16384:32768] = data[:16384].copy()
    assert pattern.count_wrong(data, of.period(1, 3)) > 0.3 * 16384


def test_count_wrong_counts_nan():
    data = np.empty(5000, dtype=np.float32)
    period = Pattern(4, "fp32", "sum").reduced([0, 1, 2, 3], 0)
    pattern.fill(data, period)
    data[17] = np.nan
    assert pattern.count_wrong(data, period) == 1


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100))
def test_bf16_conversion_rounds_to_nearest_even(value):
    exact = np.array([value], dtype=np.float32)
    bits = int(elements._narrowed(exact)[0])
    result = abs(float(elements._widened(np.array([bits], dtype=np.uint16))[0]) - value)
    for other in (bits - 1, bits + 1):
        if 0 <= other & 0x7FFF < 0x7F80 and 0 <= other < 1 << 16:
            beside = abs(float(elements._widened(np.array([other], dtype=np.uint16))[0]) - value)
            assert result < beside or (result == beside and bits % 2 == 0)


def nearest(quotient, dtype):
    """Return the number of a type that is nearest to a fraction, ties to even, by search."""
    kind = np.float32 if dtype == "bf16" else elements.STORED[dtype]
    guess = kind(float(quotient))
    if dtype == "bf16":
        bits = int(guess.view(np.uint32)) >> 16
        candidates = [np.uint32((bits + step) << 16).view(np.float32) for step in (-1, 0, 1) if bits + step >= 0]
        last = [bits + step for step in (-1, 0, 1) if bits + step >= 0]
    else:
        candidates = [np.nextafter(guess, kind(0)), guess, np.nextafter(guess, kind(np.inf))]
        last = [int(one.view(f"u{one.itemsize}")) for one in candidates]
    return min(
        zip(candidates, last, strict=True), key=lambda one: (abs(Fraction(float(one[0])) - quotient), one[1] % 2)
    )[1]


@given(
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    divisor=st.integers(1, 300),
    numbers=st.lists(st.integers(0, 1 << 24), min_size=1, max_size=20),
)
@settings(max_examples=samples(100), deadline=None)
def test_exactly_rounds_any_quotient_to_nearest_even(dtype, divisor, numbers):
    numbers = [number % (elements.EXACT[dtype] + 1) for number in numbers]
    result = pattern.exactly(np.array(numbers, dtype=np.int64), divisor, dtype)
    assert result.dtype == elements.STORED[dtype]
    bits = result.view(f"u{result.itemsize}").tolist()
    assert bits == [nearest(Fraction(number, divisor), dtype) for number in numbers]


def test_count_wrong_counts_a_flipped_sign_bit_of_zero():
    """A numeric comparison calls -0.0 and 0.0 equal; moved data must be equal in every bit."""
    period = Pattern(4, "fp32", "sum").period(1, 3)
    data = np.empty(4 * pattern.PERIOD, dtype=np.float32)
    pattern.fill(data, period)
    zeros = np.flatnonzero(data == 0)
    data[zeros] = -0.0
    assert len(zeros) > 10
    assert pattern.count_wrong(data, period) == len(zeros)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_count_wrong_sees_averages_that_are_not_rounded(dtype, monkeypatch):
    """The result is computed with broken arithmetic, and the independent expectation detects that."""

    def cut_off(array, ranks, kind):
        wide = array.astype(np.float32) if kind == "fp16" else elements._widened(array)
        quotient = (wide / np.float32(ranks)).view(np.uint32)
        if kind == "bf16":
            array[:] = (quotient >> 16).astype(np.uint16)
        else:
            array[:] = (quotient & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float16)

    memory = Memory(
        {"elements": 5000, "ranks": 3, "rank": 0, "results": [(0, 5000, -1, 0)], "groups": [[0, 1, 2]], "fills": []},
        dtype,
        "avg",
    )
    for break_it in (False, True):
        memory.array[:] = 0
        for rank in range(3):
            part = np.empty_like(memory.array)
            pattern.fill(part, memory.pattern.period(rank, 5))
            memory.reduce(memory.array, part)
        if break_it:
            monkeypatch.setattr("faultbed.traffic.node.ranks.rank_memory.average", cut_off)
        memory.divide()
        assert (memory.count_wrong(5) > 500) == break_it
