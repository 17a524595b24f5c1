"""The safety policy of a lab's owner: what may be disrupted, for how long, and what needs confirmation. Pure.

The policy is `faultbed_safety` of the inventory. Without it a rack lab allows nothing, and a soft lab, which belongs to
its user alone, allows everything. The policy is checked when a fault is planned by hand, and again by the injector,
which every fault passes through.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from faultbed.inject.kinds.catalogue import CATALOGUE, Trait
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.inject.policy.conflicts import other_host
from faultbed.testbed.errors import FaultError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.inventory.schema import SafetyVars
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.model.topology import Target

__all__ = ["Forbidden", "check", "check_spacing", "policy_of", "refuse_spacing"]

_UNRESTRICTED = SafetyVars(may_disrupt=["*"], longest_fault_s=float("inf"), irreversible="allow")


class Forbidden(FaultError):
    """The policy of the lab's owner forbids this."""

    exit_code = 4


def policy_of(inventory: Inventory) -> SafetyVars:
    """Return the policy of a lab; missing settings have the most restrictive value."""
    return inventory.safety or (_UNRESTRICTED if traits_of(inventory.kind).has_snapshot else SafetyVars())


def check(planned: PlannedFault, inventory: Inventory, *, confirmed: Collection[str] = ()) -> None:
    """Refuse a fault that the policy does not allow.

    Args:
        planned: the fault.
        inventory: its lab.
        confirmed: kinds that the user has confirmed for this run.

    Raises:
        Forbidden: the message names the line of the policy, and what to do.
    """
    for option in planned.candidates:
        check(option, inventory, confirmed=confirmed)
    if planned.candidates:
        return
    policy, fault_text = policy_of(inventory), f"{planned.kind} on {planned.target.text}"
    if not any(fnmatchcase(name, pattern) for name in _names(planned.target) for pattern in policy.may_disrupt):
        allowed = ", ".join(policy.may_disrupt) or "nothing"
        raise Forbidden(
            f"{fault_text}: {inventory.name} does not allow {planned.target.text} to be disrupted; "
            f"faultbed_safety.may_disrupt allows {allowed}; choose another target"
        )
    other = other_host(planned, inventory.topology)
    if other and not any(fnmatchcase(other, pattern) for pattern in policy.may_disrupt):
        raise Forbidden(
            f"{fault_text}: it runs on {other}, and {inventory.name} does not allow {other} to be disrupted "
            "(faultbed_safety.may_disrupt); choose another target"
        )
    if planned.spec.for_s > policy.longest_fault_s:
        raise Forbidden(
            f"{fault_text}: {planned.spec.for_s:g} s exceeds the {policy.longest_fault_s:g} s that {inventory.name} "
            "allows (faultbed_safety.longest_fault_s); shorten it"
        )
    _check_confirmed(planned, fault_text, inventory, confirmed)


def _check_confirmed(planned: PlannedFault, fault_text: str, inventory: Inventory, confirmed: Collection[str]) -> None:
    """Refuse a fault that cannot be reverted, or that may spread, unless the policy or the user allows it."""
    kind, level = CATALOGUE[planned.kind], policy_of(inventory).irreversible
    if not kind.reversible:
        why = "nothing can revert it"
    elif Trait.SPREADS in kind.traits:
        why = "it may affect other users of the fabric, far from its target"
    else:
        return
    if level == "never":
        raise Forbidden(
            f"{fault_text}: {why}, and {inventory.name} does not allow that "
            "(faultbed_safety.irreversible: never); choose another kind"
        )
    if level != "allow" and planned.kind not in confirmed:
        raise Forbidden(
            f"{fault_text}: {why}; confirm it by hand (`faultbed inject … --confirm "
            f"{planned.kind}`), or set "
            "faultbed_safety.irreversible to allow"
        )


def check_spacing(planned: Sequence[PlannedFault], inventory: Inventory) -> None:
    """Refuse faults if one begins sooner after the end of another one than the policy allows.

    Raises:
        Forbidden: the message names both faults, and the time between them.
    """
    least_s = policy_of(inventory).min_spacing_s
    if not least_s > 0:
        return
    ordered = sorted(planned, key=lambda fault: fault.spec.at_s)
    for index, later in enumerate(ordered):
        for earlier in ordered[:index]:
            apart_s = later.spec.at_s - earlier.ends_s
            if apart_s < least_s:
                refuse_spacing(f"{earlier.kind} on {earlier.target.text}", later, apart_s, inventory)


def refuse_spacing(earlier: str, later: PlannedFault, apart_s: float, inventory: Inventory) -> None:
    """Refuse a fault that would begin `apart_s` after the end of an earlier one (negative: they overlap).

    Raises:
        Forbidden: always.
    """
    relation = f"{apart_s:.3g} s after the end of" if apart_s >= 0 else "before the end of"
    raise Forbidden(
        f"{later.kind} on {later.target.text}: it would begin {relation} {earlier}; "
        f"{inventory.name} requires {policy_of(inventory).min_spacing_s:g} s between faults "
        "(faultbed_safety.min_spacing_s); start it later"
    )


def _names(target: Target) -> set[str]:
    """Return the names of a target: as typed, the link's name, and the name from the link's other end."""
    names = {target.text}
    if target.kind == "port" and target.link is not None:
        names |= {target.link.name, *([f"{target.link.b.node}:{target.link.a.node}"] if target.link.is_uplink else [])}
    return names
