"""Choose the target of a fault by what workloads use just before the fault is armed (`used-uplink[0]`). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faultbed.inject.evidence.exposure import crossed
from faultbed.inject.evidence.workload_use import WorkloadUse
from faultbed.testbed.errors import FaultError, UsageError
from faultbed.testbed.model.selectors import choose

if TYPE_CHECKING:
    from faultbed.inject.mechanisms.planned_fault import PlannedFault
    from faultbed.testbed.model.topology import Topology

__all__ = ["chosen"]


def chosen(planned: PlannedFault, use: WorkloadUse | None, topology: Topology, *, where: str) -> PlannedFault:
    """Return the fault on the target that its selector and its seed choose among those in use.

    Args:
        planned: a fault with candidates.
        use: what workloads use now; None: no workload is known.
        topology: the lab.
        where: how error messages name the fault.

    Raises:
        FaultError: no path of a queue pair is known, no candidate is in use, or fewer than the index of the selector
            requires.
    """
    if use is None or not (use.paths or any(use.watched.values())):
        why = f" ({use.unknown_paths})" if use is not None and use.unknown_paths else ""
        raise FaultError(
            f"{planned.kind} on {planned.target.text}: no path of a queue pair is known{why}, so nothing shows which "
            "uplinks are used; start the workload before the fault, or name an uplink"
        )
    options = {option.target.text: option for option in planned.candidates}
    try:
        return options[
            choose(planned.target.text, crossed(topology, options, use, by=planned.target.text), seed=planned.spec.seed)
        ]
    except UsageError as error:
        raise FaultError(f"{where}: {error}") from None
