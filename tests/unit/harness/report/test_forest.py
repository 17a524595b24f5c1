"""Ratios on one logarithmic axis: 1 in the middle, half and double at equal distance, all ends visible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.confidence import Interval
from faultbed.harness.report.comparison.compare import Row
from faultbed.harness.report.comparison.forest import forest


def row(ratio, low=None, high=None, own=None):
    interval = None if low is None else Interval(low=low, high=high, method="")
    own = interval if own is None else Interval(low=own[0], high=own[1], method="")
    return Row(metric="m", unit="s", a=1.0, b=ratio, ratio=ratio, interval=interval, says="worse", why="", own=own)


def test_forest_scale_is_symmetric_around_one():
    result = forest([row(2.0), row(0.5), row(1.0)])
    double, half, one = (mark.dot for mark in result.marks)
    assert one == 50
    assert double - 50 == pytest.approx(50 - half)
    assert double > 90
    assert [tick.text for tick in result.ticks].count("1") == 1


def test_forest_interval_beyond_the_scale_is_cut_and_marked():
    wild, tame = forest([row(30.0, 0.0, 90.0), row(1.1, 1.05, 1.2)]).marks
    assert (wild.left, wild.width, wild.dot) == (0, 100, 100)
    assert (wild.below, wild.above) == (True, True)
    assert (tame.below, tame.above) == (False, False)


def test_forest_row_without_a_ratio_has_no_mark():
    assert forest([row(None)]).marks == ()


def test_forest_ratio_of_zero_is_beyond_the_scale():
    """A ratio of 0: A lost five queue pairs, and B none."""
    (mark,) = forest([row(0.0)]).marks
    assert (mark.dot, mark.below, mark.above) == (0, True, False)


ratios = st.floats(min_value=1e-6, max_value=1e6)


@given(st.lists(st.tuples(ratios, ratios, ratios), min_size=1, max_size=8))
def test_forest_marks_stay_inside_and_in_order(rows):
    made = [row(sorted(one)[1], min(one), max(one), own=(sorted(one)[1], max(one))) for one in rows]
    result = forest(made)
    for mark in result.marks:
        assert 0 <= mark.left <= mark.dot + 1e-9
        assert mark.dot <= mark.left + mark.width + 1e-9 <= 100 + 1e-6
        assert mark.left - 1e-9 <= mark.own_left
        assert mark.own_left + mark.own_width <= mark.left + mark.width + 1e-9
    lefts = [tick.left for tick in result.ticks]
    assert lefts == sorted(lefts)
    assert lefts[0] >= 0
    assert lefts[-1] <= 100
