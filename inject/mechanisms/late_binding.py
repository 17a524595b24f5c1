"""Resolve what is known only just before a packet fault is armed: the queue pair and PSN that it hits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from faultbed.inject.mechanisms.mechanism import LateBinding
from faultbed.testbed.errors import FaultError

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab

__all__ = ["bind", "connected_qps"]


def bind(
    lab: Lab, binding: LateBinding | None, *, qp: int | None, psn: int | None, where: str, timeout_s: float
) -> dict[str, int]:
    """Return the values to send with the arm request: `qp`, and `psn` or its distance `ahead` of the current PSN.

    Args:
        lab: the lab.
        binding: what is not known yet; None: everything is known.
        qp: the destination QP, if the caller knows it.
        psn: the PSN, if the caller knows it.
        where: how error messages name the fault.
        timeout_s: deadline of the command on the RNIC's host.

    Raises:
        FaultError: the RNIC has no such connected QP, or its host cannot list its QPs.
        CommandFailed: the command failed on the RNIC's host.
        Unreachable: the RNIC's host does not answer.
    """
    if binding is None:
        return {}
    bound = {name: value for name, value in (("qp", qp), ("psn", psn)) if value is not None}
    if "qp" in bound and ("psn" in bound or binding.psn_ahead is None):
        return bound
    requested_qp = qp if qp is not None else binding.qp
    argv = ["rdma", "-j", "-d", "resource", "show", "qp", "link", f"{binding.rnic}/1"]
    output = lab.node(binding.host).run(argv, timeout_s=timeout_s).stdout
    try:
        connected = connected_qps(output)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise FaultError(
            f"{where}: {binding.host}: `{' '.join(argv)}` prints no list of queue pairs ({error}): {output[:200]!r}; "
            "give the fault its qp, or install iproute2 4.17 or later there"
        ) from None
    number = _chosen(connected, requested_qp)
    if number is None:
        connected_qpns = ", ".join(map(str, connected)) or "none"
        raise FaultError(
            f"{where}: {binding.host}:{binding.rnic} has no connected QP {requested_qp} (connected: {connected_qpns}); "
            "start the workload before the fault"
        )
    bound["qp"] = number
    if binding.psn_ahead is not None and "psn" not in bound:
        bound["ahead"] = binding.psn_ahead
    return bound


def _chosen(connected: list[int], requested: int | str) -> int | None:
    """Return the queue pair that a number, `any` or `any[K]` names among the connected ones; None: there is none."""
    if isinstance(requested, int):
        return requested if requested in connected else None
    place = int(requested.removeprefix("any").strip("[]") or 0)
    return connected[place] if place < len(connected) else None


def connected_qps(output: str) -> list[int]:
    """Return the numbers of the connected RC queue pairs in the output of `rdma -j resource show qp`, sorted.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: the output has another form.
    """
    listed = json.loads(output or "[]")
    return sorted(
        int(entry["lqpn"]) for entry in listed if entry.get("type") == "RC" and entry.get("state") in ("RTR", "RTS")
    )
