"""Effective training time ratio: the share of a job's time that produced progress. Pure.

    measured     iterations finished x the time of a fault-free iteration / wall time
    predicted    (1 - lost / wall) / (1 + w / D)

The prediction is that of Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters"
(HPCA 2025, arXiv 2410.21680), E[ETTR] = (1 - N r (u + D / 2)) / (1 + w / D). Interruptions at rate N r cost u to
recover and half of the work between two checkpoints; a checkpoint stops a job for w after each D of work. Here N r u is
known for each fault: `lost` is the time that fault-free goodput would have needed for the bytes that were not carried.
A job here continues where it stood, so no work is repeated and D / 2 is 0; w includes the wait for data.

The time of an iteration is the mean over the run's own fault-free start, without its waits for storage. Both sides use
that start, but neither the later iterations nor the later bytes.
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
"""Number of fault-free iterations needed to know how long one takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ettr:
    """Effective training time of a job: `ratio` of `wall_ns` was productive, in `iterations` of `healthy_ns` each.

    `lost_ns` is the time that faults cost, `storage_ns` the mean wait of an iteration for storage. `predicted` is None
    if goodput has no fault-free start. `alone_ns` are the fault-free iterations whose mean is `healthy_ns`.
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
        """Productive time over wall time. Noise may raise it above 1."""
        return self.iterations * self.healthy_ns / self.wall_ns

    def interval(self, level: float = LEVEL) -> Interval | None:
        """Return the interval of `ratio`, from that of the mean fault-free iteration; None with too few of them."""
        noise = mean_interval(np.array(self.alone_ns), of="fault-free iterations", level=level)
        if noise is None:
            return None
        share = self.iterations / self.wall_ns
        return replace(noise, low=share * noise.low, high=share * noise.high)


def ettr(run: Measurements, base: Baseline | None, impacts: Iterable[Impact], *, first_fault_ns: int) -> Ettr | None:
    """Measure and predict the ratio; None without iterations, or with too few before the first fault."""
    count = finished_iterations(run.series)
    if not count:
        return None
    ordered = [sorted(one.iterations, key=lambda step: step.index)[:count] for one in run.series]
    begins = np.array([[step.start_ns for step in rank] for rank in ordered]).min(axis=0)
    end_ns = int(max(rank[-1].end_ns for rank in ordered))
    storage = np.array([[step.ingest_ns + step.checkpoint_ns for step in rank] for rank in ordered]).max(axis=0)
    # An iteration extends to the start of the next one, so that the time between them counts.
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
