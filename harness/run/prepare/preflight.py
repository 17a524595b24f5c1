"""Preflight: the checks of `testbed.preflight`, stale reservations and a burn-in, in one result. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from harness.run.prepare.exclusions import REACH, exclude_unfit, hosts_of_outliers, unreachable_hosts
from harness.verdict import ExcludedHost
from testbed.errors import LabError
from testbed.inventory.lab_inventory import Inventory
from testbed.inventory.subset import without_hosts
from testbed.lab import Lab
from testbed.model.lab_kind import traits_of
from testbed.model.topology import Topology
from testbed.preflight.checks import CHECKS, PreflightFinding, State, Unchecked, run_checks, unchecked_parts
from testbed.preflight.collect import read_facts
from testbed.preflight.gpu_health_check import CHECK as GPU_HEALTH
from testbed.preflight.rack_checks import RACK_CHECKS
from testbed.tenancy import reservation
from testbed.tenancy.lab_lease import is_dead, store_of
from traffic.flows import burnin
from traffic.flows.burnin import Burnin, Outlier

__all__ = ["ALL_CHECKS", "BURNIN", "RESERVATIONS", "Preflight", "broken", "names", "preflight", "suspects"]

ALL_CHECKS = (*CHECKS, GPU_HEALTH, *RACK_CHECKS)
RESERVATIONS, BURNIN = "reservations", "burn-in"

_FATAL = frozenset({"link", "address", "rdma", "gid", "route"})
_DO_REACH = "check its power, its BMC and its management cable; its RNICs and GPUs were not checked"
_UNTRIED = "not tried, because one of its ends, or too many other pairs, were dead"
_DO_BURNIN = "the common end of the outliers is the suspect: check its cable, its port and its qdisc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The result of preflight. `checked` are the names of the checks that were done.

    `not_looked` lists what could not be checked: parts of a check, or a whole check, which is then not in `checked`.
    `leave_out` are the hosts to exclude. `rest` are the findings that remain without these hosts.
    """

    lab: str
    checked: tuple[str, ...]
    wrong: tuple[PreflightFinding, ...]
    burnin: Burnin | None
    not_looked: tuple[Unchecked, ...] = ()
    leave_out: tuple[ExcludedHost, ...] = ()
    rest: tuple[PreflightFinding, ...] = ()

    @property
    def bad_hosts(self) -> tuple[str, ...]:
        """Nodes with a finding."""
        places = {finding.where for finding in self.wrong} - {self.lab}
        return tuple(sorted({place.replace(" ", ":").split(":")[0] for place in places}))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        hosts = msgspec.to_builtins(self.leave_out)
        return {**asdict(self), "leave_out": list(hosts), "bad_nodes": self.bad_hosts}


def names(inventory: Inventory) -> tuple[str, ...]:
    """Return the names of all checks of this kind of lab, in their order."""
    return (*(check.name for check in ALL_CHECKS if inventory.kind in check.labs), RESERVATIONS, BURNIN)


def _unchecked(
    inventory: Inventory, state: State, broken_rnics: Iterable[str], *, with_burnin: bool
) -> list[Unchecked]:
    """Return what is not checked. The burn-in leaves out `broken_rnics`, which cannot carry traffic."""
    unchecked = unchecked_parts(inventory, state, ALL_CHECKS)
    if not with_burnin:
        return [*unchecked, Unchecked(check=BURNIN, where=inventory.name, why="it was left out (--no-burn-in)")]
    why = "another check has found this RNIC unfit to carry anything"
    return [*unchecked, *(Unchecked(check=BURNIN, where=rnic, why=why) for rnic in sorted(broken_rnics))]


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
    answering = without_hosts(inventory, silent)
    stale = _stale(inventory)
    wrong = [*map(_unreachable, silent.items()), *run_checks(answering, state, ALL_CHECKS), *stale]
    exclusions = exclude_unfit(inventory, state, ALL_CHECKS, unreachable_hosts(silent))
    left_out, rest = list(exclusions.hosts), [*exclusions.remaining, *stale]
    broken_rnics = broken(lab.topology, wrong)
    broken_rnics |= {f"{host}:{rnic.name}" for host in silent for rnic in lab.topology.host_by_name[host].rnics}
    unchecked = _unchecked(answering, state, broken_rnics, with_burnin=with_burnin)
    done = None
    if with_burnin:
        done, burnin_findings = _burn_in(lab, broken_rnics, progress)
        wrong += burnin_findings
        if done is None:
            rest += burnin_findings
        else:
            left_out += hosts_of_outliers(done.outliers, left_out)
            unchecked += [Unchecked(check=BURNIN, where=f"{src} > {dst}", why=_UNTRIED) for src, dst in done.unmeasured]
            rest += _untried(inventory, done, {exclusion.host for exclusion in left_out})
    whole = {item.check for item in unchecked if item.where == inventory.name}
    return Preflight(
        lab=inventory.name,
        checked=tuple(name for name in names(inventory) if name not in whole),
        wrong=tuple(wrong),
        burnin=done,
        not_looked=tuple(unchecked),
        leave_out=tuple(left_out),
        rest=tuple(rest),
    )


def _burn_in(
    lab: Lab, broken_rnics: set[str], progress: Callable[[str], None]
) -> tuple[Burnin | None, list[PreflightFinding]]:
    """Run the burn-in of all RNICs except `broken_rnics`. Return its result (None if it failed) and its findings."""
    inventory = lab.inventory_model
    without = f", without {', '.join(sorted(broken_rnics))}" if broken_rnics else ""
    progress(f"burn-in: latency and bandwidth of all pairs, one after the other{without}")
    try:
        done = burnin.measure(
            lab,
            worse_than=traits_of(inventory.kind).outlier_ratio,
            shape=burnin.SHAPES[inventory.kind],
            leave_out=broken_rnics,
            on_event=lambda _event: lab.heartbeat(),
        )
    except LabError as error:
        do = "repair the findings of the other checks first, then run the burn-in again"
        wanted = "every pair connects"
        return None, [PreflightFinding(check=BURNIN, where=inventory.name, found=str(error), wanted=wanted, do=do)]
    return done, [_finding_of(outlier) for outlier in done.outliers]


def _untried(inventory: Inventory, done: Burnin, excluded: set[str]) -> list[PreflightFinding]:
    """Return a finding if pairs of the remaining hosts were not measured: these hosts may be unfit, too."""
    left = [pair for pair in done.unmeasured if not excluded & {end.partition(":")[0] for end in pair}]
    if not left:
        return []
    observed = f"{len(left)} pairs were not measured: too many others were dead"
    do = "repair the dead pairs or exclude their hosts, then run the burn-in again"
    return [PreflightFinding(check=BURNIN, where=inventory.name, found=observed, wanted="every pair measured", do=do)]


def _unreachable(host_and_reason: tuple[str, str]) -> PreflightFinding:
    host, why = host_and_reason
    return PreflightFinding(check=REACH, where=host, found=f"does not answer: {why}", wanted="answers", do=_DO_REACH)


def broken(topology: Topology, wrong: Iterable[PreflightFinding]) -> set[str]:
    """Return the RNICs that a check found unfit to carry traffic, at either end of their link."""
    at = {item.where.partition(" ")[0] for item in wrong if item.check in _FATAL}
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


def _stale(inventory: Inventory) -> list[PreflightFinding]:
    """Return a finding for each reservation that has ended but is still in the book."""
    now = store_of(inventory).read()
    alive = reservation.live(now.book, now_s=now.now_s, is_dead=is_dead)
    return [
        PreflightFinding(
            check=RESERVATIONS,
            where=inventory.name,
            found=f"a stale reservation of {entry.who} ({entry.why})",
            wanted="none",
            do="the next reservation removes it; check whether the session that made it ended properly",
        )
        for entry in now.book
        if entry not in alive
    ]


def _finding_of(outlier: Outlier) -> PreflightFinding:
    pair = outlier.pair
    if outlier.value is None or outlier.ratio is None:
        observed, wanted = "nothing got through", f"{outlier.what} {outlier.usual:.0f}"
    else:
        observed = f"{outlier.what} {outlier.value:.0f}, {outlier.ratio:.2f} times worse"
        wanted = f"near the {outlier.usual:.0f} that the best quarter of its kind has ({pair.kind})"
    return PreflightFinding(
        check=BURNIN, where=f"{pair.src} > {pair.dst}", found=observed, wanted=wanted, do=_DO_BURNIN
    )
