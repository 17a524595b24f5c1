"""Charts of long runs are thinned to their extremes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.report.plots.thinning import extremes, longest

LENGTHS = st.lists(st.floats(0, 1e6), min_size=1, max_size=300)


@given(LENGTHS, st.integers(1, 40))
def test_extremes_keep_every_peak_and_dip(values, most):
    """Both ends, the minimum and the maximum are kept, in order, and no more points than requested."""
    given_values = np.array(values)
    kept = extremes(given_values, most)
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert np.all(np.diff(kept) > 0)
    assert given_values[kept].max() == given_values.max()
    assert given_values[kept].min() == given_values.min()
    assert len(kept) <= 2 * most + 2


def test_extremes_keep_the_depth_of_a_single_bin():
    values = np.full(6000, 30.0)
    values[4321] = 1.0
    assert values[extremes(values, 480)].min() == 1.0


def test_extremes_of_short_data_are_all_values():
    assert extremes(np.arange(10.0), 5).tolist() == list(range(10))


@given(LENGTHS, st.floats(0.5, 50))
def test_longest_keeps_the_longest_value_per_span(lengths, width):
    """Each span with values keeps one, the longest."""
    starts, result = np.arange(float(len(lengths))), np.array(lengths)
    kept = longest(starts, result, width)
    span = np.floor(starts / width)
    assert span[kept].tolist() == sorted(set(span.tolist()))
    for one in kept:
        assert result[one] == result[span == span[one]].max()


def test_thinning_of_no_data_is_empty():
    assert longest(np.zeros(0), np.zeros(0), 1.0).size == 0
