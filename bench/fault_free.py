"""Part `a-a` of the bench: how often `jct_ratio` of real fault-free iterations leads to a wrong verdict (A/A).

One job runs for thousands of iterations without a fault. Each block of them serves as a run, and the block that ended
at least `APART_S` before it as the run's twin, about as far apart as in practice. The judge assumes a fault in the
middle third of each run, which has no effect. Without an assumed fault, the whole run would be a measurement of the
difference between run and twin, and no verdict could be wrong. The true ratio is 1. If the machine itself becomes
slower, that counts as an error, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bench.rows import Row, mark
from bench.throughput.perftest import PATIENT
from faultbed.harness import confidence
from faultbed.harness.confidence import Interval
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.traffic.workloads import collective
from faultbed.traffic.workloads.collective import CollectiveSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PAIRS", "Pair", "measure", "pairs_of", "rows_of"]

PAIRS = 200
BLOCK = 60
"""Iterations of a run, which takes some ten seconds."""
APART_S = 15.0
SIZE_BYTES = 16384
CHUNK = 3000
"""Iterations of one job; a longer one would keep too many results in memory."""
BOUND, LOOSE_BOUND = 1.0, 1.05
_PATIENCE_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A run and its twin: the ratio of their times, and its interval if there is one."""

    ratio: float
    interval: Interval | None


def measure(lab: Lab, progress: Callable[[str], None], *, pairs: int = PAIRS) -> Iterator[Row]:
    """Run fault-free jobs until there are `pairs` pairs of blocks; yield rows about the verdicts of their intervals.

    Raises:
        LabError: a job failed, or its result was wrong.
    """
    ranks = tuple(f"{host.name}:{host.rnics[0].name}" for host in lab.topology.hosts[:4])
    spec = CollectiveSpec(size_bytes=SIZE_BYTES, iterations=CHUNK, warmup=5, ranks=ranks, qp=PATIENT, compute_units=2)
    pairs_so_far: list[Pair] = []
    while len(pairs_so_far) < pairs:
        with collective.start(lab, spec) as running:
            result = running.wait(_PATIENCE_S)
        if result.outcome != "completed" or result.wrong_elements:
            raise LabError(f"bench a-a: a job without a fault ended as {result.outcome} ({result.where})")
        ends = np.array([[iteration.end_ns for iteration in rank] for rank in result.iterations]).max(axis=0)
        more = pairs_of(np.diff(ends).astype(np.float64))
        if not more:
            raise LabError(f"bench a-a: {CHUNK} iterations took less than {APART_S:g} s")
        pairs_so_far += more
        progress(f"{len(pairs_so_far)} of {pairs} pairs; iterations of {np.diff(ends).mean() / 1e6:.0f} ms")
    yield from rows_of(pairs_so_far[:pairs])


def pairs_of(times_ns: NDArray[np.float64]) -> list[Pair]:
    """Return the pairs of a job's iterations: each block with the latest one that ended `APART_S` before it began."""
    blocks = [times_ns[at : at + BLOCK] for at in range(0, len(times_ns) - BLOCK + 1, BLOCK)]
    ends = np.cumsum([block.sum() for block in blocks])
    quiet = np.ones(BLOCK, dtype=np.bool_)
    quiet[BLOCK // 3 : 2 * BLOCK // 3] = False
    pairs = []
    for number, run in enumerate(blocks):
        before = np.flatnonzero(ends <= ends[number] - run.sum() - APART_S * 1e9)
        if len(before):
            twin = blocks[int(before[-1])]
            interval = confidence.total_ratio(run, twin, quiet=quiet, before=BLOCK // 3)
            pairs.append(Pair(ratio=float(run.sum() / twin.sum()), interval=interval))
    return pairs


def rows_of(pairs: Sequence[Pair]) -> Iterator[Row]:
    """Yield the number of pairs that a bound on `jct_ratio` would FAIL. A fault-free run must never FAIL."""
    decided = [pair.interval for pair in pairs if pair.interval is not None]
    ratios = [pair.ratio for pair in pairs]
    details = (
        f"ratios {min(ratios):.2f}..{max(ratios):.2f}, n={len(pairs)}, {len(pairs) - len(decided)} without an interval"
    )
    for bound in (BOUND, LOOSE_BOUND):
        wrong = sum(interval.low > bound for interval in decided)
        yield (
            f"fault-free runs of {BLOCK} iterations against fault-free twins: FAIL at jct_ratio <= {bound:g}",
            str(wrong),
            details,
            "0",
            mark(reached=wrong == 0 and bool(decided)),
        )
    faster = sum(interval.high < BOUND for interval in decided)
    yield (
        f"fault-free runs against fault-free twins: interval wholly below {BOUND:g} (a disturbed machine)",
        str(faster),
        details,
        "",
        "",
    )
