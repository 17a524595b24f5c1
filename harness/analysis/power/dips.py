"""The power model of a GPU's phases, calibrated by samples of a real GPU. Pure.

A job's phases follow each other in cycles: compute, and phases in which the GPU draws less. The model gives each phase
one level in watts. A dip is the level of compute minus that of another phase in the same cycle. Llama 3's authors
report dips of tens of megawatts when all GPUs of a job wait for a checkpoint, a collective or a restart at once ("The
Llama 3 Herd of Models", section 3.3.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

__all__ = [
    "COMPUTE",
    "ORDER",
    "SETTLE_NS",
    "Level",
    "PhaseSpan",
    "Sample",
    "dips",
    "energy_error",
    "is_ordered",
    "levels",
]

COMPUTE = "compute"
ORDER = ("restart", "checkpoint", "collective")
"""Phases by the depth of their dip, deepest first: no process computes, the GPU copies, the GPU waits for others."""
SETTLE_NS = 300_000_000
"""Time after a change of phase whose samples are ignored. An H100 measures its power every 100 ms (Yang et al., "Part-
time Power Measurements: nvidia-smi's Lack of Attention", 2024)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The power of a GPU at a time."""

    t_ns: int
    watts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """One phase of one cycle."""

    cycle: int
    phase: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The calibrated power of a phase: median over its spans, lowest and highest span, and the number of spans."""

    phase: str
    watts: float
    low: float
    high: float
    spans: int


def levels(samples: Sequence[Sample], spans: Iterable[PhaseSpan], *, settle_ns: int = SETTLE_NS) -> dict[str, Level]:
    """Return the level of each phase that has samples; those within `settle_ns` of a span's start are ignored."""
    medians: dict[str, list[float]] = {}
    for span in spans:
        if (watts := _settled(samples, span, settle_ns)) is not None:
            medians.setdefault(span.phase, []).append(watts)
    return {
        phase: Level(phase=phase, watts=median(watts), low=min(watts), high=max(watts), spans=len(watts))
        for phase, watts in medians.items()
    }


def dips(
    samples: Sequence[Sample], spans: Sequence[PhaseSpan], *, settle_ns: int = SETTLE_NS
) -> dict[int, dict[str, float]]:
    """Return the depth in watts of each phase's dip, by cycle; a cycle without samples of compute is left out."""
    depths = {}
    for cycle in sorted({span.cycle for span in spans}):
        of_cycle = levels(samples, [span for span in spans if span.cycle == cycle], settle_ns=settle_ns)
        if COMPUTE in of_cycle:
            top = of_cycle.pop(COMPUTE).watts
            depths[cycle] = {phase: top - level.watts for phase, level in of_cycle.items()}
    return depths


def is_ordered(depths: dict[str, float]) -> bool:
    """Return whether a cycle has a dip for every phase of `ORDER`, each deeper than the next, the last one above 0."""
    if not all(phase in depths for phase in ORDER):
        return False
    in_order = [*(depths[phase] for phase in ORDER), 0.0]
    return all(deeper > next_depth for deeper, next_depth in pairwise(in_order))


def energy_error(samples: Sequence[Sample], spans: Sequence[PhaseSpan]) -> float | None:
    """Return the relative error of the modelled energy of the last cycle; None: there is no earlier cycle.

    The levels come from the earlier cycles. The measured energy is the integral of the samples (trapezoids).
    """
    last = max((span.cycle for span in spans), default=0)
    model = levels(samples, [span for span in spans if span.cycle < last])
    held_out = [span for span in spans if span.cycle == last and span.phase in model]
    measured = sum(_joules(samples, span) for span in held_out)
    if not measured:
        return None
    modelled = sum(model[span.phase].watts * (span.end_ns - span.start_ns) / 1e9 for span in held_out)
    return modelled / measured - 1


def _settled(samples: Sequence[Sample], span: PhaseSpan, settle_ns: int) -> float | None:
    watts = [sample.watts for sample in samples if span.start_ns + settle_ns <= sample.t_ns < span.end_ns]
    return median(watts) if watts else None


def _joules(samples: Sequence[Sample], span: PhaseSpan) -> float:
    within = [sample for sample in samples if span.start_ns <= sample.t_ns <= span.end_ns]
    pairs = pairwise(within)
    joules = sum((after.t_ns - before.t_ns) / 1e9 * (after.watts + before.watts) / 2 for before, after in pairs)
    covered_ns = within[-1].t_ns - within[0].t_ns if within else 0
    return joules * (span.end_ns - span.start_ns) / covered_ns if covered_ns else 0.0
