"""The sections of a job, `[workload.storage]` and `[workload.resilience]`, and the forms of its grid and its phases.

A grid is `tp=2,dp=2`, a phase `dp:all-reduce:1MiB:ring`, a checkpoint `4MiB:10:async`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from faultbed.harness.experiment.declare.field_types import (
    Choice,
    Count,
    Duration,
    Parsed,
    Selector,
    Several,
    Size,
)
from faultbed.harness.experiment.declare.section import Section
from faultbed.testbed.units import SIZE, parse_size_bytes
from faultbed.traffic.workloads.collective import AUTO
from faultbed.traffic.workloads.elastic.machine import MODES as RESTARTS
from faultbed.traffic.workloads.elastic.machine import WITHOUT_SPARE, Policy
from faultbed.traffic.workloads.elastic.resilience import Resilience
from faultbed.traffic.workloads.job import JobPhase
from faultbed.traffic.workloads.storage_service import LEAST_KEPT, MODES, Storage, check

__all__ = ["ResilienceSection", "StorageSection", "parse_grid", "parse_phase", "write_grid", "write_phase"]


def parse_grid(text: str) -> tuple[tuple[str, int], ...]:
    """Parse dimensions and their sizes, fastest first, such as `tp=2,dp=2`.

    Raises:
        ValueError: the text has another form.
    """
    dimensions = []
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.strip() or not size.strip().isdecimal():
            raise ValueError(f'"{part}" is not a dimension and its size, as in tp=2')
        dimensions.append((name.strip(), int(size)))
    return tuple(dimensions)


def write_grid(grid: tuple[tuple[str, int], ...]) -> str:
    """Return the text of a grid."""
    return ",".join(f"{name}={size}" for name, size in grid)


def parse_phase(text: str) -> JobPhase:
    """Parse a collective along a dimension, such as `dp:all-reduce:1MiB`.

    Raises:
        ValueError: the text has another form, or its size is invalid.
    """
    along, _, rest = text.partition(":")
    name, _, rest = rest.partition(":")
    size, _, algorithm = rest.partition(":")
    if not (along and name and size):
        raise ValueError("write it as in dp:all-reduce:1MiB, or dp:all-reduce:1MiB:ring")
    return JobPhase(along=along, collective=name, size_bytes=parse_size_bytes(size), algorithm=algorithm or AUTO)


def write_phase(phase: JobPhase) -> str:
    """Return the text of a phase."""
    return f"{phase.along}:{phase.collective}:{SIZE.format(phase.size_bytes)}:{phase.algorithm}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoints:
    """Size of each rank's checkpoint in bytes, interval in iterations, and mode."""

    size_bytes: int
    every: int
    mode: str


def _parse_checkpoints(text: str) -> _Checkpoints:
    """Parse size, interval in iterations and mode of checkpoints, such as `4MiB:10:async`.

    Raises:
        ValueError: the text has another form.
    """
    size, _, rest = text.partition(":")
    every, _, mode = rest.partition(":")
    if every and not every.isdecimal():
        raise ValueError(f'"{every}" is not a number of iterations; write it as in 4MiB, 4MiB:10 or 4MiB:10:async')
    return _Checkpoints(size_bytes=parse_size_bytes(size), every=int(every or 10), mode=mode or "sync")


def _write_checkpoints(checkpoints: _Checkpoints) -> str:
    return f"{SIZE.format(checkpoints.size_bytes)}:{checkpoints.every}:{checkpoints.mode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSection(Section):
    """`[workload.storage]`: a host that serves a job over the front end, by TCP."""

    host: Annotated[str, Selector("Host for data and checkpoints, over the front end.", options=("--storage",))]
    ingest_bytes: Annotated[int, Size("Data that every rank prefetches for each iteration.", key="ingest")] = 0
    checkpoint: Annotated[
        _Checkpoints | None,
        Parsed(
            "Size of each rank's checkpoint, its interval in iterations (default 10) and its mode: "
            f"{', '.join(MODES)} (default sync).",
            parser=_parse_checkpoints,
            writer=_write_checkpoints,
            example="4MiB:10:async",
        ),
    ] = None
    keep: Annotated[
        int, Count("Newest complete sets of checkpoints that stay on the host's disk.", least=LEAST_KEPT, most=100)
    ] = 3
    readers: Annotated[
        tuple[str, ...],
        Several(
            "Hosts without a part in the job that read as much at once as a rank does.",
            of=Selector("Host that reads."),
            options=("--reader",),
        ),
    ] = ()
    read_every_ns: Annotated[int, Duration("Interval between the planned reads of a reader.", key="read_every")] = (
        250_000_000
    )

    def decoded(self, source: str) -> Storage:  # noqa: ARG002
        """Return the storage as traffic takes it.

        Raises:
            UsageError: nothing would be stored or served.
        """
        checkpoint = self.checkpoint or _Checkpoints(size_bytes=0, every=1, mode=MODES[0])
        storage = Storage(
            host=self.host,
            ingest_bytes=self.ingest_bytes,
            checkpoint_bytes=checkpoint.size_bytes,
            every=checkpoint.every,
            mode=checkpoint.mode,
            keep=self.keep,
            readers=self.readers,
            read_every_ns=self.read_every_ns,
        )
        check(storage)
        return storage


@dataclass(frozen=True, slots=True, kw_only=True)
class ResilienceSection(Section):
    """`[workload.resilience]`: how a job restarts after the loss of a host."""

    restart: Annotated[
        str,
        Choice(
            "What a restart does. spare: a spare takes the place of each lost rank; shrink: the job continues with "
            "fewer ranks; same: it waits until the host is back.",
            among=RESTARTS,
        ),
    ] = "spare"
    spares: Annotated[
        tuple[str, ...], Several("RNICs that take the place of lost ranks.", of=Selector("RNIC of a spare."))
    ] = ()
    without_spare: Annotated[str, Choice("What restart = spare does when no spare is left.", among=WITHOUT_SPARE)] = (
        "fail"
    )
    most_restarts: Annotated[int, Count("Maximum number of restarts.", least=1, most=100)] = 8
    rejoin_ns: Annotated[
        int, Duration("How long restart = same waits for all lost hosts together.", key="rejoin", above=0)
    ] = 600_000_000_000

    def problems(self) -> Iterable[tuple[str, str]]:
        """Return the spares that are named twice."""
        for index, name in enumerate(self.spares):
            if name in self.spares[:index]:
                yield f"spares[{index}]", f'"{name}" appears twice; a spare is one RNIC'

    def decoded(self, source: str) -> Resilience:  # noqa: ARG002
        """Return the policy as traffic takes it."""
        policy = msgspec.convert(
            {
                "restart": self.restart,
                "without_spare": self.without_spare,
                "most_restarts": self.most_restarts,
            },
            Policy,
        )
        return Resilience(policy=policy, spares=self.spares, rejoin_s=self.rejoin_ns / 1e9)
