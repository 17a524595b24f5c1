"""What of a packet fault is only known just before it is armed: the queue pair that it meets, asked of its RNIC."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from inject.mechanisms.mechanism import Learn
from testbed.errors import FaultError

if TYPE_CHECKING:
    from testbed.lab import Lab

__all__ = ["learn"]


def learn(
    lab: Lab, what: Learn | None, *, qp: int | None, psn: int | None, where: str, timeout_s: float
) -> dict[str, int]:
    """What the holder is to be told before arming: `qp`, and `psn` or how far `ahead` of what passes.

    Args:
        lab: the lab.
        what: what is not known yet; None: nothing.
        qp: the destination QP, where the caller knows it.
        psn: the PSN likewise.
        where: what messages call the fault.
        timeout_s: how long the RNIC's host may take.

    Raises:
        FaultError: the RNIC has no such connected QP.
    """
    if what is None:
        return {}
    found = {name: value for name, value in (("qp", qp), ("psn", psn)) if value is not None}
    if "qp" in found and ("psn" in found or what.psn_ahead is None):
        return found
    wanted = qp if qp is not None else what.qp
    argv = ["rdma", "-j", "-d", "resource", "show", "qp", "link", f"{what.rnic}/1"]
    listed = json.loads(lab.node(what.host).run(argv, timeout_s=timeout_s).stdout or "[]")
    connected = sorted(
        int(each["lqpn"]) for each in listed if each.get("type") == "RC" and each.get("state") in ("RTR", "RTS")
    )
    number = next((each for each in connected if wanted in ("any", each)), None)
    if number is None:
        there = ", ".join(map(str, connected)) or "none"
        raise FaultError(
            f"{where}: {what.host}:{what.rnic} has no connected QP {wanted} (connected: {there}); is the workload "
            "running?"
        )
    found["qp"] = number
    if what.psn_ahead is not None and "psn" not in found:
        found["ahead"] = what.psn_ahead
    return found
