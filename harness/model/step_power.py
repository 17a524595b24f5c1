"""The electrical power of a training job over time, from the watts of its phases. Modelled. Pure.

Compute, communication, checkpoint and restart draw different power. All GPUs of a job go through the same phases at the
same time, so that their dips add up: the supply of a building sees ramps of tens of megawatts. The trace has a sample
every `sample_s` seconds. A GPU changes its power within about `rise_s`, which limits the ramps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from faultbed.harness.model.training_step import StepTime
from faultbed.testbed.errors import UsageError
from faultbed.testbed.routing.max_min import Floats

__all__ = [
    "H100_WATTS",
    "Interval",
    "Phase",
    "PowerTrace",
    "Watts",
    "dips_by_phase",
    "measured_watts",
    "power_trace",
    "step_power",
]

Phase = Literal["compute", "collective", "checkpoint", "restart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watts:
    """Power of one GPU in each phase, in W; `rise_s` is the time constant of a change, in s."""

    compute: float
    collective: float
    checkpoint: float
    restart: float
    rise_s: float = 0.02


H100_WATTS = Watts(compute=680.0, collective=420.0, checkpoint=230.0, restart=110.0)
"""Estimates for an H100 SXM of 700 W, between its idle power and its limit. `measured_watts` replaces them."""

Interval = tuple[Phase, float]
"""A phase and its length in s."""
MOST_SAMPLES = 5_000_000
_FIRST_EVENT = 2
"""Index of the first phase that is an interruption and not part of a step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PowerTrace:
    """Power of all GPUs together, in W: one sample every `sample_s`, shape (samples,). `phases` has their phases."""

    watts: Floats
    phases: npt.NDArray[np.int8]
    sample_s: float
    gpus: int

    @property
    def mean_mw(self) -> float:
        """Mean power in MW."""
        return float(self.watts.mean()) / 1e6

    @property
    def peak_mw(self) -> float:
        """Highest power in MW."""
        return float(self.watts.max()) / 1e6

    @property
    def largest_ramp_mw_per_s(self) -> float:
        """Fastest change of power, up or down, in MW/s."""
        if len(self.watts) < 2:  # noqa: PLR2004 - one sample does not change
            return 0.0
        return float(np.abs(np.diff(self.watts)).max()) / self.sample_s / 1e6

    def spectrum(self) -> tuple[Floats, Floats]:
        """Return frequencies in Hz and their amplitudes in MW.

        Only the steps before the first checkpoint or restart are used: a single event is no line of a spectrum.
        """
        events = np.flatnonzero(self.phases >= _FIRST_EVENT)
        steady = self.watts[: int(events[0])] if events.size and events[0] else self.watts
        amplitude: Floats = np.abs(np.fft.rfft(steady - steady.mean())) * 2 / len(steady) / 1e6
        frequencies: Floats = np.fft.rfftfreq(len(steady), self.sample_s).astype(np.float64)
        return frequencies, amplitude

    @property
    def strongest_hz(self) -> float:
        """Frequency of the strongest line of the spectrum; 0 if the power is constant."""
        frequencies, amplitude = self.spectrum()
        return float(frequencies[int(amplitude.argmax())])


def power_trace(intervals: Sequence[Interval], watts: Watts, *, gpus: int, sample_s: float = 0.01) -> PowerTrace:
    """Return the power of a job whose GPUs go through the same phases together.

    Raises:
        UsageError: no phase, a length or a power that is negative or not finite, or more samples than fit.
    """
    lengths = np.array([length for _, length in intervals])
    powers = np.array([watts.compute, watts.collective, watts.checkpoint, watts.restart])
    if not np.isfinite(lengths).all() or not lengths.size or (lengths < 0).any() or not lengths.sum():
        raise UsageError("power: a phase has a negative or infinite length, or all lengths are 0; correct them")
    if not np.isfinite(powers).all() or (powers < 0).any() or not 0 < watts.rise_s < np.inf:
        raise UsageError("power: the watts of a phase are negative or not a number; correct them")
    if lengths.sum() / sample_s > MOST_SAMPLES:
        raise UsageError(
            f"power: {lengths.sum():.0f} s in samples of {sample_s:g} s are more than {MOST_SAMPLES} samples; "
            "use longer samples"
        )
    names = get_args(Phase)
    ends = np.cumsum(lengths)
    times = np.arange(sample_s / 2, float(ends[-1]), sample_s)
    which = np.searchsorted(ends, times, side="right").clip(max=len(intervals) - 1)
    phases = np.array([names.index(name) for name, _ in intervals], dtype=np.int8)[which]
    target = powers[phases]
    # A first-order lag: the power follows the phase within `rise_s`.
    keep = float(np.exp(-sample_s / watts.rise_s))
    drawn = np.empty(len(target))
    now = float(target[0]) if len(target) else 0.0
    for index, value in enumerate(target):
        now = value + (now - value) * keep
        drawn[index] = now
    return PowerTrace(watts=drawn * gpus, phases=phases, sample_s=sample_s, gpus=gpus)


def dips_by_phase(trace: PowerTrace) -> dict[Phase, float]:
    """Return the largest drop of the power below its compute level, in MW, for each phase that occurs."""
    names = get_args(Phase)
    level = np.percentile(trace.watts[trace.phases == 0], 90) if (trace.phases == 0).any() else trace.watts.max()
    return {
        name: float(level - trace.watts[trace.phases == number].min()) / 1e6
        for number, name in enumerate(names)
        if number and (trace.phases == number).any()
    }


def step_power(
    step: StepTime,
    watts: Watts = H100_WATTS,
    *,
    steps: int = 8,
    checkpoint_s: float = 5.0,
    restart_s: float = 30.0,
) -> PowerTrace:
    """Return the power of a job: steps, a checkpoint, steps, a restart, steps.

    Communication is assumed not to overlap with compute.
    """
    one_step: list[Interval] = [("compute", step.compute_s), ("collective", step.pp_s + step.dp_s)]
    intervals = [
        *one_step * steps,
        ("checkpoint", checkpoint_s),
        *one_step * steps,
        ("restart", restart_s),
        *one_step * steps,
    ]
    return power_trace(intervals, watts, gpus=step.gpus)


def measured_watts(levels: Mapping[str, float], defaults: Watts = H100_WATTS) -> Watts:
    """Return `defaults` with the measured power of phases, in W by phase; other phases keep their default.

    `faultbed.harness.analysis.power.dips.levels` computes such levels from NVML's samples.

    Raises:
        UsageError: a level is negative or not finite.
    """
    if not all(np.isfinite(value) and value >= 0 for value in levels.values()):
        raise UsageError("power: the level of a phase is negative or not a number; record the power again")
    return replace(defaults, **{name: levels[name] for name in get_args(Phase) if name in levels})
