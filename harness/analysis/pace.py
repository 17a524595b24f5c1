"""How fast the machine under a soft lab computes, against the fault-free start of the run. Pure.

The VMs of a soft lab share the cores of one machine with all else that it does; what slows the cores slows the job, and
no fault did that. Compute phases tell: each is the same work, and carries nothing over the fabric. The **pace** of a
bin is the median compute phase of the fault-free start over that of the iterations around the bin, at most 1. While a
fault lasts nobody is asked, for it may be what slows them (elephants take CPU, too): what was before and what is after
it is joined by a line. **Steadied goodput** is goodput over pace: what the job would carry, had the machine kept its
pace. Hosts of a rack have their cores to themselves, so nothing of theirs is steadied, nor is a workload that does not
compute.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from harness.analysis.timeline import Goodput
from harness.record.measurements import Iteration, Measurements

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["AROUND", "MIN_RANKS", "pace", "steadied"]

AROUND = 2
"""Iterations on either side of one whose median its pace is: one alone varies by a third."""
MIN_RANKS = 2
"""Ranks with a compute phase below which an iteration says nothing about the machine."""

_Window = tuple[int, int]


def pace(
    run: Measurements, grid: Goodput, fired: Collection[_Window], *, start_ns: int, until_ns: int
) -> NDArray[np.float64] | None:
    """Of each bin of `grid`; 1 before `until_ns`, the end of the fault-free start. None: nothing tells.

    `fired`: first firing and removal of each fault, in ns.
    """
    if run.lab_kind != "soft":
        return None
    by_index: dict[int, list[int]] = {}
    begins: dict[int, int] = {}
    for step in (step for series in run.series for step in series.iterations):
        begins[step.index] = min(begins.get(step.index, step.start_ns), step.start_ns)
        if step.compute_ns > 0 and not _touched(step, fired):
            by_index.setdefault(step.index, []).append(step.compute_ns)
    told = sorted(index for index, times in by_index.items() if len(times) >= MIN_RANKS)
    begin = np.array([begins[index] for index in told], dtype=np.float64)
    phases = np.array([np.median(by_index[index]) for index in told])
    before = phases[(begin >= start_ns) & (begin < until_ns)]
    if not len(before):
        return None
    around = [float(np.median(phases[max(0, at - AROUND) : at + AROUND + 1])) for at in range(len(phases))]
    middle = grid.t0_ns + (np.arange(len(grid.bytes)) + 0.5) * grid.step_ns
    found: NDArray[np.float64] = np.minimum(1.0, float(np.median(before)) / np.interp(middle, begin, around))
    found[middle < until_ns] = 1.0
    return found


def steadied(series: Goodput, pace: NDArray[np.float64] | None) -> Goodput:
    """The same bins, as if the machine had kept its pace."""
    if pace is None:
        return series
    return Goodput(t0_ns=series.t0_ns, step_ns=series.step_ns, bytes=series.bytes / pace, pace=pace)


def _touched(step: Iteration, windows: Collection[_Window]) -> bool:
    start_ns = step.start_ns + step.ingest_ns
    return any(start_ns < last and start_ns + step.compute_ns > first for first, last in windows)
