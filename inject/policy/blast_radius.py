"""How much of a lab faults hurt at once, and how much its owner allows. Pure.

A fault hurts what it is aimed at: a link (by its port or its RNIC), a host (also by its GPU), a switch. The limits are
those of `faultbed_safety`; where an inventory does not say them, a soft lab has none, and a rack lab is hurt in one
place of each sort at a time and never at all uplinks of a rack switch: behind them is everybody else's rack.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inject.fault_plan import PlannedFault
from inject.policy.safety import Forbidden, policy_of
from testbed.inventory.lab_inventory import Inventory
from testbed.model.topology import Topology

__all__ = ["Hurt", "check", "hurt"]

# A switch that only hashes otherwise still sends over all its uplinks.
_SPARES_UPLINKS = frozenset({"switch.hash-policy"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurt:
    """Names of what is hurt. `uplinks` are also those of a switch that is hurt as a whole."""

    links: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    switches: frozenset[str] = frozenset()
    uplinks: frozenset[str] = frozenset()


def hurt(planned: Collection[PlannedFault], topology: Topology) -> Hurt:
    """What these faults hurt together."""
    links = {fault.target.link for fault in planned if fault.target.link is not None}
    switches = {fault.target.node for fault in planned if fault.target.kind == "switch"}
    behind = {
        link.name
        for fault in planned
        if fault.target.kind == "switch" and fault.kind not in _SPARES_UPLINKS
        for link in topology.links_of(fault.target.node)
        if link.is_uplink
    }
    return Hurt(
        links=frozenset(link.name for link in links),
        hosts=frozenset(fault.target.node for fault in planned if fault.target.kind in ("host", "gpu")),
        switches=frozenset(switches),
        uplinks=frozenset({link.name for link in links if link.is_uplink} | behind),
    )


def check(planned: Sequence[PlannedFault], inventory: Inventory) -> None:
    """Refuse faults that hurt more at one time than the lab's owner allows.

    Raises:
        Forbidden: the sentence says which line of the policy, what would be hurt, and when.
    """
    for moment_s in sorted({fault.at_s for fault in planned}):
        at_once = [fault for fault in planned if fault.at_s <= moment_s < fault.at_s + fault.for_s]
        _check_moment(at_once, inventory, f"at {moment_s:g} s" if moment_s else "at once")


def _check_moment(at_once: Sequence[PlannedFault], inventory: Inventory, when: str) -> None:
    policy, found = policy_of(inventory), hurt(at_once, inventory.topology)
    what = ", ".join(f"{fault.kind} on {fault.target.text}" for fault in at_once)
    unsaid = math.inf if inventory.kind == "soft" else 1
    for sort, names, most in (
        ("links", found.links, policy.most_links),
        ("hosts", found.hosts, policy.most_hosts),
        ("switches", found.switches, policy.most_switches),
    ):
        allowed = unsaid if most is None else most
        if len(names) > allowed:
            raise Forbidden(
                f"{what}: {len(names)} {sort} would be hurt {when} ({', '.join(sorted(names))}); {inventory.name} "
                f"allows {allowed:g} (faultbed_safety.most_{sort}): let one be over before the other begins"
            )
    if inventory.may_lose_all_uplinks:
        return
    for switch in inventory.topology.switches:
        uplinks = {link.name for link in inventory.topology.links_of(switch.name) if link.is_uplink}
        if switch.role == "rtsw" and uplinks and uplinks <= found.uplinks:
            raise Forbidden(
                f"{what}: all uplinks of {switch.name} would be hurt {when}, and its rack with them; {inventory.name} "
                "allows that only with faultbed_safety.all_uplinks: allow"
            )
