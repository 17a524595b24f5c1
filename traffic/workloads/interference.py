"""How much the groups of a job slow each other down: the same collectives, all at once and each group alone.

The groups of a phase run beside each other without any agreement. What they share is RNICs, links and switches, and on
a soft lab the CPUs of the machine. The interference ratio is the time of a group's collective in the whole job over its
time alone; 1 means that the groups do not notice each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from traffic.workloads.job import JobResult, JobSpec, groups

__all__ = ["Interference", "alone", "interference"]

Place = tuple[int, tuple[str, ...]]
"""A phase, and the RNICs of the members of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Median times of a group's collective in phase `phase`, in ns: beside all other groups, and alone."""

    phase: int
    members: tuple[int, ...]
    together_ns: float
    alone_ns: float

    @property
    def ratio(self) -> float:
        """Time together over time alone."""
        return self.together_ns / self.alone_ns


def alone(spec: JobSpec, ranks: Sequence[str]) -> dict[Place, JobSpec]:
    """Return the jobs that run one group of one phase alone. Groups on the same RNICs are alike and need only one.

    Args:
        spec: the whole job.
        ranks: the RNIC of each of its ranks.
    """
    jobs: dict[Place, JobSpec] = {}
    for number, phase in enumerate(spec.phases):
        for members in groups(spec.grid, phase.along):
            places = tuple(ranks[member] for member in members)
            jobs[number, places] = replace(
                spec,
                grid=((phase.along, len(members)),),
                phases=(phase,),
                ranks=places,
                ranks_per_rnic=1,
                storage=None,
            )
    return jobs


def interference(together: JobResult, by_place: Mapping[Place, JobResult]) -> tuple[Interference, ...]:
    """Return the interference of each phase and group that ran; `by_place` are the results of the jobs of `alone`."""
    found = []
    for group in together.groups:
        result = by_place.get((group.phase, tuple(together.ranks[member] for member in group.members)))
        alone_ns = result.groups[0].time_ns if result is not None and result.groups else 0.0
        if group.time_ns and alone_ns:
            found.append(
                Interference(phase=group.phase, members=group.members, together_ns=group.time_ns, alone_ns=alone_ns)
            )
    return tuple(found)
