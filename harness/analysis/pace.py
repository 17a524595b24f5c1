"""Pace of the machine under a soft lab, relative to the fault-free start of the run. Pure.

The VMs of a soft lab share the cores of one machine with everything else on it. If the cores become slower, so does the
job, without any fault. Compute phases show this: each one is the same work and uses no fabric. The **pace** of a bin is
the median compute phase of the fault-free start divided by that of the iterations around the bin, at most 1. Iterations
during a fault are not used, because the fault may slow them (elephant flows use CPU, too). The pace during a fault is
interpolated. **Steadied goodput** is goodput divided by pace: what the job would carry if the machine had kept its
pace.

A slow-down that begins with a fault is not excused (`doubt_slow_downs`): the machine or the fault may slow all ranks.
If goodput recovered only thanks to the pace, the recovery is censored with that reason.

Goodput is not steadied on a rack lab, whose hosts have their own cores, or for a workload without compute phases.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from faultbed.harness.analysis.timeline import Goodput, Impact, SlowDown, Window
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import Iteration
from faultbed.testbed.model.lab_kind import traits_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["AROUND", "MIN_RANKS", "doubt_slow_downs", "pace", "steadied"]

AROUND = 2
"""Iterations on either side that enter a median; a single iteration varies by a third."""
MIN_RANKS = 2
"""Minimum number of ranks with a compute phase for an iteration to show the machine's pace."""

COMPARED = 10
"""Compute phases that are compared before and after a fault. Fewer than `LEAST` are no evidence."""
LEAST = 5
_SLOWER = 1.05
"""Growth of the compute phase up to which the machine counts as unchanged; goodput is healthy at 95 %, too."""
_LEVEL = 0.01

_Window = tuple[int, int]


def pace(
    run: RunEvidence, grid: Goodput, fired: Collection[_Window], *, start_ns: int, until_ns: int
) -> NDArray[np.float64] | None:
    """Return the pace in each bin of `grid`; None without data.

    The pace is 1 before `until_ns`, the end of the fault-free start. `fired`: first firing and removal of each fault,
    in ns.
    """
    if not traits_of(run.lab.kind).is_emulated:
        return None
    begin, phases = _compute_phases(run, fired)
    before = phases[(begin >= start_ns) & (begin < until_ns)]
    if not len(before):
        return None
    ordered = phases.tolist()  # for a few values `statistics` takes a tenth of the time of NumPy
    around = [median(ordered[max(0, at - AROUND) : at + AROUND + 1]) for at in range(len(ordered))]
    middle = grid.t0_ns + (np.arange(len(grid.bytes)) + 0.5) * grid.step_ns
    paces: NDArray[np.float64] = np.minimum(1.0, float(np.median(before)) / np.interp(middle, begin, around))
    paces[middle < until_ns] = 1.0
    return paces


def _compute_phases(run: RunEvidence, fired: Collection[_Window]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return when each iteration without a fault began, and the median of its ranks' compute phases, in ns."""
    by_index: dict[int, list[int]] = {}
    begins: dict[int, int] = {}
    for step in (step for series in run.workload.series for step in series.iterations):
        begins[step.index] = min(begins.get(step.index, step.start_ns), step.start_ns)
        if step.compute_ns > 0 and not _touched(step, fired):
            by_index.setdefault(step.index, []).append(step.compute_ns)
    complete = sorted(index for index, times in by_index.items() if len(times) >= MIN_RANKS)
    begin = np.array([begins[index] for index in complete], dtype=np.float64)
    return begin, np.array([median(by_index[index]) for index in complete], dtype=np.float64)


def doubt_slow_downs(
    run: RunEvidence, steady: Mapping[str, Impact], raw: Mapping[str, Impact], windows: Mapping[str, Window]
) -> dict[str, Impact]:
    """Return `steady`, each with a `SlowDown` if the machine may have slowed down because of the fault.

    `steady` are the impacts on steadied goodput, `raw` those on measured goodput. If both agree, the machine's pace
    made no difference. Otherwise the pace must be the same before and after the fault. If it is not and measured
    goodput did not recover, the recovery is censored.
    """
    begin, phases = _compute_phases(run, [(window.start_ns, window.cleared_ns) for window in windows.values()])
    checked = {}
    for fault_id, impact in steady.items():
        unsteadied = raw.get(fault_id)
        recovered = unsteadied if unsteadied is not None and not unsteadied.censored else None
        agrees = recovered is not None and recovered.recovery_ns <= impact.recovery_ns
        growth = None if agrees or impact.censored else _slower_since(begin, phases, windows, fault_id)
        checked[fault_id] = impact
        if growth is None:
            continue
        if recovered is not None:
            slow_down = SlowDown(
                reason=growth,
                min_ratio=recovered.min_ratio,
                recovery_ns=recovered.recovery_ns,
                after_clear_ns=recovered.after_clear_ns,
            )
            checked[fault_id] = replace(impact, slow_down=slow_down)
        else:
            lowest = None if unsteadied is None else min(unsteadied.min_ratio, impact.min_ratio)
            slow_down = SlowDown(reason=growth, min_ratio=lowest)
            checked[fault_id] = replace(impact, recovered_ns=None, censored=True, reason=growth, slow_down=slow_down)
    return checked


def _slower_since(
    begin: NDArray[np.float64], phases: NDArray[np.float64], windows: Mapping[str, Window], fault_id: str
) -> str | None:
    """Return how compute phases grew across a fault, or why that is unknown; None if they did not grow."""
    own = windows[fault_id]
    before = phases[begin < own.start_ns][-COMPARED:]
    later = [window.start_ns for window in windows.values() if window.start_ns > own.start_ns]
    after = phases[(begin >= own.cleared_ns) & (begin < min(later, default=np.inf))][:COMPARED]
    if not len(before) or not len(after):
        return "whether the machine under the lab became slower is unknown: no compute phase before or after the fault"
    growth = float(np.median(after) / np.median(before))
    if growth <= _SLOWER:
        return None
    if min(len(before), len(after)) >= LEAST:
        # Imported here: scipy.stats takes half a second, and few runs need it.
        from scipy.stats import mannwhitneyu  # noqa: PLC0415

        if mannwhitneyu(after, before, alternative="greater").pvalue > _LEVEL:
            return None
    return (
        f"all ranks compute {growth:.2f} times as long since the fault (medians of {len(before)} iterations before it "
        f"and {len(after)} after it); goodput is back only if the machine under the lab caused that: not proven"
    )


def steadied(series: Goodput, pace: NDArray[np.float64] | None) -> Goodput:
    """Return goodput as if the machine had kept its pace."""
    if pace is None:
        return series
    return Goodput(t0_ns=series.t0_ns, step_ns=series.step_ns, bytes=series.bytes / pace, pace=pace)


def _touched(step: Iteration, windows: Collection[_Window]) -> bool:
    start_ns = step.start_ns + step.ingest_ns
    return any(start_ns < last and start_ns + step.compute_ns > first for first, last in windows)
