"""Hosts that a run excludes: those that preflight finds unfit, and those that the user names.

A host is left out for what is wrong at itself, at its end or at the switch's end of one of its cables, or because it
does not answer. What is wrong with the fabric is no host's, and no host that is left out would mend it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.verdict import LeftOut
from testbed.errors import LabError, UsageError
from testbed.inventory.lab_inventory import Inventory
from testbed.inventory.schema import near
from testbed.inventory.subset import without_hosts
from testbed.lab import open_lab
from testbed.model.topology import Topology
from testbed.preflight.checks import Check, State, Wrong, run_checks
from testbed.preflight.collect import read_facts
from traffic.flows.burnin import Outlier, ends_in_common

__all__ = ["REACH", "Unfit", "by_hand", "excluded_hosts", "of_outliers", "only", "silent_hosts", "unfit"]

REACH = "reach"
_BY_HAND = "named by hand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """The hosts to be left out, and what is still wrong without them."""

    hosts: tuple[LeftOut, ...]
    rest: tuple[Wrong, ...]


def by_hand(inventory: Inventory, names: Iterable[str]) -> tuple[LeftOut, ...]:
    """Return the hosts that the user has excluded.

    Raises:
        UsageError: the lab has no such host.
    """
    excluded = tuple(dict.fromkeys(names))
    _refuse_unknown(inventory, excluded, option="--without ")
    return tuple(LeftOut(host=name, why=_BY_HAND) for name in excluded)


def only(inventory: Inventory, hosts: Collection[str]) -> Inventory:
    """Return the inventory with these hosts only, or unchanged if none is given.

    Raises:
        UsageError: the lab has no such host.
    """
    _refuse_unknown(inventory, hosts)
    other_hosts = [name for name in inventory.topology.host_by_name if name not in hosts]
    return without_hosts(inventory, other_hosts) if hosts else inventory


def _refuse_unknown(inventory: Inventory, names: Iterable[str], *, option: str = "") -> None:
    known = list(inventory.topology.host_by_name)
    for name in names:
        if name not in known:
            prefix = f"{option}{name}: " if option else ""
            raise UsageError(f'{prefix}no host "{name}" in {inventory.name}{near(name, known)}')


def unfit(inventory: Inventory, state: State, checks: Sequence[Check], already: Iterable[LeftOut] = ()) -> Unfit:
    """Exclude hosts with findings, and repeat the checks without them until no host has a finding.

    Consequences of a faulty host elsewhere, such as a prefix without a route, disappear when the host is excluded.
    """
    out = {exclusion.host: exclusion for exclusion in already}
    while True:
        part = without_hosts(inventory, out)
        wrong = run_checks(part, {name: facts for name, facts in state.items() if name not in out}, checks)
        at: dict[str, list[Wrong]] = {}
        for finding in wrong:
            if host := _host_of(part.topology, finding.where):
                at.setdefault(host, []).append(finding)
        if not at:
            return Unfit(hosts=tuple(out.values()), rest=tuple(wrong))
        out |= {host: LeftOut(host=host, why=_why(some)) for host, some in at.items()}


def of_outliers(outliers: Iterable[Outlier], already: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    """Return the hosts to exclude for slow or dead pairs of a burn-in, those with the most such pairs first.

    If a pair shares no host with another such pair, the faulty end is ambiguous, and both hosts are excluded.
    """
    known = {exclusion.host for exclusion in already}
    pairs = ({end.partition(":")[0] for end in (outlier.pair.src, outlier.pair.dst)} for outlier in outliers)
    return tuple(
        LeftOut(host=host, why=f"burn-in: {most} pairs with it are slow or dead")
        for hosts, most in ends_in_common(pair for pair in pairs if not pair & known)
        for host in hosts
    )


def silent_hosts(silent: Mapping[str, str]) -> tuple[LeftOut, ...]:
    """Return the hosts that did not answer preflight."""
    return tuple(LeftOut(host=host, why=f"{REACH}: {why}") for host, why in silent.items())


def excluded_hosts(
    inventory: Inventory, checks: Sequence[Check], already: Sequence[LeftOut], progress: Callable[[str], None]
) -> tuple[LeftOut, ...]:
    """Look at every machine (no burn-in) and say which hosts a run must do without, `already` among them.

    Raises:
        LabError: something is wrong that is no host's, or a switch does not answer.
    """
    progress("preflight: checking which hosts are fit")
    silent: dict[str, str] = {}
    with open_lab(without_hosts(inventory, [exclusion.host for exclusion in already])) as lab:
        state = read_facts(lab, silent=silent)
    fitness = unfit(inventory, state, checks, [*already, *silent_hosts(silent)])
    if fitness.rest:
        first = fitness.rest[0]
        more = f", and {len(fitness.rest) - 1} more" if len(fitness.rest) > 1 else ""
        raise LabError(
            f"{inventory.name}: {first.check} at {first.where}: {first.found}, right is {first.wanted}{more}; "
            "no host can be left out for that: `faultbed preflight` tells all, or run without --leave-out"
        )
    for exclusion in fitness.hosts:
        progress(f"leaving out {exclusion.host}: {exclusion.why}")
    return fitness.hosts


def _host_of(topology: Topology, where: str) -> str | None:
    """Return the host of a finding: the host itself, or the host at the other end of a switch port; None: neither."""
    name = where.partition(" ")[0]
    if (host := name.partition(":")[0]) in topology.host_by_name:
        return host
    ports = {f"{link.a.node}:{link.a.netdev}": link.b.node for link in topology.links if link.rnic is not None}
    return ports.get(name)


def _why(wrong: Sequence[Wrong]) -> str:
    first = wrong[0]
    more = f"; {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{first.check}: {first.where}: {first.found}{more}"
