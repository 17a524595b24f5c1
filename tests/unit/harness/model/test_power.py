"""Power of a job: dips ordered by phase, ramps limited by the time of a change, and the spectrum of the steps."""

import numpy as np
import pytest

from faultbed.harness.model.step_power import Watts, dips_by_phase, measured_watts, power_trace
from faultbed.testbed.errors import UsageError

WATTS = Watts(compute=700, collective=400, checkpoint=250, restart=100, rise_s=0.05)


def test_power_dips_are_ordered_restart_checkpoint_collective_in_twenty_jobs():
    rng = np.random.default_rng(1)
    for _ in range(20):
        compute_s, collective_s = rng.uniform(0.5, 8), rng.uniform(0.2, 3)
        steps = [("compute", compute_s), ("collective", collective_s)] * 4
        trace = power_trace(
            [*steps, ("checkpoint", rng.uniform(1, 6)), *steps, ("restart", rng.uniform(10, 60)), *steps],
            WATTS,
            gpus=1000,
        )
        dips = dips_by_phase(trace)
        assert dips["restart"] > dips["checkpoint"] > dips["collective"] > 0


def test_power_spectrum_has_the_frequency_of_the_steps():
    trace = power_trace([("compute", 0.75), ("collective", 0.25)] * 40, WATTS, gpus=1)
    assert trace.strongest_hz == pytest.approx(1.0, rel=0.03)


def test_power_ramp_is_limited_by_the_time_of_a_change():
    intervals = [("compute", 5.0), ("restart", 5.0)]
    fast, slow = (
        power_trace(intervals, Watts(compute=700, collective=1, checkpoint=1, restart=100, rise_s=rise), gpus=10_000)
        for rise in (0.02, 0.5)
    )
    assert fast.largest_ramp_mw_per_s > 10 * slow.largest_ramp_mw_per_s
    assert slow.peak_mw == pytest.approx(7.0, rel=0.01)
    assert slow.largest_ramp_mw_per_s <= 6.0 / 0.5 * 1.01


def test_power_constant_phase_has_no_dip_and_no_line():
    trace = power_trace([("compute", 2.0)], WATTS, gpus=1)
    assert dips_by_phase(trace) == {}
    assert trace.largest_ramp_mw_per_s == 0
    assert trace.mean_mw == pytest.approx(700e-6)


def test_measured_watts_keep_the_default_of_other_phases():
    found = measured_watts({"compute": 600.0, "restart": 70.0, "idle": 1.0}, WATTS)
    assert (found.compute, found.collective, found.restart) == (600.0, 400.0, 70.0)


@pytest.mark.parametrize(
    "intervals", [[], [("compute", -1.0)], [("compute", float("nan"))], [("compute", 0.0)], [("compute", 1e9)]]
)
def test_power_impossible_lengths_are_refused(intervals):
    with pytest.raises(UsageError, match="power: "):
        power_trace(intervals, WATTS, gpus=1)


def test_power_impossible_watts_are_refused():
    with pytest.raises(UsageError, match="watts"):
        power_trace([("compute", 1.0)], Watts(compute=float("nan"), collective=1, checkpoint=1, restart=1), gpus=1)
    with pytest.raises(UsageError, match="level"):
        measured_watts({"compute": float("nan")})
