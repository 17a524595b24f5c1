"""What an injector of another author did to a lab: a receipt from looks at the lab, without knowing the injector. Pure.

A fault of ours has a holder that reports its firing. Of `tc`, `ip link` or a vendor's tool only the lab can tell: the
state of a place changed while the tool was at work, packets crossed that place, and counters that can show its effect
moved more than in as long a time before. All three together, of one place, confirm it. Counters that can show the
effect of a change are those of the interface itself, of the far end of its link, and of RNICs whose packets cross it. A
loss anywhere else has another cause, as far as is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from faultbed.testbed.model.topology import Link, Topology

__all__ = ["EFFECTS", "Opinion", "OutsideFault", "Place", "links_at", "opinion_of", "reach_of"]

Result = Literal["confirmed", "mismatch", "inconclusive"]
Place = tuple[str, str]
"""A node, and an interface or an RNIC of it. Without the latter: something of the whole node, such as a route."""

EFFECTS = frozenset(
    {
        *("out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "duplicate_request", "retry_exceeded_err"),
        *("rcvd_rnr_err", "send_rnr_err", "retry_rnr_exceeded_err", "out_of_sequence", "packet_seq_err"),
        *("local_ack_timeout_err", "req_transport_retries_exceeded", "rnr_nak_retry_err", "out_of_buffer"),
        *("queue_drops", "rx_dropped", "tx_dropped", "carrier_changes", "carrier_down_count"),
    }
)
"""Last parts of the names of counters that only a loss, a queue pair that waits, or a link that goes down, moves
(rdma_rxe, mlx5 and netdevs)."""
_PACKETS = frozenset({"rx_packets", "tx_packets", "sent_pkts", "rcvd_pkts"})
_IDLE_PER_S = 20.0
"""Packets a second on a port that carries BGP, ARP and LLDP alone; traffic has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideFault:
    """What was seen of a lab around a command.

    Attributes:
        changed: each place whose state was different at some time, with a line about it.
        reach: the interfaces and RNICs (`node/name`) whose counters can show the effect of each change.
        hidden: places whose counters of packets do not count RDMA: netdevs of hardware RNICs.
        left: differences that were still there at the end.
        before: growth of each counter (`node/name`) in the quiet time before.
        during: growth of each counter while the command was at work.
        before_s: length of the quiet time.
        during_s: length of the time at work.
        looks: how often the whole state was read while the command was at work.
        unknown: what could not be read, or counters that were reset meanwhile.
    """

    changed: Mapping[Place, str]
    left: Sequence[str]
    before: Mapping[str, int]
    during: Mapping[str, int]
    before_s: float
    during_s: float
    looks: int
    reach: Mapping[Place, frozenset[str]] = field(default_factory=dict)
    hidden: frozenset[Place] = frozenset()
    unknown: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """Whether the command did something to traffic, why, which counters moved, and whether it was undone.

    `undone` None: it is unknown.
    """

    result: Result
    why: str
    moved: Mapping[str, int]
    undone: bool | None


def opinion_of(fault: OutsideFault) -> Opinion:
    """Return the opinion about a command. What could not be read makes it inconclusive, never a mismatch."""
    moved = dict(_moved(fault))
    undone = None if fault.unknown else not fault.left
    result, why = _result(fault, moved)
    return Opinion(result=result, why=why, moved=moved, undone=undone)


def reach_of(
    topology: Topology, changed: Iterable[Place], addresses: Mapping[str, frozenset[str]]
) -> dict[Place, frozenset[str]]:
    """Return the interfaces and RNICs (`node/name`) whose counters can show the effect of each change. Pure.

    Args:
        topology: the lab.
        changed: the places that changed.
        addresses: the addresses in the packets of queue pairs that were seen on links, by the link's name.
    """
    rnics = {rnic.ip: f"{host.name}/{rnic.name}" for host in topology.hosts for rnic in host.rnics}
    reach = {}
    for place in changed:
        links = links_at(topology, place)
        ends = {f"{end.node}/{end.netdev}" for link in links for end in (link.a, link.b)}
        ends |= {f"{link.b.node}/{link.rnic}" for link in links if link.rnic is not None}
        crossing = {rnics[ip] for link in links for ip in addresses.get(link.name, ()) if ip in rnics}
        reach[place] = frozenset({"/".join(place), *ends, *crossing})
    return reach


def links_at(topology: Topology, place: Place) -> list[Link]:
    """Return the link of an interface or RNIC; of a whole node, all of its links."""
    node, interface = place
    return [
        link
        for link in topology.links
        for end in (link.a, link.b)
        if end.node == node and (not interface or interface in (end.netdev, link.rnic if end is link.b else None))
    ]


def _result(fault: OutsideFault, moved: Mapping[str, int]) -> tuple[Result, str]:
    if fault.unknown:
        return "inconclusive", f"not everything is known: {fault.unknown[0]}"
    if not fault.changed and moved:
        return "inconclusive", f"{next(iter(moved))} moved, but nothing on the lab changed that is watched"
    if not fault.changed and not fault.looks:
        return "inconclusive", "the command was over before the lab was looked at; let its fault last for seconds"
    if not fault.changed:
        return "mismatch", "nothing on the lab changed that is watched, and no counter of loss moved"
    return _of_changes(fault, moved)


def _of_changes(fault: OutsideFault, moved: Mapping[str, int]) -> tuple[Result, str]:
    """Return the result of the places that changed: interfaces if there are any, because routes follow from them."""
    places = [place for place in fault.changed if place[1]] or list(fault.changed)
    used = [place for place in places if _is_used(fault, place)]
    for place in used:
        if effect := next((name for name in moved if _is_of(name, fault.reach.get(place, frozenset()))), None):
            return "confirmed", f"{fault.changed[place]}; traffic crossed it; {effect} grew by {moved[effect]}"
    elsewhere = f"; {next(iter(moved))} moved, and nothing shows that this is its effect" if moved else ""
    if used:
        what = elsewhere or ", and no counter of loss moved"
        return "inconclusive", f"{fault.changed[used[0]]}; traffic crossed it{what}"
    for place in (place for place in places if _is_used(fault, place) is None):
        return "inconclusive", f"{fault.changed[place]}; no counter shows whether traffic crosses it{elsewhere}"
    return "mismatch", f"{fault.changed[places[0]]}; no traffic crossed it, before or meanwhile{elsewhere}"


def _is_of(counter: str, reach: frozenset[str]) -> bool:
    return counter.rpartition(".")[0] in reach


def _moved(fault: OutsideFault) -> Iterator[tuple[str, int]]:
    """Yield the counters of loss and carriers that grew faster than before, most first."""
    share = fault.during_s / fault.before_s if fault.before_s > 0 else 0.0
    grown = [
        (name, growth)
        for name, growth in fault.during.items()
        if _last(name) in EFFECTS and growth > 2 * share * fault.before.get(name, 0)
    ]
    yield from sorted(grown, key=lambda item: (-item[1], item[0]))


def _is_used(fault: OutsideFault, place: Place) -> bool | None:
    """Return whether traffic crossed a place that changed, before or meanwhile; None: unknown.

    A link that is down carries nothing: then the time before tells. Some packets are BGP's, ARP's or LLDP's.
    """
    at = frozenset({"/".join(place)}) if place[1] else fault.reach.get(place, frozenset())
    rates = [
        growth / length_s
        for counts, length_s in ((fault.before, fault.before_s), (fault.during, fault.during_s))
        for name, growth in counts.items()
        if length_s > 0 and _last(name) in _PACKETS and _is_of(name, at)
    ]
    if rates and max(rates) > _IDLE_PER_S:
        return True
    return None if place in fault.hidden or not rates else False


def _last(name: str) -> str:
    return name.rpartition(".")[2]
