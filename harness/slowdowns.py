"""How much slower each rank computes under each fault than in its own fault-free start. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.measurements import Measurements, RankSeries

__all__ = ["Slowdown", "slowdowns"]

_ENOUGH_ITERATIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Growth of a rank's median compute phase while a fault acted, against its own fault-free start."""

    host: str
    fault_id: str
    before_ns: float
    during_ns: float

    @property
    def ratio(self) -> float:
        """During over before."""
        return self.during_ns / self.before_ns


def slowdowns(run: Measurements, fired: Mapping[str, tuple[int, int]], first_ns: int) -> tuple[Slowdown, ...]:
    """Growth of each rank's compute phase under each fault: medians over iterations begun within it."""
    hosts = {rank.rank: rank.host for rank in run.ranks}
    found = []
    for series in run.series:
        before = _median_compute(series, run.t0_ns, first_ns)
        for fault_id, (start, end) in fired.items():
            during = _median_compute(series, start, end)
            if before and during:
                found.append(
                    Slowdown(
                        host=hosts.get(series.rank, f"rank {series.rank}"),
                        fault_id=fault_id,
                        before_ns=before,
                        during_ns=during,
                    )
                )
    return tuple(found)


def _median_compute(series: RankSeries, start_ns: int, end_ns: int) -> float | None:
    inside = [step.compute_ns for step in series.iterations if start_ns <= step.start_ns < end_ns]
    return float(np.median(inside)) if len(inside) >= _ENOUGH_ITERATIONS else None
