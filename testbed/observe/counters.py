"""Counters of a lab: one request to each machine's watcher, to all machines at once.

    read(lab) -> {"host1": {"rxe0.out_of_seq_request": 0, "be0.carrier_changes": 2, "gpu0.nr_throttled": 0, ...},
                  "rtsw1": {"ctsw1.carrier_down_count": 1, "ctsw1.tx_bytes": 12345, ...}}

Names in `STATES` are states, not counters: the same reading shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from testbed.errors import LabError

if TYPE_CHECKING:
    from testbed.lab import Lab

__all__ = ["MLX5", "STATES", "Snapshot", "delta", "deltas", "flat_deltas", "read", "restarted", "value_at"]

Snapshot = Mapping[str, Mapping[str, int]]
"""Counter values by node and name."""

STATES = frozenset(
    {
        *("carrier", "up", "quota_us", "mtu", "hash_policy", "stopped", "queue_bytes", "clocks_set", "power_capped"),
        *("stepped", "full", "running", "neighbours", "sm_mhz", "multipath", "steered"),
        *("temp_c", "remap_pending", "remap_failed", "slowdown_c", "shutdown_c"),
    }
)
"""Last parts of names that are states: 0 or 1, a setting, a queue length, s, MHz, °C, a limit (`quota_us` -1: none)."""

MLX5 = {
    "out_of_seq_request": "out_of_sequence",
    "rcvd_seq_err": "packet_seq_err",
    "completer_retry_err": "local_ack_timeout_err",
    "retry_exceeded_err": "req_transport_retries_exceeded",
    "rcvd_rnr_err": "rnr_nak_retry_err",
    "send_rnr_err": "out_of_buffer",
    "retry_rnr_exceeded_err": "req_rnr_retries_exceeded",
}
"""Counters of rdma_rxe, and their counterparts in mlx5 (drivers/infiniband/hw/mlx5/counters.c).

Other counters have the same name in both, such as `duplicate_request`. Those of mlx5 are not yet run on hardware.
"""
_SINCE_BOOT, _FELL = ("ip.", "tcp.", "cpu", "memory."), 2
"""Counters that only a boot (or a new network namespace) resets, and how many must be lower: one may have been read
inconsistently."""


def read(lab: Lab, nodes: Iterable[str] | None = None, *, timeout_s: float = 60.0) -> dict[str, dict[str, int]]:
    """Read the counters of some nodes (default: every host and switch of the lab).

    Raises:
        Unreachable: a machine does not answer.
        CommandFailed: it did not answer in time.
        LabError: there is no such node, or its machine could not read them.
    """
    known = (*lab.topology.host_by_name, *lab.topology.switch_by_name)
    wanted = tuple(dict.fromkeys(nodes)) if nodes is not None else known
    for name in wanted:
        if name not in known:
            raise LabError(f"no node {name} in lab {lab.name}: choose one of {', '.join(known)}")
    machines = lab.carried(wanted)

    def read_machine(machine: str) -> dict[str, dict[str, int]]:
        answer = lab.request(machine, {"do": "counters", "nodes": machines[machine]}, timeout_s=timeout_s)
        nodes: dict[str, dict[str, int]] = answer["nodes"]
        return nodes

    with ThreadPoolExecutor(max_workers=max(1, len(machines))) as pool:
        snapshot = {name: values for part in pool.map(read_machine, machines) for name, values in part.items()}
    return {name: snapshot[name] for name in wanted}


def value_at(snapshot: Snapshot, key: str) -> int | None:
    """Return one value by its `node/name`; None if it was not read."""
    node, _, name = key.partition("/")
    return snapshot.get(node, {}).get(name)


def delta(before: int, after: int) -> int:
    """Return a counter's increment; a lower value means a reset (reboot, module reload), counted from 0."""
    return after - before if after >= before else after


def deltas(before: Snapshot, after: Snapshot) -> dict[str, dict[str, int]]:
    """Return the increments by node and name of all that was read both times; for states, the differences."""
    return {
        node: {
            name: value - was[name] if _is_state(name) else delta(was[name], value)
            for name, value in values.items()
            if name in was
        }
        for node, values in after.items()
        for was in (before.get(node, {}),)
    }


def restarted(before: Snapshot, after: Snapshot) -> dict[str, tuple[str, ...]]:
    """Return the nodes that have booted between two readings, each with the counters that show it.

    All counters of such a node lack what came before the boot, also those that are higher by now.
    """
    fell = {
        node: tuple(
            name
            for name in was
            if name.startswith(_SINCE_BOOT)
            and not _is_state(name)
            and after.get(node, {}).get(name, was[name]) < was[name]
        )
        for node, was in before.items()
    }
    return {node: names for node, names in fell.items() if len(names) >= _FELL}


def _is_state(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in STATES


def flat_deltas(before: Snapshot, after: Snapshot) -> dict[str, int]:
    """Return increments as `node/name`, without states, of nodes that were read both times.

    A counter that appeared since counts from 0.
    """
    return {
        f"{node}/{name}": delta(before[node].get(name, 0), value)
        for node, values in after.items()
        if node in before
        for name, value in values.items()
        if not _is_state(name)
    }
