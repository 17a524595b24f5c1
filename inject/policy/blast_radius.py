"""The blast radius of faults: how much of a lab they affect at the same time, and the limits of its owner. Pure.

A fault affects its target: a port or RNIC counts as its link, a GPU as its host. `faultbed_safety` sets the limits. By
default a soft lab has none. A rack lab allows faults on one link, one host and one switch at a time, and never on all
uplinks of a rack switch, because its rack may run another user's job.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from faultbed.inject.kinds.catalogue import Trait, has_trait
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.inject.policy.safety import Forbidden, policy_of
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.model.topology import Topology

__all__ = ["BlastRadius", "blast_radius_of", "check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlastRadius:
    """Names of the affected parts of a lab.

    `uplinks` are the uplinks in `links`, and those of each switch with a fault that takes the whole switch down.
    """

    links: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    switches: frozenset[str] = frozenset()
    uplinks: frozenset[str] = frozenset()


def blast_radius_of(planned: Collection[PlannedFault], topology: Topology) -> BlastRadius:
    """Return the parts of a lab that these faults affect together."""
    links = {fault.target.link for fault in planned if fault.target.link is not None}
    switches = {fault.target.node for fault in planned if fault.target.kind == "switch"}
    uplinks_of_switches = {
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
        uplinks=frozenset({link.name for link in links if link.is_uplink} | uplinks_of_switches),
    )


def check(planned: Sequence[PlannedFault], inventory: Inventory) -> None:
    """Refuse faults that affect more at one time than the lab's owner allows.

    Raises:
        Forbidden: the message names the line of the policy, the affected parts, and when.
    """
    for moment_s in sorted({fault.spec.at_s for fault in planned}):
        active = [fault for fault in planned if fault.spec.at_s <= moment_s < fault.ends_s]
        # Whichever targets are chosen later, together they must be allowed.
        for chosen in itertools.product(*(fault.options for fault in active)):
            _check_moment(chosen, inventory, f"at {moment_s:g} s" if moment_s else "at once")


def _check_moment(active: Sequence[PlannedFault], inventory: Inventory, when: str) -> None:
    policy, radius = policy_of(inventory), blast_radius_of(active, inventory.topology)
    faults = ", ".join(f"{fault.kind} on {fault.target.text}" for fault in active)
    default = math.inf if traits_of(inventory.kind).has_snapshot else 1
    for part, names, limit in (
        ("links", radius.links, policy.most_links),
        ("hosts", radius.hosts, policy.most_hosts),
        ("switches", radius.switches, policy.most_switches),
    ):
        allowed = default if limit is None else limit
        if len(names) > allowed:
            raise Forbidden(
                f"{faults}: {len(names)} {part} would be affected {when} ({', '.join(sorted(names))}); "
                f"{inventory.name} allows {allowed:g} (faultbed_safety.most_{part}); begin fewer faults at once"
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
