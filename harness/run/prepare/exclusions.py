"""Hosts that a run excludes: those that preflight finds unfit, and those that the user names.

A host is unfit if it does not answer, or if preflight has a finding on the host itself or on the switch port of one of
its cables. A finding on any other part of the fabric excludes no host, because the remaining hosts use that part, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from faultbed.harness.verdict import ExcludedHost
from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.inventory.schema import near
from faultbed.testbed.inventory.subset import without_hosts
from faultbed.testbed.lab import open_lab
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.preflight.checks import Check, PreflightFinding, State, run_checks
from faultbed.testbed.preflight.collect import read_facts
from faultbed.traffic.flows.burnin import Outlier, ends_in_common

__all__ = [
    "REACH",
    "Exclusions",
    "exclude_unfit",
    "find_unfit_hosts",
    "hosts_of_outliers",
    "named_by_user",
    "restrict_to",
    "unreachable_hosts",
]

REACH = "reach"
_NAMED_BY_USER = "named by hand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusions:
    """The hosts to exclude, and the findings that remain without them."""

    hosts: tuple[ExcludedHost, ...]
    remaining: tuple[PreflightFinding, ...]


def named_by_user(inventory: Inventory, names: Iterable[str]) -> tuple[ExcludedHost, ...]:
    """Return the hosts that the user has excluded.

    Raises:
        UsageError: the lab has no such host.
    """
    excluded = tuple(dict.fromkeys(names))
    _refuse_unknown(inventory, excluded, option="--without ")
    return tuple(ExcludedHost(host=name, why=_NAMED_BY_USER) for name in excluded)


def restrict_to(inventory: Inventory, hosts: Collection[str]) -> Inventory:
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


def exclude_unfit(
    inventory: Inventory, state: State, checks: Sequence[Check], already: Iterable[ExcludedHost] = ()
) -> Exclusions:
    """Exclude hosts with findings, and repeat the checks without them until no host has a finding.

    Consequences of a faulty host elsewhere, such as a prefix without a route, disappear when the host is excluded.
    """
    excluded = {exclusion.host: exclusion for exclusion in already}
    while True:
        other_hosts = without_hosts(inventory, excluded)
        other_facts = {name: facts for name, facts in state.items() if name not in excluded}
        findings = run_checks(other_hosts, other_facts, checks)
        findings_by_host: dict[str, list[PreflightFinding]] = {}
        for finding in findings:
            if host := _host_of(other_hosts.topology, finding.where):
                findings_by_host.setdefault(host, []).append(finding)
        if not findings_by_host:
            return Exclusions(hosts=tuple(excluded.values()), remaining=tuple(findings))
        excluded |= {host: ExcludedHost(host=host, why=_why(of_host)) for host, of_host in findings_by_host.items()}


def hosts_of_outliers(outliers: Iterable[Outlier], already: Iterable[ExcludedHost]) -> tuple[ExcludedHost, ...]:
    """Return the hosts to exclude for slow or dead pairs of a burn-in, the host with the most such pairs first.

    If a pair shares no host with another such pair, the faulty end is ambiguous, and both hosts are excluded.
    """
    excluded = {exclusion.host for exclusion in already}
    pairs = ({end.partition(":")[0] for end in (outlier.pair.src, outlier.pair.dst)} for outlier in outliers)
    return tuple(
        ExcludedHost(host=host, why=f"burn-in: {count} pairs with it are slow or dead")
        for hosts, count in ends_in_common(pair for pair in pairs if not pair & excluded)
        for host in hosts
    )


def unreachable_hosts(silent: Mapping[str, str]) -> tuple[ExcludedHost, ...]:
    """Return the hosts that did not answer preflight."""
    return tuple(ExcludedHost(host=host, why=f"{REACH}: {why}") for host, why in silent.items())


def find_unfit_hosts(
    inventory: Inventory, checks: Sequence[Check], already: Sequence[ExcludedHost], progress: Callable[[str], None]
) -> tuple[ExcludedHost, ...]:
    """Run preflight without burn-in, and return the hosts that a run must exclude. They include those in `already`.

    Raises:
        LabError: a finding remains that excluding hosts does not remove, or a switch does not answer.
    """
    progress("preflight: checking which hosts are fit")
    silent: dict[str, str] = {}
    with open_lab(without_hosts(inventory, [exclusion.host for exclusion in already])) as lab:
        state = read_facts(lab, silent=silent)
    result = exclude_unfit(inventory, state, checks, [*already, *unreachable_hosts(silent)])
    if result.remaining:
        first = result.remaining[0]
        more = f", and {len(result.remaining) - 1} more" if len(result.remaining) > 1 else ""
        raise LabError(
            f"{inventory.name}: {first.check} at {first.where}: {first.observed}, expected {first.expected}{more}; "
            "no host can be left out for that; repair it (`faultbed preflight` lists all findings), or run without "
            "--leave-out"
        )
    for exclusion in result.hosts:
        progress(f"leaving out {exclusion.host}: {exclusion.why}")
    return result.hosts


def _host_of(topology: Topology, where: str) -> str | None:
    """Return the host to exclude for a finding, or None.

    That is the host at which the finding is, or the host that is connected to the switch port at which it is.
    """
    place = where.partition(" ")[0]
    if (host := place.partition(":")[0]) in topology.host_by_name:
        return host
    host_by_port = {f"{link.a.node}:{link.a.netdev}": link.b.node for link in topology.links if link.rnic is not None}
    return host_by_port.get(place)


def _why(findings: Sequence[PreflightFinding]) -> str:
    first = findings[0]
    more = f"; {len(findings) - 1} more" if len(findings) > 1 else ""
    return f"{first.check}: {first.where}: {first.observed}{more}"
