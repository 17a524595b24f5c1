"""Two one-sided tests: how often they call settings equivalent or different, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.ledger.statistics.equivalence import equivalence

NOISE, RUNS, POOLS = 0.027, 10, 1000
"""Standard deviation of the logarithm of a run's time, as measured on a soft lab; runs a side; simulated pools."""


def share(ratio, says, *, seed=1, noise=(NOISE, NOISE)):
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(POOLS):
        a = np.exp(rng.normal(0.0, noise[0], RUNS))
        b = ratio * np.exp(rng.normal(0.0, noise[1], RUNS))
        hits += equivalence(a.tolist(), b.tolist(), 0.05).says == says
    return hits / POOLS


def test_equivalence_of_equal_settings_is_nearly_always_shown():
    assert share(1.0, "equivalent") >= 0.95


@pytest.mark.parametrize("ratio", [1.05, 1 / 1.05])
@pytest.mark.parametrize("noise", [(NOISE, NOISE), (NOISE / 4, NOISE)])
def test_equivalence_at_the_margin_is_shown_in_its_risk(ratio, noise):
    """5 % and three standard deviations of 1,000 pools; either verdict there is wrong."""
    assert share(ratio, "equivalent", noise=noise) <= 0.055 + 0.02
    assert share(ratio, "different", noise=noise) <= 0.055 + 0.02


def test_equivalence_at_the_margin_is_shown_in_five_per_cent_over_many_pools():
    assert np.mean([share(1.05, "equivalent", seed=seed) for seed in range(2, 7)]) <= 0.055


def test_equivalence_of_settings_that_differ_by_ten_per_cent_is_never_shown():
    assert share(1.10, "equivalent") <= 0.001
    assert share(1.10, "different") > 0.9
    assert share(1 / 1.10, "different") > 0.9


def test_equivalence_that_is_not_shown_says_how_many_runs_would_decide():
    rng = np.random.default_rng(3)
    a, b = (np.exp(rng.normal(0.0, 0.08, 5)).tolist() for _ in range(2))
    result = equivalence(a, b, 0.05)
    assert result.says == "not shown"
    assert result.more > 0
    n = 5 + result.more
    more = [np.exp(rng.normal(mean, 0.08, (300, n))) for mean in (0.0, math.log(result.ratio))]
    decided = [equivalence(x.tolist(), y.tolist(), 0.05).says != "not shown" for x, y in zip(*more, strict=True)]
    assert np.mean(decided) > 0.5


@given(
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=8),
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=8),
    st.floats(0.01, 0.5),
)
def test_equivalence_does_not_depend_on_which_side_is_called_a(a, b, margin):
    forth, back = equivalence(a, b, margin), equivalence(b, a, margin)
    assert forth.says == back.says
    assert forth.ratio == pytest.approx(1 / back.ratio)


@pytest.mark.parametrize("values", [[1.0, 1.0, 1.0], [1.0] * 50])
def test_equivalence_of_values_without_any_noise_is_not_shown(values):
    result = equivalence(values, values, 0.05)
    assert result.says == "not shown"
    assert "nothing is known about noise" in result.why
    assert result.more is None


@pytest.mark.parametrize("runs", [0, 1, 2])
def test_equivalence_of_too_few_runs_is_not_shown(runs):
    result = equivalence([1.0, 1.01, 0.99], [1.0, 1.001][:runs], 0.05)
    assert (result.says, result.more) == ("not shown", 3 - runs)


@pytest.mark.parametrize("margin", [0.0, -0.05, math.nan, math.inf])
def test_equivalence_refuses_a_margin_without_room(margin):
    with pytest.raises(ValueError, match="leaves no room for noise"):
        equivalence([1.0, 1.1, 1.2], [1.0, 1.1, 1.2], margin)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_equivalence_refuses_a_value_without_logarithm(value):
    with pytest.raises(ValueError, match="has no logarithm"):
        equivalence([1.0, 1.1, 1.2], [1.0, 1.1, value], 0.05)
