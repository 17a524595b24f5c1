"""Causes in the network: carriers, routes, and losses and marks by the transport's counters. Pure."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Sequence
from dataclasses import replace

from faultbed.harness.attribution.gaps import match_gaps, match_lost_in_switch
from faultbed.harness.attribution.places import place_of_link, place_of_switch
from faultbed.harness.attribution.signatures import Signs, crosses, match, match_acks, out_of_retries
from faultbed.harness.findings import Attribution, Place
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.telemetry_evidence import Deltas
from faultbed.testbed.model.topology import Link, Topology

__all__ = ["carriers", "control_plane", "packets", "withdrawn"]

_AWAY = frozenset({"hung-rank", "host-reboot"})
"""Causes that explain why a host does not answer its peers."""
_LEAST_LIKENESS = 0.5
"""Minimum similarity of a link's queue pairs to the dead ones."""
_SOMEWHERE = 0.4
"""Confidence in a loss that the counters show but cannot locate."""
_CANDIDATES = 6
"""Number of queue pairs that are listed as candidates for one lost packet."""
_FEW = 3
"""A link that went down may cause fewer gaps than this at receivers."""


def carriers(topology: Topology, deltas: Deltas) -> list[Attribution]:
    """Return links with a lost carrier at an end, or the node if all its links lost theirs."""
    lost_carriers: dict[str, tuple[Link, str]] = {}
    for link in topology.links:
        changes = [
            f"{end.node}: carrier of {end.netdev} changed {count} times"
            for end in (link.a, link.b)
            if (count := deltas.get(end.node, {}).get(f"{end.netdev}.carrier_changes", 0))
        ]
        if changes:
            lost_carriers[link.name] = link, "; ".join(changes)
    for node in (*topology.switch_by_name, *topology.host_by_name):
        links = topology.links_of(node)
        if len(links) > 1 and len(lost_carriers) > 1 and {link.name for link in links} == lost_carriers.keys():
            place: Place = "rank" if node in topology.host_by_name else place_of_switch(topology, node)
            evidence = tuple(words for _, words in lost_carriers.values())
            return [Attribution(cause="link-down", place=place, name=node, confidence=0.95, evidence=evidence)]
    return [
        Attribution(
            cause="link-down", place=place_of_link(topology, link), name=name, confidence=0.97, evidence=(words,)
        )
        for name, (link, words) in lost_carriers.items()
    ]


def control_plane(topology: Topology, deltas: Deltas) -> list[Attribution]:
    """Return the place where TCP sessions of switches closed.

    That is the switch at an end of all of them, else the link if all are on one, else the switch with most of them.
    """

    def torn(node: str) -> int:
        counters = deltas.get(node, {})
        return sum(counters.get(f"tcp.{name}", 0) for name in ("EstabResets", "ActiveOpens", "PassiveOpens"))

    links = [link for link in topology.uplinks if torn(link.a.node) and torn(link.b.node)]
    if not links:
        return []
    common = set.intersection(*({link.a.node, link.b.node} for link in links))
    evidence = tuple(
        f"{name}: {torn(name)} sessions opened or reset, no carrier lost"
        for name in topology.switch_by_name
        if torn(name)
    )
    if len(common) == 1:
        (name,) = common
        place = place_of_switch(topology, name)
        return [Attribution(cause="control-plane", place=place, name=name, confidence=0.85, evidence=evidence)]
    if len(links) == 1:
        place = place_of_link(topology, links[0])
        return [Attribution(cause="control-plane", place=place, name=links[0].name, confidence=0.7, evidence=evidence)]
    worst = max(topology.switch_by_name, key=torn)
    place = place_of_switch(topology, worst)
    return [Attribution(cause="control-plane", place=place, name=worst, confidence=0.5, evidence=evidence)]


def withdrawn(run: RunEvidence) -> list[Attribution]:
    """Return the switch to whose prefixes other switches lost routes, although its links and sessions stayed up."""
    owners = {str(ipaddress.ip_network(switch.loopback)): switch.name for switch in run.lab.topology.switches}
    for host in run.lab.topology.hosts:
        for rnic in host.rnics:
            network = ipaddress.ip_interface(rnic.address).network
            owners[str(network)] = run.lab.topology.rnic_link(host.name, rnic.name).a.node
    lost: dict[str, set[str]] = {}
    lost_prefixes: set[str] = set()
    for change in run.telemetry.changes:
        prefix = next((word for word in change.subject.split() if word in owners), None)
        if change.subject.startswith("route ") and change.text is None and prefix is not None:
            lost.setdefault(owners[prefix], set()).add(change.node)
            lost_prefixes.add(prefix)
    if len(lost) != 1:
        return []
    ((name, nodes),) = lost.items()
    nodes.discard(name)
    if len(nodes) < 2:  # noqa: PLR2004 - a single switch could have lost them by itself
        return []
    names = ", ".join(sorted(nodes))
    words = f"{names} lost {len(lost_prefixes)} routes, all of them to {name}, whose links and sessions stayed up"
    place = place_of_switch(run.lab.topology, name)
    return [Attribution(cause="control-plane", place=place, name=name, confidence=0.8, evidence=(words,))]


def packets(run: RunEvidence, deltas: Deltas, known: Sequence[Attribution]) -> list[Attribution]:
    """Return findings from the transport's counters that the known findings do not explain."""
    signs = Signs.of(run, deltas)
    if too_big := _too_big(run, deltas, signs):
        return too_big
    some_died, signs = bool(signs.dead), replace(signs, dead=_unexplained(run, signs.dead, known))
    findings: list[Attribution] = []
    marked = match(run, signs.marks(), among=run.lab.topology.links)
    if signs.marked and marked is not None and marked.link is not None:
        findings.append(
            Attribution(
                cause="congestion",
                place=place_of_link(run.lab.topology, marked.link),
                name=marked.link.name,
                confidence=0.6 * marked.likeness,
                evidence=marked.evidence,
            )
        )
    best = match(run, signs.losses(), among=run.lab.topology.links, hosts=True)
    best = match_gaps(run, signs, among=run.lab.topology.links, other=best)
    acks = match_acks(run, signs, among=run.lab.topology.links)
    if acks is not None and (best is None or acks.likeness > best.likeness):
        best = acks
    if best is None and not (known or findings):
        return _lost_within(run, signs) or _one_lost(run, signs)
    if best is None or _explained(best.link, signs, known, some_died=some_died):
        return findings
    if best.link is None:
        findings.append(
            Attribution(
                cause="silent-host",
                place="rank",
                name=best.host,
                confidence=0.8 * best.likeness,
                evidence=best.evidence,
            )
        )
    else:
        place = place_of_link(run.lab.topology, best.link)
        findings.append(
            Attribution(
                cause="loss", place=place, name=best.link.name, confidence=0.9 * best.likeness, evidence=best.evidence
            )
        )
    return findings


def _lost_within(run: RunEvidence, signs: Signs) -> list[Attribution]:
    """Return a switch that received more packets than it sent, if the RNICs show too little to name a link.

    Only switches with exact counts of their own packets are used: link-local BGP traffic alone is a dozen packets more
    at one switch and a dozen less at its neighbour.
    """
    if not signs.kept:
        return []
    name = max(signs.kept, key=lambda switch: signs.lost_in[switch])
    words = f"{name}: {signs.lost_in[name]:,} packets came in and did not go out"
    if (kept := match_lost_in_switch(run, signs, name)) is not None:
        link, likely = kept
        place, evidence = (
            place_of_link(run.lab.topology, link),
            f"by gaps, NAKs and dead queue pairs {likely:.0%} likely here",
        )
        return [
            Attribution(cause="loss", place=place, name=link.name, confidence=0.8 * likely, evidence=(words, evidence))
        ]
    place = place_of_switch(run.lab.topology, name)
    words += "; the RNICs do not show which ones"
    return [Attribution(cause="loss", place=place, name=name, confidence=_SOMEWHERE, evidence=(words,))]


def _one_lost(run: RunEvidence, signs: Signs) -> list[Attribution]:
    """Return a finding for one lost packet: one gap at a receiver, one NAK at the sender of a queue pair to it.

    One packet cannot separate links, so all possible paths are listed as evidence. The finding names the link to the
    receiver, which all of them share.
    """
    gaps, naks = (
        [(end, count) for (sign, end), count in signs.counts.items() if sign == kind and count]
        for kind in ("gap", "nak")
    )
    if [count for _, count in gaps] != [1] or [count for _, count in naks] != [1]:
        return []
    (dst, _), (src, _) = *gaps, *naks
    ends = (src, dst)
    candidates = [one for one in run.workload.connections if (one.src, one.dst) == ends]
    if not candidates:
        return []
    host, _, rnic = dst.partition(":")
    link = run.lab.topology.rnic_link(host, rnic)
    links = {hop for connection in candidates for hop in itertools.pairwise(connection.path)}
    evidence = (
        f"one packet was lost: {dst} saw one gap in the PSNs of what it received, {src} got one NAK for it",
        *(
            f"it may belong to QP {connection.rqpn}, whose data takes "
            f"{' -> '.join(connection.path) or 'an unknown path'}"
            for connection in candidates[:_CANDIDATES]
        ),
        *([f"and {len(candidates) - _CANDIDATES} more queue pairs"] if len(candidates) > _CANDIDATES else ()),
    )
    confidence = min(_SOMEWHERE, 1 / max(1, len(links)))
    place = place_of_link(run.lab.topology, link)
    return [Attribution(cause="loss", place=place, name=link.name, confidence=confidence, evidence=evidence)]


def _too_big(run: RunEvidence, deltas: Deltas, signs: Signs) -> list[Attribution]:
    """Return switches with packets too large to forward, and the outgoing link whose MTU is the likely reason."""
    findings = []
    for switch in run.lab.topology.switches:
        count = deltas.get(switch.name, {}).get("ip.FragFails", 0)
        if not count:
            continue
        words = f"{switch.name}: {count} packets too large for the outgoing link"
        links = run.lab.topology.links_of(switch.name)
        link = _way_out(run, switch.name, links, signs.dead)
        evidence: tuple[str, ...] = (words, out_of_retries(signs.dead)) if link else (words,)
        if link is None and (best := match(run, signs.losses(), among=links)) is not None:
            link, evidence = best.link, (words, *best.evidence)
        place, name = (
            (place_of_switch(run.lab.topology, switch.name), switch.name)
            if link is None
            else (place_of_link(run.lab.topology, link), link.name)
        )
        confidence = 0.5 if link is None else 0.9
        findings.append(Attribution(cause="mtu", place=place, name=name, confidence=confidence, evidence=evidence))
    return findings


def _way_out(run: RunEvidence, switch: str, links: Sequence[Link], dead: frozenset[tuple[str, str]]) -> Link | None:
    """Return the link of a switch that best matches the paths of the dead queue pairs, or None."""

    def likeness(link: Link) -> float:
        far = link.other(switch).node
        takes = {
            (connection.src, connection.dst)
            for connection in run.workload.connections
            if crosses(connection, switch, far, rnic=link.rnic)
        }
        return len(takes & dead) / len(takes | dead) if takes | dead else 0.0

    best = max(links, key=likeness, default=None)
    return best if best is not None and likeness(best) >= _LEAST_LIKENESS else None


def _unexplained(
    run: RunEvidence, dead: frozenset[tuple[str, str]], known: Sequence[Attribution]
) -> frozenset[tuple[str, str]]:
    """Return the dead queue pairs that no known finding explains.

    Explanations are a link on the path that was down, a host at an end that hung, and missing routes.
    """
    if any(finding.cause == "control-plane" for finding in known):
        return frozenset()
    down = {finding.name for finding in known if finding.cause == "link-down"}
    hung = {finding.name for finding in known if finding.cause in _AWAY}
    cut_off = {
        (connection.src, connection.dst)
        for connection in run.workload.connections
        for link in run.lab.topology.links
        if link.name in down
        and (
            crosses(connection, link.a.node, link.b.node, rnic=link.rnic)
            or crosses(connection, link.b.node, link.a.node, rnic=link.rnic)
        )
    }
    return frozenset(pair for pair in dead - cut_off if not hung & {end.partition(":")[0] for end in pair})


def _explained(link: Link | None, signs: Signs, known: Sequence[Attribution], *, some_died: bool) -> bool:
    """Return whether the known findings also explain the remaining signs: often timers and duplicates, rarely gaps.

    `signs` exclude queue pairs that are already explained; `some_died` is whether there were any.
    """
    causes = {finding.cause for finding in known}
    if link is not None and any(finding.cause == "link-down" and finding.name == link.name for finding in known):
        return True
    # After an RNR NAK the sender goes back, so the messages behind it count as gaps, too.
    if link is not None and any(finding.cause == "late-receives" and finding.name == link.b.node for finding in known):
        return True
    if signs.gaps >= _FEW:
        return False
    if "link-down" in causes and not signs.lost_in:
        return True  # while routes change, queue pairs of other paths fail, too
    return not signs.dead and (bool(causes & {*_AWAY, "control-plane"}) or ("link-down" in causes and some_died))
