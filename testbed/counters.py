"""Counters of a lab: one question to each machine's watcher, all machines at once.

    read(lab) -> {"host1": {"rxe0.out_of_seq_request": 0, "be0.carrier_changes": 2, "gpu0.nr_throttled": 0, ...},
                  "rtsw1": {"ctsw1.carrier_down_count": 1, "ctsw1.tx_bytes": 12345, ...}}

What `STATES` names are states, not counters; they are here because the same reading shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from testbed.errors import LabError

if TYPE_CHECKING:
    from testbed.lab import Lab

__all__ = ["STATES", "Snapshot", "delta", "flat_deltas", "read"]

Snapshot = Mapping[str, Mapping[str, int]]
"""Counter values by node and name."""

STATES = frozenset(
    {
        *("carrier", "up", "quota_us", "mtu", "hash_policy", "stopped", "queue_bytes", "clocks_set", "power_capped"),
        *("stepped", "full", "running"),
    }
)
"""Last parts of names that are states: 0 or 1, a setting, what waits, seconds, or a limit (`quota_us` -1: none)."""


def read(lab: Lab, nodes: Iterable[str] | None = None, *, timeout_s: float = 60.0) -> dict[str, dict[str, int]]:
    """Read the counters of some nodes (default: every host and switch of the lab).

    Raises:
        Unreachable: a machine does not answer.
        CommandFailed: it did not answer in time.
        LabError: there is no such node, or its machine could not tell.
    """
    known = (*lab.topology.host_by_name, *lab.topology.switch_by_name)
    wanted = tuple(dict.fromkeys(nodes)) if nodes is not None else known
    for name in wanted:
        if name not in known:
            raise LabError(f"no node {name} in lab {lab.name}: counters are of {', '.join(known)}")
    machines = lab.carried(wanted)

    def one(machine: str) -> dict[str, dict[str, int]]:
        answer = lab.ask(machine, {"do": "counters", "nodes": machines[machine]}, timeout_s=timeout_s)
        found: dict[str, dict[str, int]] = answer["nodes"]
        return found

    with ThreadPoolExecutor(max_workers=max(1, len(machines))) as pool:
        found = {name: values for part in pool.map(one, machines) for name, values in part.items()}
    return {name: found[name] for name in wanted}


def delta(before: int, after: int) -> int:
    """How far a counter has come. One that stands lower than before was reset (reboot, module reload): count from 0."""
    return after - before if after >= before else after


def flat_deltas(before: Snapshot, after: Snapshot) -> dict[str, int]:
    """Increments as `node/name`, for counters that are in both (or appeared since, counted from 0), without states."""
    return {
        f"{node}/{name}": delta(before.get(node, {}).get(name, 0), value)
        for node, values in after.items()
        for name, value in values.items()
        if name.rsplit(".", 1)[-1] not in STATES
    }
