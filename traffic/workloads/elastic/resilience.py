"""Requirements on a job that must survive losses, and the reasons why a job cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.traffic import schedules
from faultbed.traffic.engine.engine_client import Fabric
from faultbed.traffic.engine.task_specs import refuse_local
from faultbed.traffic.schedules import Program
from faultbed.traffic.workloads import job
from faultbed.traffic.workloads.elastic.machine import Policy
from faultbed.traffic.workloads.elastic.placement import shrunk_grid
from faultbed.traffic.workloads.job import JobSpec
from faultbed.traffic.workloads.ranks import place

__all__ = ["Resilience", "check", "check_on_lab"]

WORD_BYTES = 4
"""Bytes of a rank's state for each element of its results (`faultbed.traffic.node.ranks.rank_state`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resilience:
    """How a job restarts (`faultbed.traffic.workloads.elastic.machine.Policy`), and on which `spares` (RNIC names).

    With `restart = same`, a restart waits `rejoin_s` for all lost hosts together. Without `restores`, a restart
    begins with an empty state instead of a checkpoint: tests verify that this is detected.
    """

    policy: Policy
    spares: tuple[str, ...] = ()
    rejoin_s: float = 600.0
    restores: bool = True


def check(spec: JobSpec, resilience: Resilience) -> None:
    """Reject a job that could not be restarted as requested, whatever the lab.

    Raises:
        UsageError: it has no checkpoints, no use for its spares, or a grid that cannot shrink.
    """
    policy = resilience.policy
    if spec.storage is None or not spec.storage.checkpoint_bytes:
        raise UsageError(
            "a job restarts from checkpoints, and this one stores none; give it a storage with checkpoints"
        )
    if spec.ranks_per_rnic > 1:
        raise UsageError(f"a job with restarts has one rank on each RNIC, not ranks_per_rnic {spec.ranks_per_rnic}")
    if spec.storage.readers:
        raise UsageError("a job with restarts has no readers of its storage beside it; leave readers out")
    if policy.restart == "spare" and not resilience.spares:
        raise UsageError("restart = spare needs at least one spare")
    if policy.restart != "spare" and resilience.spares:
        raise UsageError(f"restart = {policy.restart} uses no spares; leave them out, or choose restart = spare")
    if policy.most_restarts < 1:
        raise UsageError(f"a job may restart at least once, got {policy.most_restarts}")
    if policy.may_shrink:
        shrunk_grid(spec.grid, (0,))


def check_on_lab(lab: Fabric, spec: JobSpec, resilience: Resilience) -> None:
    """Reject a job that could not be restarted on this lab.

    Raises:
        UsageError: ranks or spares cannot use the RNICs that are named for them, the checkpoints are too small, or the
            state would have another size on a smaller grid.
    """
    check(spec, resilience)
    ranks, programs, _ = job.fit(lab, spec)
    pairs = [(ranks[src], ranks[dst]) for src, dst in schedules.peers_of(programs)]
    refuse_local(lab.kind, f"job of {len(ranks)} ranks", pairs)
    spares = place(lab, replace(spec, ranks=resilience.spares)) if resilience.spares else ()
    for spare in spares:
        if spare.host in {rank.host for rank in ranks}:
            raise UsageError(f"{spare.name} cannot be a spare: the job has a rank on {spare.host}")
    hosts = [spare.host for spare in spares]
    if traits_of(lab.kind).is_emulated and len(set(hosts)) < len(hosts):
        twice = next(host for host in hosts if hosts.count(host) > 1)
        raise UsageError(
            f"{', '.join(spare.name for spare in spares if spare.host == twice)}: a host can have only one spare, as "
            "soft RoCE cannot reach its own host over the fabric; name spares on different hosts"
        )
    size = _state_bytes(programs)
    stored = spec.storage.checkpoint_bytes if spec.storage else 0
    if stored < size:
        raise UsageError(f"a checkpoint of {stored} bytes cannot hold a rank's state of {size} bytes; make it larger")
    if resilience.policy.may_shrink:
        grid, kept = shrunk_grid(spec.grid, (0,))
        smaller = replace(spec, grid=grid, ranks=tuple(ranks[rank].name for rank in kept))
        if (left := _state_bytes(job.fit(lab, smaller)[1])) != size:
            raise UsageError(
                f"the grid cannot shrink: a rank's state would change from {size} to {left} bytes; use collectives "
                "whose result is as large for any number of ranks, such as all-reduce"
            )


def _state_bytes(programs: Sequence[Program]) -> int:
    return max(WORD_BYTES * sum(int(count) for _, count, _, _ in program["results"]) for program in programs)
