"""The power of phases: levels and dips from samples, their order, and the energy that the model predicts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.analysis.power.dips import (
    COMPUTE,
    ORDER,
    PhaseSpan,
    Sample,
    dips,
    energy_error,
    is_ordered,
    levels,
)

MS = 1_000_000
WATTS = {COMPUTE: 650.0, "collective": 300.0, "checkpoint": 140.0, "restart": 70.0}


def made(watts_of, cycles=3, each_ms=1000, lag_ms=200):
    """Return a trace whose power follows each change of phase `lag_ms` later, and its phases."""
    spans = [
        PhaseSpan(cycle=at // 4, phase=phase, start_ns=at * each_ms * MS, end_ns=(at + 1) * each_ms * MS)
        for at, phase in enumerate([COMPUTE, "collective", "checkpoint", "restart"] * cycles)
    ]
    samples = []
    for t_ms in range(0, len(spans) * each_ms, 20):
        span = spans[max(0, t_ms - lag_ms) // each_ms]
        samples.append(Sample(t_ns=t_ms * MS, watts=watts_of(span)))
    return samples, spans


def test_power_levels_ignore_the_lag_of_the_measurement():
    samples, spans = made(lambda span: WATTS[span.phase])
    found = levels(samples, spans)
    assert {phase: level.watts for phase, level in found.items()} == WATTS
    assert {(level.low, level.high, level.spans) for level in found.values()} == {(w, w, 3) for w in WATTS.values()}


def test_power_dips_are_ordered_in_each_cycle():
    samples, spans = made(lambda span: WATTS[span.phase])
    found = dips(samples, spans)
    assert found[1] == {"collective": 350.0, "checkpoint": 510.0, "restart": 580.0}
    assert all(is_ordered(depths) for depths in found.values())
    swapped = {**WATTS, "checkpoint": 310.0}
    samples, spans = made(lambda span: (swapped if span.cycle == 2 else WATTS)[span.phase])
    assert [is_ordered(depths) for depths in dips(samples, spans).values()] == [True, True, False]


@pytest.mark.parametrize(
    "depths",
    [
        {},
        {"restart": 3.0, "checkpoint": 2.0},
        dict.fromkeys(ORDER, 5.0),
        {"restart": 2.0, "checkpoint": 1.0, "collective": 0.0},
    ],
)
def test_power_dips_that_are_missing_or_equal_or_no_dip_are_not_ordered(depths):
    assert not is_ordered(depths)


def test_power_cycle_without_samples_of_compute_has_no_dips():
    samples, spans = made(lambda span: WATTS[span.phase])
    second = next(span for span in spans if span.cycle == 1)
    rest = [sample for sample in samples if not second.start_ns <= sample.t_ns < second.end_ns]
    assert sorted(dips(rest, spans)) == [0, 2]
    assert dips([], spans) == {}


@given(st.floats(0.5, 2.0))
def test_power_energy_of_the_last_cycle_is_predicted_by_the_others(factor):
    samples, spans = made(lambda span: WATTS[span.phase] * (factor if span.cycle == 2 else 1), lag_ms=0)
    assert energy_error(samples, spans) == pytest.approx(1 / factor - 1, abs=0.02)


def test_power_energy_needs_an_earlier_cycle():
    samples, spans = made(lambda span: WATTS[span.phase], cycles=1)
    assert energy_error(samples, spans) is None
    assert energy_error([], []) is None
