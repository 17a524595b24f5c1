"""Whose fault was it: a place and a cause from what a run measured, blind to what was injected. Pure.

Every finding has a *cause* out of `findings.CAUSES`, a *place* (kind and name), whether that is the network, a
confidence, and the lines of evidence that it rests on. `attribute` removes the faults from the measurements before it
looks at them, so that it can be judged against them (`harness.confusion`).

How each is told:

    link-down      a carrier went at an end of a link; at all links of one node, it is the node
    control-plane  TCP sessions of the switches were closed without a carrier going: the switch common to all of them;
                   or routes of one switch's prefixes went elsewhere, and nothing else did
    mtu            a switch had packets that it could neither send nor fragment
    loss           gaps at receivers (out_of_seq_request), NAKs at senders (rcvd_seq_err), timers and duplicates,
                   against the signature that each link would leave (`harness.signatures`)
    silent-host    the same, of a host that hangs: timers at its peers, no gap anywhere, no packet missing in a switch
    congestion     CE marks, placed by the same signatures; or, where a run holds probes, a link or switch that makes
                   round trips long (a queue, a delay, a limited rate: `harness.slow_ways`)
    slow-rank      the detector of slow ranks (`harness.slow_ranks`), or the one GPU that counted throttling
    gpu-error      a GPU's driver told the kernel's log of errors (XID events)
    lost-rank      a flight recorder ends before the others' (`harness.stalls`)
    hung-rank      the engine of one host did not run for a while in which those of the others did
    host-reboot    what a host's kernel counts from its boot on, and never takes back, stands lower than before
    slow-storage   ranks that did run waited for data or checkpoints much longer than they do in this run
    low-memory     programs of one host waited for memory
    busy-host      programs of one host waited for a CPU much longer than on the others, and nothing else is found there
    nothing        none of the above
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from harness.findings import NOTHING, Finding, Place
from harness.measurements import Deltas, Measurements, counter_deltas
from harness.places import place_of_link, place_of_switch
from harness.signatures import Signs, crosses, match, out_of_retries
from harness.slow_ranks import slow_ranks
from harness.slow_ways import with_round_trips
from harness.stalls import culprit
from testbed.counters import STATES
from testbed.onnode.xid import event
from testbed.topology import Link, Topology
from traffic.flight import Flight
from traffic.results import Standstill
from traffic.rtt import PathTimes

__all__ = ["attribute"]

_OUTSTANDING = 5
"""A wait is long from so many times the usual."""
_STORAGE_ALL, _STORAGE_ONE = 0.75, 0.6
"""How sure long waits make us: of most ranks, of fewer."""
_HANG_NS, _HUNG = 1_000_000_000, 0.9
"""Below that, a machine with other work to do explains it."""
_WAITED, _TOLD = 0.3, 0.45
"""A host is busy from that share of the run in which somebody waited, beyond the usual; and how sure that makes us."""
_STALLED_US, _SHORT = 200_000, 0.8
"""Waits for memory that a host does not have by itself; and how sure they make us."""
_BOOT_COUNTERS, _FELL = ("ip.", "tcp.", "cpu", "memory."), 2
"""Counters that only a boot sets back, and how many of them have to stand lower: one may have been torn in reading."""
_AWAY = frozenset({"hung-rank", "host-reboot"})
"""Causes by which a host no longer answers its peers."""
_HALF = 0.5
_FEW = 3
"""Gaps fewer than these may follow from a link that went down."""


def attribute(
    run: Measurements, flights: Sequence[Flight] = (), paths: Sequence[PathTimes] = ()
) -> tuple[Finding, ...]:
    """Findings, the surest first; `NOTHING` alone when there is none.

    `paths` are the round trips of probes, where a run holds some.
    """
    blind = msgspec.structs.replace(run, faults=())
    deltas = counter_deltas(blind)
    rebooted = _rebooted(blind)
    # What such a host counts now is of its boot and of its provisioning, and of nothing before.
    deltas = {node: names for node, names in deltas.items() if node not in {one.name for one in rebooted}}
    down = _carriers(blind.topology, deltas)
    control = [] if down else _control_plane(blind.topology, deltas) or _withdrawn(blind)
    hung = _stood_still(blind, down)
    found = [*rebooted, *down, *control, *hung, *_lost_rank(blind, flights)]
    found += _packets(blind, deltas, found)
    found += _slow(blind, deltas)
    found += _gpu_errors(blind)
    found += _storage(blind)
    found += _low_memory(blind, deltas)
    found += _busy(blind, deltas, {one.name.partition(":")[0] for one in found})
    found = with_round_trips(blind.topology, found, paths)
    return tuple(sorted(found, key=lambda one: -one.confidence)) or (NOTHING,)


def _carriers(topology: Topology, deltas: Deltas) -> list[Finding]:
    gone: dict[str, tuple[Link, str]] = {}
    for link in topology.links:
        said = [
            f"{end.node}: carrier of {end.netdev} changed {count} times"
            for end in (link.a, link.b)
            if (count := deltas.get(end.node, {}).get(f"{end.netdev}.carrier_changes", 0))
        ]
        if said:
            gone[link.name] = link, "; ".join(said)
    for node in (*topology.switch_by_name, *topology.host_by_name):
        links = topology.links_of(node)
        if len(links) > 1 and len(gone) > 1 and {link.name for link in links} == gone.keys():
            place: Place = "rank" if node in topology.host_by_name else place_of_switch(topology, node)
            evidence = tuple(words for _, words in gone.values())
            return [Finding(cause="link-down", place=place, name=node, confidence=0.95, evidence=evidence)]
    return [
        Finding(cause="link-down", place=place_of_link(topology, link), name=name, confidence=0.97, evidence=(words,))
        for name, (link, words) in gone.items()
    ]


def _rebooted(run: Measurements) -> list[Finding]:
    found = []
    for host in run.topology.host_by_name:
        was, now = (counted.get(host, {}) for counted in (run.counters_before, run.counters_after))
        fell = [
            f"{name} from {was[name]} to {now[name]}"
            for name in was
            if name.startswith(_BOOT_COUNTERS)
            and name.rpartition(".")[2] not in STATES
            and now.get(name, was[name]) < was[name]
        ]
        if len(fell) >= _FELL:
            evidence = (f"{host} counts anew, as after a boot: {', '.join(fell[:3])}",)
            found.append(Finding(cause="host-reboot", place="rank", name=host, confidence=0.95, evidence=evidence))
    return found


def _control_plane(topology: Topology, deltas: Deltas) -> list[Finding]:
    def torn(node: str) -> int:
        seen = deltas.get(node, {})
        return sum(seen.get(f"tcp.{name}", 0) for name in ("EstabResets", "ActiveOpens", "PassiveOpens"))

    links = [link for link in topology.uplinks if torn(link.a.node) and torn(link.b.node)]
    if not links:
        return []
    common = set.intersection(*({link.a.node, link.b.node} for link in links))
    evidence = tuple(
        f"{name}: {torn(name)} sessions opened or reset, no carrier went"
        for name in topology.switch_by_name
        if torn(name)
    )
    if len(common) == 1:
        (name,) = common
        place = place_of_switch(topology, name)
        return [Finding(cause="control-plane", place=place, name=name, confidence=0.85, evidence=evidence)]
    if len(links) == 1:
        place = place_of_link(topology, links[0])
        return [Finding(cause="control-plane", place=place, name=links[0].name, confidence=0.7, evidence=evidence)]
    worst = max(topology.switch_by_name, key=torn)
    place = place_of_switch(topology, worst)
    return [Finding(cause="control-plane", place=place, name=worst, confidence=0.5, evidence=evidence)]


def _withdrawn(run: Measurements) -> list[Finding]:
    """Routes that others lost to the prefixes of one switch, whose own links and sessions stayed."""
    owners = {str(ipaddress.ip_network(one.loopback)): one.name for one in run.topology.switches}
    for host in run.topology.hosts:
        for rnic in host.rnics:
            network = ipaddress.ip_interface(rnic.address).network
            owners[str(network)] = run.topology.rnic_link(host.name, rnic.name).a.node
    lost: dict[str, set[str]] = {}
    gone: set[str] = set()
    for change in run.changes:
        prefix = next((word for word in change.subject.split() if word in owners), None)
        if change.subject.startswith("route ") and change.text is None and prefix is not None:
            lost.setdefault(owners[prefix], set()).add(change.node)
            gone.add(prefix)
    if len(lost) != 1:
        return []
    ((name, nodes),) = lost.items()
    nodes.discard(name)
    if len(nodes) < 2:  # noqa: PLR2004 - one of them could have forgotten by itself
        return []
    words = (
        f"{', '.join(sorted(nodes))} lost {len(gone)} routes, all of them to {name}, whose links and sessions stayed"
    )
    place = place_of_switch(run.topology, name)
    return [Finding(cause="control-plane", place=place, name=name, confidence=0.8, evidence=(words,))]


def _packets(run: Measurements, deltas: Deltas, known: Sequence[Finding]) -> list[Finding]:
    """What the transport's counters say, where nothing that is known already explains it."""
    signs = Signs.of(run, deltas)
    if too_big := _too_big(run, deltas, signs):
        return too_big
    some_died, signs = bool(signs.dead), replace(signs, dead=_unexplained(run, signs.dead, known))
    found: list[Finding] = []
    marked = match(run, signs.marks(), among=run.topology.links)
    if signs.marked and marked is not None and marked.link is not None:
        found.append(
            Finding(
                cause="congestion",
                place=place_of_link(run.topology, marked.link),
                name=marked.link.name,
                confidence=0.6 * marked.likeness,
                evidence=marked.evidence,
            )
        )
    best = match(run, signs.losses(), among=run.topology.links, hosts=True)
    if best is None or _explained(best.link, signs, known, some_died=some_died):
        return found
    if best.link is None:
        found.append(
            Finding(
                cause="silent-host",
                place="rank",
                name=best.host,
                confidence=0.8 * best.likeness,
                evidence=best.evidence,
            )
        )
    else:
        place = place_of_link(run.topology, best.link)
        found.append(
            Finding(
                cause="loss", place=place, name=best.link.name, confidence=0.9 * best.likeness, evidence=best.evidence
            )
        )
    return found


def _too_big(run: Measurements, deltas: Deltas, signs: Signs) -> list[Finding]:
    """Switches with packets that they could not send on whole: the link on which what was lost had to leave them."""
    found = []
    for switch in run.topology.switches:
        count = deltas.get(switch.name, {}).get("ip.FragFails", 0)
        if not count:
            continue
        said = f"{switch.name}: {count} packets too big for their way out"
        links = run.topology.links_of(switch.name)
        link = _way_out(run, switch.name, links, signs.dead)
        evidence: tuple[str, ...] = (said, out_of_retries(signs.dead)) if link else (said,)
        if link is None and (best := match(run, signs.losses(), among=links)) is not None:
            link, evidence = best.link, (said, *best.evidence)
        place, name = (
            (place_of_switch(run.topology, switch.name), switch.name)
            if link is None
            else (place_of_link(run.topology, link), link.name)
        )
        confidence = 0.5 if link is None else 0.9
        found.append(Finding(cause="mtu", place=place, name=name, confidence=confidence, evidence=evidence))
    return found


def _way_out(run: Measurements, switch: str, links: Sequence[Link], dead: frozenset[tuple[str, str]]) -> Link | None:
    """The link of a switch that all the queue pairs' data, and no other's, had to take from it; the likest of them."""

    def likeness(link: Link) -> float:
        far = link.other(switch).node
        takes = {(one.src, one.dst) for one in run.connections if crosses(one, switch, far, rnic=link.rnic)}
        return len(takes & dead) / len(takes | dead) if takes | dead else 0.0

    best = max(links, key=likeness, default=None)
    return best if best is not None and likeness(best) >= _HALF else None


def _unexplained(
    run: Measurements, dead: frozenset[tuple[str, str]], known: Sequence[Finding]
) -> frozenset[tuple[str, str]]:
    """Of queue pairs that ran out of retries, those that nothing known has cut off.

    Known are links that were down on their way, a host that stood still at an end, routes that were gone for a while.
    """
    if any(one.cause == "control-plane" for one in known):
        return frozenset()
    down = {one.name for one in known if one.cause == "link-down"}
    hung = {one.name for one in known if one.cause in _AWAY}
    cut_off = {
        (one.src, one.dst)
        for one in run.connections
        for link in run.topology.links
        if link.name in down
        and (
            crosses(one, link.a.node, link.b.node, rnic=link.rnic)
            or crosses(one, link.b.node, link.a.node, rnic=link.rnic)
        )
    }
    return frozenset(pair for pair in dead - cut_off if not hung & {end.partition(":")[0] for end in pair})


def _explained(link: Link | None, signs: Signs, known: Sequence[Finding], *, some_died: bool) -> bool:
    """Whether what is known has the rest as a consequence: gaps at receivers hardly are, timers and duplicates are.

    `signs` are without the queue pairs that are explained; `some_died` says whether there were any.
    """
    causes = {one.cause for one in known}
    if link is not None and any(one.cause == "link-down" and one.name == link.name for one in known):
        return True
    if signs.gaps >= _FEW:
        return False
    if "link-down" in causes and not signs.lost_in:
        return True  # while routes move, queue pairs of other ways die, too
    return not signs.dead and (bool(causes & {*_AWAY, "control-plane"}) or ("link-down" in causes and some_died))


def _slow(run: Measurements, deltas: Deltas) -> list[Finding]:
    throttled = {
        (node, name.partition(".")[0]): count
        for node, names in deltas.items()
        for name, count in names.items()
        if name.endswith(".nr_throttled") and count
    }
    found = {}
    for one in slow_ranks(run).slow:
        gpus = [gpu for node, gpu in throttled if node == one.host]
        words = (
            f"rank {one.rank} on {one.host} computes about {100 * one.slowdown:.0f} % slower than the others "
            f"since iteration {one.since}"
        )
        evidence = (words, *(f"{one.host}: {gpu} was throttled {throttled[one.host, gpu]} times" for gpu in gpus))
        name = f"{one.host}:{gpus[0]}" if gpus else _only_gpu(run.topology, one.host)
        found[one.host] = Finding(
            cause="slow-rank", place="gpu", name=name, confidence=0.95 if gpus else 0.75, evidence=evidence
        )
    if len(throttled) == 1:
        ((node, gpu), count), *_ = throttled.items()
        said = f"{node}: {gpu} was throttled {count} times, no other"
        found.setdefault(
            node, Finding(cause="slow-rank", place="gpu", name=f"{node}:{gpu}", confidence=0.8, evidence=(said,))
        )
    return list(found.values())


def _gpu_errors(run: Measurements) -> list[Finding]:
    events: dict[str, Counter[int]] = {}
    for one in run.kernel:
        if (said := event(one.text or "")) is not None:
            events.setdefault(_gpu_at(run.topology, one.node, said[0]), Counter())[said[1]] += 1
    return [
        Finding(
            cause="gpu-error",
            place="gpu",
            name=name,
            confidence=0.9,
            evidence=(f"{name}: " + ", ".join(f"XID {xid}, {count} times" for xid, count in sorted(seen.items())),),
        )
        for name, seen in events.items()
    ]


def _gpu_at(topology: Topology, host: str, address: str) -> str:
    """The GPU of a host that has this PCIe address, of which the driver tells domain, bus and device; else its host."""
    for gpu in topology.host_by_name[host].gpus if host in topology.host_by_name else ():
        if gpu.name == address or (gpu.pcie or "").lower().startswith(address.lower()):
            return f"{host}:{gpu.name}"
    return host


def _stood_still(run: Measurements, down: Sequence[Finding]) -> list[Finding]:
    """Hosts whose engine stood still by itself: what happens to all at once happens to the machine beneath them.

    Nor one whose link was down: its engine waits for the kernel, which waits for its RNIC.
    """
    cut_off = {link.b.node for link in run.topology.links if any(one.name == link.name for one in down)}
    found = []
    for host in dict.fromkeys(one.host for one in run.standstills):
        if host in cut_off:
            continue
        others = [one for one in run.standstills if one.host != host]
        own = [one for one in run.standstills if one.host == host]
        longest_ns = max(_length_ns(one) - sum(_overlap_ns(one, other) for other in others) for one in own)
        if longest_ns < _HANG_NS:
            continue
        words = f"the traffic engine on {host} did not run for {longest_ns / 1e9:.1f} s, while the others did"
        found.append(Finding(cause="hung-rank", place="rank", name=host, confidence=_HUNG, evidence=(words,)))
    return found


def _length_ns(one: Standstill) -> int:
    return one.end_ns - one.start_ns


def _overlap_ns(one: Standstill, two: Standstill) -> int:
    return max(0, min(one.end_ns, two.end_ns) - max(one.start_ns, two.start_ns))


def _storage(run: Measurements) -> list[Finding]:
    host = (run.workload.get("storage") or {}).get("host")
    hosts = {rank.rank: rank.host for rank in run.ranks}
    steps = [(rank.rank, step) for rank in run.series for step in rank.iterations]
    if not host or not steps:
        return []

    def awake_ns(rank: int, start_ns: int, wait_ns: int) -> int:
        """Of a wait: how long the one who waited could have seen its end."""
        wait = Standstill(host="", start_ns=start_ns, end_ns=start_ns + wait_ns)
        return wait_ns - sum(_overlap_ns(wait, one) for one in run.standstills if one.host == hosts.get(rank))

    length_ns = float(np.median([step.end_ns - step.start_ns for _, step in steps]))
    evidence: list[str] = []
    waited: set[int] = set()
    for what, waits in (
        (
            "the data of an iteration",
            [(rank, awake_ns(rank, step.start_ns, step.ingest_ns)) for rank, step in steps if step.ingest_ns],
        ),
        (
            "a checkpoint",
            [
                (rank, awake_ns(rank, step.end_ns - step.checkpoint_ns, step.checkpoint_ns))
                for rank, step in steps
                if step.checkpoint_ns
            ],
        ),
    ):
        usual_ns = float(np.median([wait_ns for _, wait_ns in waits])) if waits else 0.0
        long = {rank: wait_ns for rank, wait_ns in waits if wait_ns > max(_OUTSTANDING * usual_ns, length_ns / 2)}
        waited |= long.keys()
        if long:
            who, longest_ns = "1 rank" if len(long) == 1 else f"{len(long)} ranks", max(long.values())
            evidence.append(f"{who} waited up to {longest_ns / 1e9:.2f} s for {what}, usually {usual_ns / 1e9:.2f} s")
    if not waited:
        return []
    # One rank that has to wait keeps the others from asking; one whose own host is slow waits alone, too.
    sure = _STORAGE_ALL if len(waited) >= len(run.series) / 2 else _STORAGE_ONE
    return [Finding(cause="slow-storage", place="storage", name=host, confidence=sure, evidence=tuple(evidence))]


def _busy(run: Measurements, deltas: Deltas, known: set[str]) -> list[Finding]:
    """A host whose programs wait for its CPUs; told, and not blamed: a rank with more to do looks alike."""
    waits = {
        host: sum(
            ns for name, ns in deltas.get(host, {}).items() if name.startswith("cpu") and name.endswith(".wait_us")
        )
        for host in dict.fromkeys(rank.host for rank in run.ranks)
    }
    if len(waits) < 3:  # noqa: PLR2004 - of two nobody knows which is the usual one
        return []
    worst = max(waits, key=lambda host: waits[host])
    usual_us = float(np.median([us for host, us in waits.items() if host != worst]))
    if (
        worst in known
        or waits[worst] < 2 * usual_us
        or waits[worst] - usual_us < _WAITED * (run.end_ns - run.t0_ns) / 1e3
    ):
        return []
    words = f"{worst}: programs waited {waits[worst] / 1e6:.1f} s for a CPU, on the other hosts {usual_us / 1e6:.1f} s"
    return [Finding(cause="busy-host", place="rank", name=worst, confidence=_TOLD, evidence=(words,))]


def _low_memory(run: Measurements, deltas: Deltas) -> list[Finding]:
    """Hosts whose programs had to wait for memory (pressure stall information): a healthy one's hardly ever do."""
    stalled = {
        host: deltas.get(host, {}).get("memory.stalled_us", 0)
        for host in dict.fromkeys(rank.host for rank in run.ranks)
    }
    usual_us = float(np.median(list(stalled.values()))) if stalled else 0.0
    return [
        Finding(
            cause="low-memory",
            place="rank",
            name=host,
            confidence=_SHORT,
            evidence=(f"{host}: programs waited {us / 1e6:.2f} s for memory, on most hosts {usual_us / 1e6:.2f} s",),
        )
        for host, us in stalled.items()
        if us - usual_us > _STALLED_US
    ]


def _only_gpu(topology: Topology, host: str) -> str:
    gpus = topology.host_by_name[host].gpus if host in topology.host_by_name else ()
    return f"{host}:{gpus[0].name}" if len(gpus) == 1 else host


def _lost_rank(run: Measurements, flights: Sequence[Flight]) -> list[Finding]:
    found = culprit(flights, run)
    if found is None:
        return []
    host = next((rank.host for rank in run.ranks if rank.rank == found.rank), f"rank {found.rank}")
    return [
        Finding(cause="lost-rank", place="rank", name=host, confidence=found.confidence, evidence=tuple(found.words))
    ]
