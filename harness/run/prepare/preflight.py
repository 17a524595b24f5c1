"""Preflight: the checks of `testbed/preflight/`, stale reservations and a burn-in, in one result. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from faultbed.harness.run.prepare.exclusions import REACH, exclude_unfit, hosts_of_outliers, unreachable_hosts
from faultbed.harness.verdict import ExcludedHost
from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.inventory.subset import without_hosts
from faultbed.testbed.lab import Lab
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.preflight.checks import CHECKS, PreflightFinding, State, Unchecked, run_checks, unchecked_parts
from faultbed.testbed.preflight.collect import read_facts
from faultbed.testbed.preflight.gpu_health_check import CHECK as GPU_HEALTH
from faultbed.testbed.preflight.rack_checks import RACK_CHECKS
from faultbed.testbed.tenancy import reservation
from faultbed.testbed.tenancy.lab_lease import is_dead, store_of
from faultbed.traffic.flows import burnin
from faultbed.traffic.flows.burnin import Burnin, Outlier

__all__ = ["ALL_CHECKS", "BURNIN", "RESERVATIONS", "Preflight", "broken", "names", "preflight", "suspects"]

ALL_CHECKS = (*CHECKS, GPU_HEALTH, *RACK_CHECKS)
RESERVATIONS, BURNIN = "reservations", "burn-in"

_FATAL = frozenset({"link", "address", "rdma", "gid", "route"})
_DO_REACH = "check its power, its BMC and its management cable; its RNICs and GPUs were not checked"
_NO_PAIR = "no two of the hosts have an RNIC that can carry traffic, so there is no pair to measure"
_UNTRIED = "not tried, because one of its ends, or too many other pairs, were dead"
_DO_BURNIN = "the common end of the outliers is the suspect: check its cable, its port and its qdisc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The result of preflight. `checked` are the names of the checks that were done.

    `unchecked` lists what could not be checked: parts of a check, or a whole check, which is then not in `checked`.
    `leave_out` are the hosts to exclude. `remaining` are the findings that excluding these hosts does not remove.
    """

    lab: str
    checked: tuple[str, ...]
    findings: tuple[PreflightFinding, ...]
    burnin: Burnin | None
    unchecked: tuple[Unchecked, ...] = ()
    leave_out: tuple[ExcludedHost, ...] = ()
    remaining: tuple[PreflightFinding, ...] = ()

    @property
    def bad_hosts(self) -> tuple[str, ...]:
        """Nodes with a finding."""
        places = {finding.where for finding in self.findings} - {self.lab}
        return tuple(sorted({place.replace(" ", ":").split(":")[0] for place in places}))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON. Its keys are those of the file format of `preflight --out`."""
        return {
            "lab": self.lab,
            "checked": self.checked,
            "wrong": [_file_entry(finding) for finding in self.findings],
            "burnin": None if self.burnin is None else asdict(self.burnin),
            "not_looked": [asdict(part) for part in self.unchecked],
            "leave_out": list(msgspec.to_builtins(self.leave_out)),
            "rest": [_file_entry(finding) for finding in self.remaining],
            "bad_nodes": self.bad_hosts,
        }


def _file_entry(finding: PreflightFinding) -> dict[str, str]:
    return {
        "check": finding.check,
        "where": finding.where,
        "found": finding.observed,
        "wanted": finding.expected,
        "do": finding.do,
    }


def names(inventory: Inventory) -> tuple[str, ...]:
    """Return the names of all checks of this kind of lab, in their order."""
    return (*(check.name for check in ALL_CHECKS if inventory.kind in check.labs), RESERVATIONS, BURNIN)


def preflight(
    lab: Lab, progress: Callable[[str], None], *, with_burnin: bool = True, leave_out: bool = False
) -> Preflight:
    """Check a whole lab. With `leave_out`, a host that does not answer is excluded.

    Raises:
        Unreachable: a machine does not answer, so its state is unknown.
    """
    inventory = lab.inventory_model
    progress("preflight: checking every machine")
    silent: dict[str, str] = {}
    state = read_facts(lab, silent=silent if leave_out else None)
    without_burnin = _check_facts(inventory, state, silent)
    if not with_burnin:
        why = "it was left out (--no-burn-in)"
        return _result(inventory, without_burnin, None, unchecked=[_unchecked_burnin(inventory.name, why)])
    unfit_rnics = broken(lab.topology, without_burnin.findings)
    unfit_rnics |= {f"{host}:{rnic.name}" for host in silent for rnic in lab.topology.host_by_name[host].rnics}
    why = "another check has found this RNIC unfit to carry anything"
    unchecked = [_unchecked_burnin(rnic, why) for rnic in sorted(unfit_rnics)]
    if all(unfit_rnics & {src, dst} for src, dst, _ in burnin.pairs_of(lab.topology)):
        unchecked.append(_unchecked_burnin(inventory.name, _NO_PAIR))
    try:
        measured = _burn_in(lab, unfit_rnics, progress)
    except LabError as error:
        failed = _burnin_finding(
            inventory.name,
            observed=str(error),
            expected="every pair connects",
            do="repair the findings of the other checks first, then run the burn-in again",
        )
        return _result(inventory, without_burnin, None, unchecked=unchecked, findings=[failed], remaining=[failed])
    unfit = hosts_of_outliers(measured.outliers, without_burnin.unfit)
    excluded = {exclusion.host for exclusion in (*without_burnin.unfit, *unfit)}
    return _result(
        inventory,
        without_burnin,
        measured,
        unchecked=[*unchecked, *(_unchecked_burnin(f"{src} > {dst}", _UNTRIED) for src, dst in measured.unmeasured)],
        findings=[_finding_of(outlier) for outlier in measured.outliers],
        unfit=unfit,
        remaining=_unmeasured(inventory, measured, excluded),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FactChecks:
    """What the checks other than the burn-in have shown, named as in `Preflight`; `unfit` are the hosts to exclude."""

    findings: tuple[PreflightFinding, ...]
    unchecked: tuple[Unchecked, ...]
    unfit: tuple[ExcludedHost, ...]
    remaining: tuple[PreflightFinding, ...]


def _check_facts(inventory: Inventory, state: State, silent: Mapping[str, str]) -> _FactChecks:
    """Run all checks except the burn-in. `silent` are hosts that do not answer, with the reason."""
    answering = without_hosts(inventory, silent)
    stale = _stale_reservations(inventory)
    exclusions = exclude_unfit(inventory, state, ALL_CHECKS, unreachable_hosts(silent))
    return _FactChecks(
        findings=(*map(_unreachable, silent.items()), *run_checks(answering, state, ALL_CHECKS), *stale),
        unchecked=tuple(unchecked_parts(answering, state, ALL_CHECKS)),
        unfit=exclusions.hosts,
        remaining=(*exclusions.remaining, *stale),
    )


def _result(
    inventory: Inventory,
    facts: _FactChecks,
    measured: Burnin | None,
    *,
    unchecked: Iterable[Unchecked] = (),
    findings: Iterable[PreflightFinding] = (),
    unfit: Iterable[ExcludedHost] = (),
    remaining: Iterable[PreflightFinding] = (),
) -> Preflight:
    """Return the result of the checks of facts, and of the burn-in: the keyword arguments are what it adds to them."""
    all_unchecked = (*facts.unchecked, *unchecked)
    whole = {part.check for part in all_unchecked if part.where == inventory.name}
    return Preflight(
        lab=inventory.name,
        checked=tuple(name for name in names(inventory) if name not in whole),
        findings=(*facts.findings, *findings),
        burnin=measured,
        unchecked=all_unchecked,
        leave_out=(*facts.unfit, *unfit),
        remaining=(*facts.remaining, *remaining),
    )


def _unchecked_burnin(where: str, why: str) -> Unchecked:
    return Unchecked(check=BURNIN, where=where, why=why)


def _burnin_finding(where: str, *, observed: str, expected: str, do: str) -> PreflightFinding:
    return PreflightFinding(check=BURNIN, where=where, observed=observed, expected=expected, do=do)


def _burn_in(lab: Lab, unfit_rnics: set[str], progress: Callable[[str], None]) -> Burnin:
    """Measure all pairs of RNICs except `unfit_rnics`.

    Raises:
        LabError: a pair that should connect does not.
    """
    traits = traits_of(lab.inventory_model.kind)
    without = f", without {', '.join(sorted(unfit_rnics))}" if unfit_rnics else ""
    progress(f"burn-in: latency and bandwidth of all pairs, one after the other{without}")
    return burnin.measure(
        lab,
        worse_than=traits.outlier_ratio,
        shape=burnin.SHAPES[lab.inventory_model.kind],
        leave_out=unfit_rnics,
        on_event=lambda _event: lab.heartbeat(),
    )


def _unmeasured(inventory: Inventory, measured: Burnin, excluded: set[str]) -> list[PreflightFinding]:
    """Return a finding if pairs of the remaining hosts were not measured: these hosts may be unfit, too."""
    left = [pair for pair in measured.unmeasured if not excluded & {end.partition(":")[0] for end in pair}]
    if not left:
        return []
    return [
        _burnin_finding(
            inventory.name,
            observed=f"{len(left)} pairs were not measured: too many others were dead",
            expected="every pair measured",
            do="repair the dead pairs or exclude their hosts, then run the burn-in again",
        )
    ]


def _unreachable(host_and_reason: tuple[str, str]) -> PreflightFinding:
    host, why = host_and_reason
    return PreflightFinding(
        check=REACH, where=host, observed=f"does not answer: {why}", expected="answers", do=_DO_REACH
    )


def broken(topology: Topology, findings: Iterable[PreflightFinding]) -> set[str]:
    """Return the RNICs that a check found unfit to carry traffic, at either end of their link."""
    at = {finding.where.partition(" ")[0] for finding in findings if finding.check in _FATAL}
    unfit_rnics = set()
    for link in topology.links:
        if link.rnic is not None:
            name = f"{link.b.node}:{link.rnic}"
            if at & {name, f"{link.a.node}:{link.a.netdev}", f"{link.b.node}:{link.b.netdev}"}:
                unfit_rnics.add(name)
    return unfit_rnics


def suspects(outliers: tuple[Outlier, ...]) -> list[str]:
    """Return the RNICs of slow or dead pairs, the most frequent first."""
    ends = [end for outlier in outliers for end in (outlier.pair.src, outlier.pair.dst)]
    return sorted(set(ends), key=lambda end: (-ends.count(end), end))


def _stale_reservations(inventory: Inventory) -> list[PreflightFinding]:
    """Return a finding for each reservation that has ended but is still in the book."""
    now = store_of(inventory).read()
    alive = reservation.live(now.book, now_s=now.now_s, is_dead=is_dead)
    return [
        PreflightFinding(
            check=RESERVATIONS,
            where=inventory.name,
            observed=f"a stale reservation of {entry.who} ({entry.why})",
            expected="none",
            do="the next reservation removes it; check whether the session that made it ended properly",
        )
        for entry in now.book
        if entry not in alive
    ]


def _finding_of(outlier: Outlier) -> PreflightFinding:
    pair = outlier.pair
    if outlier.value is None or outlier.ratio is None:
        observed, expected = "nothing got through", f"{outlier.what} {outlier.usual:.0f}"
    else:
        observed = f"{outlier.what} {outlier.value:.0f}, {outlier.ratio:.2f} times worse"
        expected = f"near {outlier.usual:.0f}, as the best quarter of all pairs of its kind ({pair.kind})"
    return _burnin_finding(f"{pair.src} > {pair.dst}", observed=observed, expected=expected, do=_DO_BURNIN)
