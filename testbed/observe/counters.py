"""Counters of a lab: one request to each machine's watcher, to all machines at once.

    read(lab) -> {"host1": {"rxe0.out_of_seq_request": 0, "be0.carrier_changes": 2, "gpu0.nr_throttled": 0, ...},
                  "rtsw1": {"ctsw1.carrier_down_count": 1, "ctsw1.tx_bytes": 12345, ...}}

Names in `STATES` are states, not counters: the same reading shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from faultbed.testbed.errors import LabError
from faultbed.testbed.side_by_side import on_each

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab

__all__ = [
    "BOOT",
    "MLX5",
    "STATES",
    "Snapshot",
    "delta",
    "deltas",
    "flat_deltas",
    "growth",
    "read",
    "restarted",
    "value_at",
    "why_reset",
]

Snapshot = Mapping[str, Mapping[str, int]]
"""Counter values by node and name."""

STATES = frozenset(
    {
        *("carrier", "up", "quota_us", "mtu", "hash_policy", "stopped", "queue_bytes", "clocks_set", "power_capped"),
        *("stepped", "full", "running", "neighbours", "sm_mhz", "multipath", "steered"),
        *("temp_c", "remap_pending", "remap_failed", "slowdown_c", "shutdown_c", "boot"),
        "addresses",
    }
)
"""Last parts of the names of states, which may also fall: flags, settings, lengths, s, MHz, °C, and limits.

A `quota_us` of -1 means that there is no limit.
"""

BOOT = "kernel.boot"
"""A number that changes with each boot of a machine, and with each new network namespace of a switch."""

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
_NEW_QUEUE = ".queue_drops"
"""A counter of a queue: a queue that is added, such as netem, begins at 0."""
_SINCE_BOOT, _FELL = ("ip.", "tcp.", "cpu", "memory."), 2
"""Counters that only a boot or a new network namespace resets, by the beginning of their names, and how many of them
must have fallen to prove one: a single counter may have been misread."""


def read(lab: Lab, nodes: Iterable[str] | None = None, *, timeout_s: float = 60.0) -> dict[str, dict[str, int]]:
    """Read the counters of some nodes (default: every host and switch of the lab).

    Raises:
        Unreachable: a machine does not answer.
        CommandFailed: it did not answer in time.
        LabError: there is no such node, or its machine could not read them.
    """
    known = (*lab.topology.host_by_name, *lab.topology.switch_by_name)
    names = tuple(dict.fromkeys(nodes)) if nodes is not None else known
    for name in names:
        if name not in known:
            raise LabError(f"no node {name} in lab {lab.name}: choose one of {', '.join(known)}")
    machines = lab.carried(names)

    def read_machine(machine: str) -> dict[str, dict[str, int]]:
        answer = lab.request(machine, {"do": "counters", "nodes": machines[machine]}, timeout_s=timeout_s)
        nodes: dict[str, dict[str, int]] = answer["nodes"]
        return nodes

    answers = on_each(machines, read_machine, timeout_s=2 * timeout_s)
    snapshot = {name: values for answer in answers for name, values in answer.items()}
    return {name: snapshot[name] for name in names}


def value_at(snapshot: Snapshot, key: str) -> int | None:
    """Return one value by its `node/name`; None if it was not read."""
    node, _, name = key.partition("/")
    return snapshot.get(node, {}).get(name)


def delta(before: int, after: int) -> int:
    """Return a counter's increment; a lower value means a reset (reboot, module reload), counted from 0."""
    return after - before if after >= before else after


def deltas(before: Snapshot, after: Snapshot) -> dict[str, dict[str, int]]:
    """Return the increments by node and name of all that was read both times; for states, the differences.

    For `BOOT` the value is 1 if the node has booted in between, else 0.
    """
    return {
        node: {name: _difference(name, was[name], value) for name, value in values.items() if name in was}
        for node, values in after.items()
        for was in (before.get(node, {}),)
    }


def restarted(before: Snapshot, after: Snapshot) -> dict[str, tuple[str, ...]]:
    """Return the nodes that have booted between two readings, each with the counters that show it.

    No counter of such a node includes what happened before the boot, even if it is higher by now.
    """
    return {node: names for node in before if (names := _shows_boot(before, after, node))}


def why_reset(before: Snapshot, after: Snapshot, key: str) -> str:
    """Return why the increment of a counter (`node/name`) that was read twice may be too small; empty: it is right.

    It may be too small if the node has booted since, if the device was removed and created again, or if the counter is
    lower than before. A counter that was 0 and is 0 shows none of this by itself, so other counters are compared, too.
    """
    node, _, name = key.partition("/")
    was, now = before.get(node, {}), after.get(node, {})
    if name in was and name in now and now[name] < was[name]:
        return f"was reset, from {was[name]} to {now[name]}"
    if names := _shows_boot(before, after, node):
        return f"belongs to {node}, which has booted since ({_words(names, was, now)})"
    device = name.rpartition(".")[0]
    fallen = tuple(
        other for other in _fallen(was, now) if device and other.rpartition(".")[0] == device and other != name
    )
    return f"belongs to {device}, which was reset since ({_words(fallen, was, now)})" if len(fallen) >= _FELL else ""


def _shows_boot(before: Snapshot, after: Snapshot, node: str) -> tuple[str, ...]:
    """Return the counters that show that a node has booted between two readings; empty if it has not."""
    was, now = before.get(node, {}), after.get(node, {})
    if BOOT in was and BOOT in now and was[BOOT] != now[BOOT]:
        return (BOOT,)
    fell = tuple(name for name in _fallen(was, now) if name.startswith(_SINCE_BOOT))
    return fell if len(fell) >= _FELL else ()


def _fallen(was: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return the counters of a node that are lower than before."""
    return [name for name, value in was.items() if not _is_state(name) and now.get(name, value) < value]


def _words(names: tuple[str, ...], was: Mapping[str, int], now: Mapping[str, int]) -> str:
    if names == (BOOT,):
        return "its kernel has another boot id"
    return ", ".join(f"{name} from {was[name]} to {now[name]}" for name in names[:_FELL])


def _difference(name: str, was: int, now: int) -> int:
    if name == BOOT:
        return int(was != now)
    return now - was if _is_state(name) else delta(was, now)


def _is_state(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in STATES


def flat_deltas(before: Snapshot, after: Snapshot) -> dict[str, int]:
    """Return increments as `node/name`, without states, of counters that were read both times.

    The increment of a counter that was not read before is unknown: it may have had any value.
    """
    return {
        f"{node}/{name}": delta(before[node][name], value)
        for node, values in after.items()
        if node in before
        for name, value in values.items()
        if name in before[node] and not _is_state(name)
    }


def growth(readings: Sequence[Snapshot]) -> dict[str, int]:
    """Return how much each counter (`node/name`) has grown over several readings, resets included. Pure.

    The value of a counter that was not there at the reading before is unknown, except that of a new queue.
    """
    grown: dict[str, int] = {}
    for earlier, later in pairwise(readings):
        for name, increment in flat_deltas(earlier, later).items():
            grown[name] = grown.get(name, 0) + increment
        for node, values in later.items():
            for name, value in values.items():
                if name.endswith(_NEW_QUEUE) and name not in earlier.get(node, {name: 0}):
                    grown[f"{node}/{name}"] = grown.get(f"{node}/{name}", 0) + value
    return grown
