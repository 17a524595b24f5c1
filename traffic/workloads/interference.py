"""Interference: how much the groups of a job slow each other down, measured by running each group alone as well.

The groups of a phase run at the same time and are not synchronised. They share RNICs, links and switches, and on a soft
lab the CPUs of the machine. The interference ratio is the time of a group's collective in the whole job over its time
alone; 1 means that the groups do not slow each other down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from faultbed.testbed.errors import UsageError
from faultbed.traffic.workloads.job import JobResult, JobSpec, groups

__all__ = ["Interference", "Place", "alone", "interference"]

Place = tuple[int, tuple[str, ...]]
"""A group of a phase: the phase's index, and the RNIC of each member."""


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


def alone(spec: JobSpec, ranks: Sequence[str], algorithms: Sequence[str]) -> dict[Place, JobSpec]:
    """Return a job for each group of each phase, which runs that group alone. Groups on the same RNICs share a job.

    Args:
        spec: the whole job.
        ranks: the RNIC of each of its ranks.
        algorithms: the algorithm of each of its phases. A group alone uses the same one.

    Raises:
        UsageError: a group has more ranks on some of its RNICs than on others.
    """
    jobs: dict[Place, JobSpec] = {}
    for number, phase in enumerate(spec.phases):
        for members in groups(spec.grid, phase.along):
            places = tuple(ranks[member] for member in members)
            rnics = tuple(dict.fromkeys(places))
            ranks_per_rnic = len(places) // len(rnics)
            if rnics * ranks_per_rnic != places:
                raise UsageError(
                    f"{phase.collective} along {phase.along}: the group of ranks {', '.join(map(str, members))} has "
                    "more ranks on some of its RNICs than on others, and cannot run alone; choose another grid, or "
                    "another number of ranks per RNIC"
                )
            jobs[number, places] = replace(
                spec,
                grid=((phase.along, len(members)),),
                phases=(replace(phase, algorithm=algorithms[number]),),
                ranks=rnics,
                ranks_per_rnic=ranks_per_rnic,
                storage=None,
            )
    return jobs


def interference(together: JobResult, by_place: Mapping[Place, JobResult]) -> tuple[Interference, ...]:
    """Return the interference of each phase and group; `by_place` are the results of the jobs of `alone`.

    A group is left out if its job alone failed or had wrong data, or if it has no time in one of the two.
    """
    interferences = []
    for group in together.groups:
        result = by_place.get((group.phase, tuple(together.ranks[member] for member in group.members)))
        is_right = result is not None and result.outcome != "failed" and not result.wrong_elements
        alone_ns = result.groups[0].time_ns if result is not None and is_right and result.groups else 0.0
        if group.time_ns and alone_ns:
            interferences.append(
                Interference(phase=group.phase, members=group.members, together_ns=group.time_ns, alone_ns=alone_ns)
            )
    return tuple(interferences)
