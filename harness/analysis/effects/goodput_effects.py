"""Goodput of a run, and what each fault did to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faultbed.harness.analysis import resolutions, timeline
from faultbed.harness.analysis.effects.fault_windows import acting_windows
from faultbed.harness.analysis.effects.flow_silences import with_silences
from faultbed.harness.analysis.pace import doubt_slow_downs, pace, steadied
from faultbed.harness.analysis.timeline import Baseline, Goodput, Impact
from faultbed.harness.record.evidence.run_evidence import RunEvidence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["GoodputEffects", "goodput_effects"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputEffects:
    """Goodput of a run, its fault-free baseline, and the impact of each fault, by fault id.

    `total` is None without ranks, `baseline` without a fault-free start. `beyond_chance` are the impacts that chance
    cannot explain. `pace` is the pace of the machine under a soft lab in each bin; None if unknown or not needed.
    """

    per_rank: Mapping[int, Goodput]
    total: Goodput | None
    baseline: Baseline | None = None
    impacts: Mapping[str, Impact]
    beyond_chance: Mapping[str, Impact]
    pace: NDArray[np.float64] | None = None

    def slowest_pace(self) -> dict[str, float]:
        """Return, by fault id, the lowest pace of the machine from the firing until goodput was back."""
        total, machine_pace = self.total, self.pace
        if total is None or machine_pace is None:
            return {}
        return {
            fault_id: float(
                machine_pace[
                    total.bin_of(impact.fired_ns) : total.bin_of(impact.fired_ns + impact.recovery_ns) + 1
                ].min()
            )
            for fault_id, impact in self.impacts.items()
            if total.bin_of(impact.fired_ns) < len(machine_pace)
        }


def goodput_effects(
    run: RunEvidence, fired: Mapping[str, tuple[int, int]], *, first_fault_ns: int, level: float
) -> GoodputEffects:
    """Return the goodput of a run and the effects of its faults on it.

    Args:
        run: the run.
        fired: (first firing, removal) of each fault, by id.
        first_fault_ns: end of the fault-free start.
        level: confidence level beyond which an impact is not chance.
    """
    work = run.workload
    per_rank = {
        series.rank: timeline.goodput(
            series.samples, start_ns=work.t0_ns, end_ns=work.end_ns, sample_ns=work.sample_ns, step_ns=work.sample_ns
        )
        for series in run.workload.series
    }
    if not per_rank:
        return GoodputEffects(per_rank=per_rank, total=None, impacts={}, beyond_chance={})
    total = timeline.total(list(per_rank.values()))
    window_ns = timeline.rolling_window_ns(run.workload.series, total.step_ns, until_ns=first_fault_ns)
    base = timeline.baseline(total, first_fault_ns=first_fault_ns, window_ns=window_ns, reads=run.telemetry.reads)
    if base is None:
        return GoodputEffects(per_rank=per_rank, total=total, impacts={}, beyond_chance={})
    machine_pace = pace(run, total, fired.values(), start_ns=base.start_ns, until_ns=base.end_ns)
    windows, steady = acting_windows(run), steadied(total, machine_pace)
    impacts = timeline.impacts(steady, base, windows)
    beyond = timeline.impacts(steady, resolutions.beyond_chance(total, base, impacts, level), windows)
    if machine_pace is not None:
        impacts = doubt_slow_downs(run, impacts, timeline.impacts(total, base, windows), windows)
    if "flow" in run.workload.planned:
        names = {rank.rank: f"{rank.host}:{rank.rnic}" for rank in run.workload.ranks}
        sources = {names[rank]: series for rank, series in per_rank.items()}
        impacts, beyond = (with_silences(found, sources, base, windows) for found in (impacts, beyond))
    return GoodputEffects(
        per_rank=per_rank, total=total, baseline=base, impacts=impacts, beyond_chance=beyond, pace=machine_pace
    )
