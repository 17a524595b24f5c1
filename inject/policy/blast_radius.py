"""The blast radius of faults: how much of a lab they affect at once, and how much the lab's owner allows. Pure.

A fault affects its target: a link (by its port or its RNIC), a host (also by its GPU), a switch. `faultbed_safety` sets
the limits. Without them a soft lab has none. On a rack lab, faults affect one link, one host and one switch at a time,
and never all uplinks of a rack switch, because the rack behind them may run another user's job.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inject.fault_plan import PlannedFault
from inject.kinds.catalogue import Trait, has_trait
from inject.policy.safety import Forbidden, policy_of
from testbed.inventory.lab_inventory import Inventory
from testbed.model.lab_kind import traits_of
from testbed.model.topology import Topology

__all__ = ["BlastRadius", "blast_radius_of", "check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlastRadius:
    """Names of the affected parts of a lab. `uplinks` has all uplinks of a switch whose fault cuts them."""

    links: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    switches: frozenset[str] = frozenset()
    uplinks: frozenset[str] = frozenset()


def blast_radius_of(planned: Collection[PlannedFault], topology: Topology) -> BlastRadius:
    """Return the parts of a lab that these faults affect together."""
    links = {fault.target.link for fault in planned if fault.target.link is not None}
    switches = {fault.target.node for fault in planned if fault.target.kind == "switch"}
    behind = {
        link.name
        for fault in planned
        if fault.target.kind == "switch" and not has_trait(fault.kind, Trait.KEEPS_UPLINKS)
        for link in topology.links_of(fault.target.node)
        if link.is_uplink
    }
    return BlastRadius(
        links=frozenset(link.name for link in links),
        hosts=frozenset(fault.target.node for fault in planned if fault.target.kind in ("host", "gpu")),
        switches=frozenset(switches),
        uplinks=frozenset({link.name for link in links if link.is_uplink} | behind),
    )


def check(planned: Sequence[PlannedFault], inventory: Inventory) -> None:
    """Refuse faults that affect more at one time than the lab's owner allows.

    Raises:
        Forbidden: the message names the line of the policy, the affected parts, and when.
    """
    for moment_s in sorted({fault.at_s for fault in planned}):
        at_once = [fault for fault in planned if fault.at_s <= moment_s < fault.ends_s]
        _check_moment(at_once, inventory, f"at {moment_s:g} s" if moment_s else "at once")


def _check_moment(at_once: Sequence[PlannedFault], inventory: Inventory, when: str) -> None:
    policy, radius = policy_of(inventory), blast_radius_of(at_once, inventory.topology)
    faults = ", ".join(f"{fault.kind} on {fault.target.text}" for fault in at_once)
    default = math.inf if traits_of(inventory.kind).has_snapshot else 1
    for sort, names, most in (
        ("links", radius.links, policy.most_links),
        ("hosts", radius.hosts, policy.most_hosts),
        ("switches", radius.switches, policy.most_switches),
    ):
        allowed = default if most is None else most
        if len(names) > allowed:
            raise Forbidden(
                f"{faults}: {len(names)} {sort} would be affected {when} ({', '.join(sorted(names))}); "
                f"{inventory.name} allows {allowed:g} (faultbed_safety.most_{sort}); begin fewer faults at once"
            )
    if inventory.may_lose_all_uplinks:
        return
    for switch in inventory.topology.switches:
        uplinks = {link.name for link in inventory.topology.links_of(switch.name) if link.is_uplink}
        if switch.role == "rtsw" and uplinks and uplinks <= radius.uplinks:
            raise Forbidden(
                f"{faults}: all uplinks of {switch.name} would be affected {when}, and its rack with them; "
                f"{inventory.name} allows that only with faultbed_safety.all_uplinks: allow"
            )
