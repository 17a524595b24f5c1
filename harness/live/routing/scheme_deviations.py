"""Judge deviations: times at which a switch did not route by the scheme that the run had installed. Pure.

The switches' machine records them (`faultbed.testbed.node.routing.agent`). While a path is dead, a scheme follows BGP,
so next hops that BGP lost because of a fault of the run are expected, and so is the setting that a fault of the kind
`switch.hash-policy` changes. All other deviations make the scheme unproven,
unless they are shorter than an instant (`why_not_as_installed`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from faultbed.harness.verdict import SchemeDeviation
from faultbed.inject.evidence.receipt import Receipt
from faultbed.inject.kinds.catalogue import Trait, has_trait
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.inject.routing.scheme_lease import Deviation
from faultbed.testbed.model.topology import Target, Topology
from faultbed.testbed.node.routing.deviations import BGP, SETTING, UNWATCHED
from faultbed.testbed.node.routing.path_choice import LARGEST_GAP_NS
from faultbed.testbed.routing.valley_free import ValleyFreePaths

__all__ = ["FaultTime", "WorkloadTime", "deviations_of", "fault_times", "why_not_as_installed"]

_INSTANT_S = 0.25
"""A shorter deviation is recorded, but raises no doubt by itself: the kernels' notifications are read this often."""
_CLOCK_NS = 500_000_000
"""Tolerance between the times of a fault and of a switch, which two clocks may have taken."""
_SETTLE_NS = 10_000_000_000
"""How long after the end of a fault BGP may lose more next hops because of it: sessions are established anew."""
_MOST = 5
"""Maximum number of sentences about deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTime:
    """Kind, place and time of a fault in controller ns; `end_ns` None: it was not seen to end."""

    name: str
    kind: str
    target: Target
    begin_ns: int
    end_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadTime:
    """Time of a workload and its faults in controller ns; seconds of the run are counted from `t0_ns`."""

    begin_ns: int
    t0_ns: int
    end_ns: int
    faults: tuple[FaultTime, ...] = ()


def fault_times(planned: Iterable[PlannedFault], receipts: Mapping[str, Receipt]) -> tuple[FaultTime, ...]:
    """Return kind, place and time of each armed fault; receipts are by the fault's name in the experiment."""
    times = []
    for fault in planned:
        receipt = receipts.get(fault.spec.id)
        if receipt is not None and isinstance(receipt.armed.at_ns, int):
            begin_ns = min((at_ns for at_ns, _ in receipt.edges), default=receipt.armed.at_ns)
            end_ns = receipt.cleared.at_ns if isinstance(receipt.cleared.at_ns, int) else None
            times.append(
                FaultTime(name=fault.spec.id, kind=fault.kind, target=fault.target, begin_ns=begin_ns, end_ns=end_ns)
            )
    return tuple(times)


def deviations_of(
    recorded: Iterable[Deviation], topology: Topology, workload: WorkloadTime | None, *, applied_ns: int
) -> tuple[SchemeDeviation, ...]:
    """Return what deviated while the workload ran, with the faults that explain it, in order of time.

    Args:
        recorded: what the switches' machines recorded while the scheme was applied.
        topology: the lab.
        workload: None: unknown, so that everything counts and seconds are counted from `applied_ns`.
        applied_ns: when the scheme was applied (controller time).
    """
    span = workload or WorkloadTime(begin_ns=applied_ns, t0_ns=applied_ns, end_ns=2**63)
    paths = ValleyFreePaths(topology)
    merged: list[SchemeDeviation] = []
    lost: dict[tuple[str, str, str], list[Deviation]] = {}
    for deviation in recorded:
        begin_ns, end_ns = deviation.begin_ns, deviation.end_ns
        if begin_ns > span.end_ns or (end_ns is not None and end_ns < span.begin_ns):
            continue
        if deviation.cause == BGP:
            fault = _fault_of(deviation, span.faults, topology, paths)
            lost.setdefault((deviation.switch, deviation.port, fault), []).append(deviation)
        else:
            fault = _fault_that_sets(deviation, span.faults) if deviation.cause == SETTING else ""
            merged.append(_in_seconds(deviation, deviation.what, begin_ns, end_ns, span, fault))
    for (_, port, fault), losses in lost.items():
        for begin_ns, end_ns, prefixes in _overlapping(losses):
            what = f"BGP had no next hop by {port} to {len(prefixes)} prefix{'es' if len(prefixes) > 1 else ''}"
            merged.append(_in_seconds(losses[0], what, begin_ns, end_ns, span, fault))
    return tuple(sorted(merged, key=lambda deviation: (deviation.from_s, deviation.switch)))


def why_not_as_installed(deviations: Sequence[SchemeDeviation], *, since: str) -> Iterator[str]:
    """Yield one sentence for each deviation that no fault explains and that was longer than an instant.

    Instants of one switch that add up to more than one count together. `since` names the zero of the seconds, as in `of
    the run`.
    """
    reasons = []
    instants: dict[str, list[float]] = {}
    for deviation in deviations:
        if deviation.fault:
            continue
        from_s, to_s = deviation.from_s, deviation.to_s
        if to_s is not None and to_s - from_s < _INSTANT_S and deviation.cause != UNWATCHED:
            instants.setdefault(deviation.switch, []).append(to_s - from_s)
            continue
        end = f"s to {to_s:.1f} s {since}" if to_s is not None else f"s {since} until the scheme was removed"
        reasons.append(f"{deviation.switch}, from {from_s:.1f} {end}: {_sentence(deviation)}")
    reasons += [
        f"{switch}: {len(lengths)} deviations of less than {_INSTANT_S:g} s each took {sum(lengths):.1f} s in all"
        for switch, lengths in instants.items()
        if sum(lengths) >= _INSTANT_S
    ]
    yield from reasons[:_MOST]
    if len(reasons) > _MOST:
        yield f"{len(reasons) - _MOST} more deviations from the scheme (`routing.deviations` in verdict.json)"


def _sentence(deviation: SchemeDeviation) -> str:
    if deviation.cause == UNWATCHED:
        return f"the scheme was not watched: {deviation.what}"
    is_explicable = deviation.cause in (BGP, SETTING)
    return f"{deviation.what}, and no fault at that place explains it" if is_explicable else deviation.what


def _in_seconds(
    deviation: Deviation, what: str, begin_ns: int, end_ns: int | None, span: WorkloadTime, fault: str = ""
) -> SchemeDeviation:
    return SchemeDeviation(
        switch=deviation.switch,
        cause=deviation.cause,
        what=what,
        from_s=round((begin_ns - span.t0_ns) / 1e9, 3),
        to_s=None if end_ns is None else round((end_ns - span.t0_ns) / 1e9, 3),
        fault=fault,
    )


def _overlapping(losses: Sequence[Deviation]) -> Iterator[tuple[int, int | None, set[str]]]:
    """Yield begin, end and prefixes of the losses by one port that overlap in time."""
    begin_ns, end_ns, prefixes = 0, -1.0, set[str]()
    for loss in sorted(losses, key=lambda loss: loss.begin_ns):
        if prefixes and loss.begin_ns > end_ns:
            yield begin_ns, int(end_ns), prefixes
            prefixes, end_ns = set(), -1.0
        begin_ns = begin_ns if prefixes else loss.begin_ns
        end_ns = max(end_ns, float("inf") if loss.end_ns is None else loss.end_ns)
        prefixes = {*prefixes, loss.prefix}
    if prefixes:
        yield begin_ns, None if end_ns == float("inf") else int(end_ns), prefixes


def _fault_of(loss: Deviation, faults: Iterable[FaultTime], topology: Topology, paths: ValleyFreePaths) -> str:
    """Return the name of a fault on the lost path, during or shortly after which the loss began; empty: none."""
    links, nodes = _path_of(loss, topology, paths)
    for fault in faults:
        latest_ns = None if fault.end_ns is None else fault.end_ns + _SETTLE_NS
        is_then = fault.begin_ns - _CLOCK_NS <= loss.begin_ns and (latest_ns is None or loss.begin_ns <= latest_ns)
        is_there = fault.target.node in nodes if fault.target.link is None else fault.target.link.name in links
        if is_then and is_there and _may_end_routes(fault):
            return fault.name
    return ""


def _fault_that_sets(deviation: Deviation, faults: Iterable[FaultTime]) -> str:
    """Return the name of a fault that changes settings of this switch, and was on all the time; empty: none.

    A deviation is recorded from the last reading before it to the first one after it.
    """
    allowed_ns = _CLOCK_NS + LARGEST_GAP_NS
    for fault in faults:
        is_then = fault.begin_ns - allowed_ns <= deviation.begin_ns and (
            fault.end_ns is None or (deviation.end_ns is not None and deviation.end_ns <= fault.end_ns + allowed_ns)
        )
        if is_then and fault.kind == "switch.hash-policy" and fault.target.node == deviation.switch:
            return fault.name
    return ""


def _may_end_routes(fault: FaultTime) -> bool:
    """Return whether a fault of this kind, at this place, can make BGP lose a next hop.

    Hosts do not take part in BGP: what happens at a host or on its link ends a route only if a carrier is lost.
    """
    if has_trait(fault.kind, Trait.CARRIER):
        return True
    link = fault.target.link
    is_in_fabric = fault.target.kind == "switch" if link is None else link.is_uplink
    return is_in_fabric and has_trait(fault.kind, Trait.ROUTES) and not has_trait(fault.kind, Trait.KEEPS_UPLINKS)


def _path_of(loss: Deviation, topology: Topology, paths: ValleyFreePaths) -> tuple[set[str], set[str]]:
    """Return the links and the nodes of all paths from the switch by the lost port to the hosts of the prefix."""
    prefix = ipaddress.ip_network(loss.prefix)
    edges = [
        topology.rnic_link(host.name, rnic.name)
        for host in topology.hosts
        for rnic in host.rnics
        if ipaddress.ip_interface(rnic.address).network == prefix
    ]
    pending = [link for link in topology.links_of(loss.switch) if link.end(loss.switch).netdev == loss.port]
    nodes = {loss.switch, *(end.node for link in edges for end in (link.a, link.b))}
    links = {link.name for link in edges}
    while pending:
        link = pending.pop()
        if link.name not in links:
            links.add(link.name)
            for node in {link.a.node, link.b.node} - nodes:
                nodes.add(node)
                pending += [hop for edge in edges for hop in paths.next_hops(node, edge.a.node)]
    return links, nodes
