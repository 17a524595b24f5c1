"""Confidence intervals rarely exclude the true value: a small part of `python -m bench calibration`.

Seeds are fixed. With a correct method for intervals, a test fails with a probability below 1e-6. A method that treats
dependent values as independent has many times more errors than the tests allow.
"""

from __future__ import annotations

import numpy as np
import pytest
from error_limits import most_errors
from samples import some_of

from bench.noise import calibration
from faultbed.harness import confidence
from faultbed.harness.ledger.statistics.decision import RUN_RISK

SERIES = 150
CASES = [(n, phi) for n in (16, 100, 300) for phi in (0.0, 0.8, 0.95)]


@pytest.mark.parametrize("shape", some_of(calibration.SHAPES, 2))
@pytest.mark.parametrize("metric", calibration.METRICS)
def test_interval_excludes_the_true_value_rarely(metric, shape):
    cells = [calibration.cell(metric, shape, n, phi, series=SERIES, seed=7) for n, phi in CASES]
    series = SERIES * len(CASES)
    for side in ("above", "below"):
        assert sum(getattr(cell, side) for cell in cells) <= most_errors(series, calibration.ALLOWED)


@pytest.mark.parametrize("metric", calibration.METRICS)
def test_interval_of_few_values_is_refused(metric):
    assert calibration.cell(metric, "normal", 8, 0.0, series=50).refused == 50


@pytest.mark.parametrize("metric", calibration.METRICS)
def test_interval_of_many_independent_values_is_rarely_refused(metric):
    """A method that refuses every interval would pass all other tests."""
    assert calibration.cell(metric, "normal", 300, 0.0, series=50).refused < 10


def test_calibration_cell_with_more_errors_than_chance_misses_the_goal():
    assert calibration.Cell(series=2000, above=14, below=0, refused=0).is_calibrated
    assert not calibration.Cell(series=2000, above=0, below=40, refused=0).is_calibrated
    assert calibration.worst("x", [calibration.Cell(series=2000, above=0, below=40, refused=0)])[-1] == "missed"


def test_run_with_four_noisy_checks_fails_wrongly_in_at_most_one_percent():
    """The worst case: all four values equal their bounds. With four intervals of 99 %, twice as many would fail."""
    level, runs = confidence.level_for(4), 600
    rng = np.random.default_rng(5)

    def has_wrong_fail():
        values = [1 + 0.1 * rng.normal(size=100) for _ in range(4)]
        intervals = [confidence.mean_interval(of_check, level=level) for of_check in values]
        return any(interval is not None and interval.low > 1 for interval in intervals)

    failed = sum(has_wrong_fail() for _ in range(runs))
    assert failed <= most_errors(runs, RUN_RISK)


def test_calibration_noise_has_the_requested_mean_and_memory():
    rng = np.random.default_rng(1)
    for shape in calibration.SHAPES:
        assert calibration.noise(shape, rng, 400, 200, 0.5).mean() == pytest.approx(1, abs=0.02)
    values = calibration.noise("normal", rng, 400, 200, 0.8)
    assert np.corrcoef(values[:, 1:].ravel(), values[:, :-1].ravel())[0, 1] == pytest.approx(0.8, abs=0.01)
