"""Effective training time ratio: which share of a job's time brought it forward. Pure.

    measured     iterations finished x the time that one takes when nothing is wrong / wall time
    predicted    (1 - lost / wall) / (1 + w / D)

The prediction is that of Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters"
(HPCA 2025, arXiv 2410.21680), E[ETTR] = (1 - N r (u + D / 2)) / (1 + w / D): interruptions at rate N r cost u to come
back and half of what lies between two checkpoints, and a checkpoint stops a job for w after each D of work. Here N r u
is known fault by fault: `lost` is the time that the fault-free goodput would have needed for the bytes that were not
carried. A job here goes on where it stood, so nothing is done twice and D / 2 is 0; w counts waiting for data as well.

The time of an iteration is the mean over the run's own fault-free start, without what it waited for storage. The two
sides share that start, but neither the iterations nor the bytes afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.timeline import Baseline, Impact, finished_iterations
from harness.confidence import LEVEL, Interval, mean_interval
from harness.record.measurements import Measurements

__all__ = ["Ettr", "ettr"]

_ENOUGH = 3
"""Iterations of the fault-free start that are needed to know how long one takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ettr:
    """Of a job: `ratio` of `wall_ns` was productive, in `iterations` of `healthy_ns` each.

    `lost_ns` are what faults cost, `storage_ns` what an iteration waits for storage, on average. `predicted` is None
    where goodput has no fault-free start. `alone_ns` are the fault-free iterations that `healthy_ns` is the mean of.
    """

    iterations: int
    healthy_ns: float
    wall_ns: int
    lost_ns: float
    storage_ns: float
    predicted: float | None
    alone_ns: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        """Productive time over wall time; noise may lift it above 1."""
        return self.iterations * self.healthy_ns / self.wall_ns

    def interval(self, level: float = LEVEL) -> Interval | None:
        """Return how well `ratio` is known: as well as the mean fault-free iteration. None: too few of them."""
        noise = mean_interval(np.array(self.alone_ns), of="fault-free iterations", level=level)
        if noise is None:
            return None
        share = self.iterations / self.wall_ns
        return replace(noise, low=share * noise.low, high=share * noise.high)


def ettr(run: Measurements, base: Baseline | None, impacts: Iterable[Impact], *, first_fault_ns: int) -> Ettr | None:
    """Measure and predict; None: too few iterations before the first fault, or a workload without."""
    count = finished_iterations(run.series)
    if not count:
        return None
    ordered = [sorted(one.iterations, key=lambda step: step.index)[:count] for one in run.series]
    begins = np.array([[step.start_ns for step in rank] for rank in ordered]).min(axis=0)
    end_ns = int(max(rank[-1].end_ns for rank in ordered))
    storage = np.array([[step.ingest_ns + step.checkpoint_ns for step in rank] for rank in ordered]).max(axis=0)
    # An iteration reaches to the begin of the next, so that what lies between them counts.
    lengths = np.diff(np.append(begins, end_ns))
    healthy = begins + lengths <= first_fault_ns
    if int(healthy.sum()) < _ENOUGH:
        return None
    alone = (lengths - storage)[healthy].astype(np.float64)
    alone_ns, wall_ns = float(alone.mean()), end_ns - int(begins[0])
    lost_ns = 0.0 if base is None else sum(one.lost_bytes / base.mean * 1e9 for one in impacts)
    waits_ns = float(storage.mean())
    return Ettr(
        iterations=count,
        healthy_ns=alone_ns,
        wall_ns=wall_ns,
        lost_ns=lost_ns,
        storage_ns=waits_ns,
        predicted=None if base is None else (1 - lost_ns / wall_ns) / (1 + waits_ns / alone_ns),
        alone_ns=tuple(alone.tolist()),
    )
