"""Which link a loss on it would look like: the signature that it leaves on RNICs, against what was counted. Pure.

A queue pair's data goes one way, its ACKs the other. When u→v loses packets,

    of the data that crosses u→v    the receiver sees gaps, the sender gets NAKs or runs into its timer
    of the ACKs that cross u→v      the sender runs into its timer, the receiver gets duplicates

and when u→v lets nothing through for longer than the retries last, all queue pairs of both sorts are lost; when it lets
some through, which gaps show, any of the first sort may be. So every directed link predicts another vector over (sign,
RNIC). The hypothesis whose vector has the smallest angle to the one
that was counted explains it best (cosine, 0..1). What a busy machine adds everywhere alike (timers, duplicates) is
taken out as the median over RNICs first, and what is not well above it counts as nothing. A switch that took in more
packets than it sent out is where they went: its links are preferred, above all those on the way out, where queues
are; on a link that delivered fewer than went in, they were lost on the wire. ACKs come back on their own path, where
the run recorded it, else on the way that the data went. A few that are lost show nowhere, for the next one says the
same, so that their signs count for less. Of hypotheses that are nearly as like, that one is best whose queue pairs
explain which gaps belong to which NAKs.

Where a switch or a link is known to have lost packets and no receiver saw a gap, they may have been ACKs alone. That
hypothesis is tried for the ways out of, into and over this place only: timers and duplicates by themselves are what a
busy machine makes, too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from harness.record.measurements import Connection, Deltas, Measurements
from testbed.model.topology import Link
from testbed.observe.counters import MLX5
from traffic.engine.run_results import QpError

__all__ = ["Match", "Signs", "acks_cross", "acks_lost", "crosses", "match", "match_acks", "out_of_retries"]

_WEIGHTS = {"gap": 1.0, "nak": 0.7, "timer": 0.5, "duplicate": 0.3, "mark": 1.0, "passed": 1.0, "dead": 1.0}
_RXE = {
    "gap": "out_of_seq_request",
    "nak": "rcvd_seq_err",
    "timer": "completer_retry_err",
    "duplicate": "duplicate_request",
}
_COUNTERS = {sign: (name, MLX5.get(name, name)) for sign, name in _RXE.items()}
"""By sign: the counter of rdma_rxe, and mlx5's."""
_BACKGROUND = ("timer", "duplicate")
_RETRIES_EXCEEDED = "RETRY_EXC_ERR"
_FEW = 3
_LEAST_COUNT = {"timer": _FEW, "duplicate": _FEW, "mark": _FEW, "passed": _FEW, "gap": 2, "nak": 2}
"""Below it, the largest count of a sign says nothing; gaps and NAKs no busy machine makes by itself."""
_MARKS = ("mark", "passed")
_LOST_FEW, _KEPT_FEW = 10, 3
"""Packets more or less at a switch; and at one that counts its own ones: then it is one or none."""
_ITS_OWN, _IS_EXACT = ("InDelivers", "OutRequests"), "ip6.InDelivers"
_OUT, _IN, _WIRE = 1.2, 1.15, 1.4
"""How much a link is preferred where packets went missing: on the way out of a switch, on the way in, on the wire."""
_SILENT = 1.25
_APART_NS, _ONE_PLACE, _MOMENT = 1_000_000_000, 0.7, 1 / 3
"""Queue pairs lost farther apart have another reason; of which share a place must be an end, or on the way; and next to
a moment when many died, one of fewer than such a share of them is none."""
_ACKS = 0.4
_LEAST = 0.6
_NEAR, _ALIKE = 0.05, 1e-6

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What was counted, by (sign, `host1:rxe0`); packets with CE marks that a switch took in by ("passed", `ctsw1`).

    `dead`: from which RNIC to which one queue pairs ran out of retries, however often they were rebuilt in vain.
    `lost_in`: by how much a switch took in more packets than it sent out, `kept` those of which it is known exactly;
    `lost_on`: how many a link took in and did not deliver, by the nodes that it leads from and to. `counted` are the
    counts before what a busy machine adds was taken out.
    """

    counts: Mapping[_Key, float]
    counted: Mapping[_Key, float] = field(default_factory=dict)
    dead: frozenset[tuple[str, str]] = frozenset()
    lost_in: Mapping[str, int] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    lost_on: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Measurements, deltas: Deltas) -> Signs:
        """The signs of a run on the RNICs of its workload."""
        used = sorted({end for one in run.connections for end in (one.src, one.dst)})
        counts: dict[_Key, float] = {}
        for end in used:
            host, _, rnic = end.partition(":")
            seen = deltas.get(host, {})
            for sign, names in _COUNTERS.items():
                counts[sign, end] = float(max((seen.get(f"{rnic}.{name}", 0) for name in names), default=0))
            counts["mark", end] = float(seen.get("ip.InCEPkts", 0))
        counted = dict(counts)
        for sign in _BACKGROUND:
            usual = float(np.median([counts[sign, end] for end in used])) if used else 0.0
            noise = max(_FEW, 5 * math.sqrt(usual), usual / 2)
            for end in used:
                excess = counts[sign, end] - usual
                counts[sign, end] = excess if excess > noise else 0.0
        counts |= {
            ("passed", switch.name): float(deltas[switch.name]["ip.InCEPkts"])
            for switch in run.topology.switches
            if "ip.InCEPkts" in deltas.get(switch.name, {})
        }
        lost_in = _lost_in(run, deltas)
        kept = frozenset(name for name in lost_in if _IS_EXACT in deltas.get(name, {}))
        return cls(
            counts=counts, counted=counted, dead=_dead(run), lost_in=lost_in, kept=kept, lost_on=_lost_on(run, deltas)
        )

    @property
    def gaps(self) -> float:
        """Gaps that all receivers saw."""
        return sum(count for (sign, _), count in self.counts.items() if sign == "gap")

    @property
    def marked(self) -> bool:
        """Whether CE marks came in."""
        return any(count >= _FEW for (sign, _), count in self.counts.items() if sign == "mark")

    def marks(self) -> Signs:
        """The marks alone."""
        return Signs(counts={key: count for key, count in self.counts.items() if key[0] in _MARKS})

    def losses(self) -> Signs:
        """All but the marks."""
        counts = {key: count for key, count in self.counts.items() if key[0] not in _MARKS}
        return replace(self, counts=counts)

    def vector(self) -> dict[_Key, float]:
        """Each sign relative to its own largest count and weighted; a sign that hardly moved is 0."""
        largest: dict[str, float] = {}
        for (sign, _), count in self.counts.items():
            largest[sign] = max(largest.get(sign, 0.0), count)
        counted = {
            (sign, end): _WEIGHTS[sign] * count / largest[sign]
            for (sign, end), count in self.counts.items()
            if largest[sign] >= _LEAST_COUNT[sign] and count
        }
        return counted | {_died(*pair): _WEIGHTS["dead"] for pair in self.dead}


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The best hypothesis: a link, or (None) a host that hangs; `likeness` in 0..1."""

    link: Link | None
    host: str
    likeness: float
    evidence: tuple[str, ...]


def acks_lost(u: str, v: str) -> str:
    """A line of evidence."""
    return f"only ACKs were lost, from {u} to {v}: senders' timers ran out, receivers got duplicates and saw no gap"


def match(run: Measurements, signs: Signs, *, among: Iterable[Link], hosts: bool = False) -> Match | None:
    """The hypothesis that is most like the signs; None: nothing moved, or nothing is like it."""
    if not (seen := signs.vector()):
        return None
    lossy = max(signs.lost_in, key=lambda name: signs.lost_in[name], default="")
    found: list[tuple[float, Link | None, str]] = []
    unfit: dict[str, float] = {}
    alike: list[str] = []
    for link in among:
        for u, v in ((link.a.node, link.b.node), (link.b.node, link.a.node)):
            likeness = _likeness(run, u, v, signs, rnic=link.rnic)
            unfit[link.name] = min(unfit.get(link.name, 1.0), _unfit(run, u, v, signs, rnic=link.rnic))
            if signs.lost_on.get((u, v)):
                likeness *= _WIRE
            elif lossy in (u, v):
                likeness *= _OUT if lossy == u else _IN
            found.append((likeness, link, ""))
    if hosts and signs.gaps < _FEW and not signs.kept:
        found += [
            (_SILENT * _cosine(seen, _silent(run, host, signs)), None, host)
            for host in sorted({one.dst.partition(":")[0] for one in run.connections})
            if not _lost_towards(run, host, signs)
        ]
    best = max(found, key=lambda one: one[0], default=None)
    if best is None or best[0] < _LEAST:
        return None
    if best[1] is not None:
        near = [(unfit[one[1].name], one) for one in found if one[1] is not None and one[0] > best[0] - _NEAR]
        least, best = min(near, key=lambda one: (one[0], -one[1][0]))
        alike = sorted(
            {link.name for other, (_, link, _) in near if link and link != best[1] and other < least + _ALIKE}
        )
    evidence = _evidence(signs, lossy)
    if alike:
        evidence += (f"{', '.join(alike)} would leave the same traces",)
    return Match(link=best[1], host=best[2], likeness=min(1.0, best[0]), evidence=evidence)


def match_acks(run: Measurements, signs: Signs, *, among: Iterable[Link]) -> Match | None:
    """The link and direction on which the loss of ACKs alone is most like the signs; None: nothing is like it.

    Only places are tried that are known to have lost packets, and only where no receiver saw a gap.
    """
    if any(count for (sign, _), count in signs.counts.items() if sign in ("gap", "nak")):
        return None
    if not (seen := _late_acks(signs)):
        return None
    lossy = max(signs.lost_in, key=lambda name: signs.lost_in[name], default="")
    found: list[tuple[float, Link, tuple[str, str]]] = []
    for link in among:
        for u, v in ((link.a.node, link.b.node), (link.b.node, link.a.node)):
            prefer = _WIRE if (u, v) in signs.lost_on else _OUT if u == lossy else _IN if v == lossy else 0.0
            if prefer:
                likeness = _cosine(seen, _predicted_of_acks(run, u, v, signs, rnic=link.rnic))
                found.append((prefer * likeness, link, (u, v)))
    best = max(found, key=lambda one: one[0], default=None)
    if best is None or best[0] < _LEAST:
        return None
    evidence = (acks_lost(*best[2]), *_evidence(signs, lossy))
    return Match(link=best[1], host="", likeness=min(1.0, best[0]), evidence=evidence)


def _likeness(run: Measurements, u: str, v: str, signs: Signs, *, rnic: str | None) -> float:
    """Of what was counted to a loss on u→v: of everything, or where gaps show that it still carries, of some."""
    seen = signs.vector()
    found = _cosine(seen, _predicted(run, u, v, signs, rnic=rnic))
    if signs.dead and signs.gaps >= _FEW:
        found = max(found, _cosine(seen, _predicted(run, u, v, signs, rnic=rnic, some=True)))
    return found


def _predicted(
    run: Measurements, u: str, v: str, signs: Signs, *, rnic: str | None, some: bool = False
) -> dict[_Key, float]:
    """What loss on u→v would leave, or marks where signs are of marks; an ACK counts for less than data.

    With `some`, of packets: of the queue pairs whose data crosses it those died that did.
    """
    found: dict[_Key, float] = {}

    def add(sign: str, end: str, share: float = 1.0) -> None:
        found[sign, end] = max(found.get((sign, end), 0.0), share * _WEIGHTS[sign])

    marks = all(sign in _MARKS for sign, _ in signs.counts)
    for one in run.connections:
        forth, back = crosses(one, u, v, rnic=rnic), acks_cross(one, u, v, rnic=rnic)
        if marks and (forth or back):
            path, share = (one.path, 1.0) if forth else (ack_path(one), _ACKS)
            add("mark", one.dst if forth else one.src, share)
            for node in path[path.index(v) :]:
                if ("passed", node) in signs.counts:
                    add("passed", node, share)
            continue
        if signs.dead and (((one.src, one.dst) in signs.dead and forth) if some else (forth or back)):
            add(*_died(one.src, one.dst))
        if forth:
            add("gap", one.dst)
            add("nak", one.src)
            add("timer", one.src)
        elif back:
            add("timer", one.src, _ACKS)
            add("duplicate", one.dst, _ACKS)
    return found


def _late_acks(signs: Signs) -> dict[_Key, float]:
    """Timers and duplicates above those of the RNIC that has the fewest but one in four, and dead queue pairs.

    The median would do for many RNICs; of a handful, half may have lost ACKs.
    """
    found: dict[_Key, float] = {}
    for sign in _BACKGROUND:
        values = {end: count for (each, end), count in signs.counted.items() if each == sign}
        if not values:
            continue
        usual = float(np.percentile(list(values.values()), 25, method="lower"))
        noise = max(_FEW, 5 * math.sqrt(usual))
        found |= {(sign, end): count - usual for end, count in values.items() if count - usual > noise}
    return _weighed(found, signs.dead)


def _weighed(counts: Mapping[_Key, float], dead: Iterable[tuple[str, str]]) -> dict[_Key, float]:
    """Each sign relative to its own largest count and weighted, and the queue pairs that died."""
    largest: dict[str, float] = {}
    for (sign, _), count in counts.items():
        largest[sign] = max(largest.get(sign, 0.0), count)
    found = {(sign, end): _WEIGHTS[sign] * count / largest[sign] for (sign, end), count in counts.items()}
    return found | {_died(*pair): _WEIGHTS["dead"] for pair in dead}


def _predicted_of_acks(run: Measurements, u: str, v: str, signs: Signs, *, rnic: str | None) -> dict[_Key, float]:
    """What the loss of ACKs alone on u→v would leave: so many timers and duplicates as queue pairs are hit."""
    hit = [one for one in run.connections if acks_cross(one, u, v, rnic=rnic)]
    counts: Counter[_Key] = Counter()
    for one in hit:
        counts["timer", one.src] += 1
        counts["duplicate", one.dst] += 1
    return _weighed(counts, {(one.src, one.dst) for one in hit} if signs.dead else ())


def _unfit(run: Measurements, u: str, v: str, signs: Signs, *, rnic: str | None) -> float:
    """How little losses on u→v, so many of each queue pair's data, explain the gaps and NAKs: 0 all, 1 nothing.

    A packet lost is a gap at its receiver and a NAK at its sender, so that pairs which cross another link do not fit.
    """
    ends = sorted({end for one in run.connections for end in (one.src, one.dst)})
    place = {(sign, end): row for row, (sign, end) in enumerate((s, e) for s in ("gap", "nak") for e in ends)}
    counted = np.array([signs.counts.get(key, 0.0) for key in place])
    taken = sorted({(one.src, one.dst) for one in run.connections if crosses(one, u, v, rnic=rnic)})
    size = float(np.linalg.norm(counted))
    if not taken or not size:
        return 1.0
    lost = np.zeros((len(place), len(taken)))
    for column, (src, dst) in enumerate(taken):
        lost[place["gap", dst], column] = lost[place["nak", src], column] = 1.0
    best = np.linalg.lstsq(lost, counted, rcond=None)[0]
    return float(np.linalg.norm(lost @ best.clip(min=0.0) - counted)) / size


def _dead(run: Measurements) -> frozenset[tuple[str, str]]:
    """From which RNIC to which one queue pairs ran out of retries, at moments when one place can be the reason.

    Of many that die at once between all hosts the reason is none of the network: the machine beneath stood still.
    """
    ways = {(one.src, one.dst): one.path for one in run.connections}
    moments: list[list[QpError]] = []
    for one in sorted(run.qps_lost, key=lambda lost: lost.time_ns):
        if one.status != _RETRIES_EXCEEDED:
            continue
        if not moments or one.time_ns - moments[-1][-1].time_ns > _APART_NS:
            moments.append([])
        moments[-1].append(one)
    placed: list[list[tuple[str, str]]] = []
    for moment in moments:
        pairs = [(one.endpoint, one.peer) for one in moment]
        places: Counter[frozenset[str]] = Counter()
        for src, dst in pairs:
            path = ways.get((src, dst), ())
            places.update({frozenset((end.partition(":")[0],)) for end in (src, dst)})
            places.update({frozenset(link) for link in itertools.pairwise(path)})
        if max(places.values()) >= _ONE_PLACE * len(pairs):
            placed.append(pairs)
    most = max(map(len, placed), default=0)
    return frozenset(pair for pairs in placed if len(pairs) >= _MOMENT * most for pair in pairs)


def _lost_towards(run: Measurements, host: str, signs: Signs) -> bool:
    """Whether packets went missing at the switches of a host's own links, or on these: that is no host that hangs."""
    links = run.topology.links_of(host)
    return any(link.other(host).node in signs.lost_in for link in links) or any(
        host in (near, far) for near, far in signs.lost_on
    )


def _silent(run: Measurements, host: str, signs: Signs) -> dict[_Key, float]:
    found: dict[_Key, float] = {}
    for one in run.connections:
        if one.dst.partition(":")[0] == host:
            if signs.dead:
                found[_died(one.src, one.dst)] = _WEIGHTS["dead"]
            found["timer", one.src] = _WEIGHTS["timer"]
            found["duplicate", one.dst] = _WEIGHTS["duplicate"]
    return found


def out_of_retries(dead: Iterable[tuple[str, str]]) -> str:
    """A line of evidence."""
    return f"queue pairs ran out of retries from {', '.join(f'{src} to {dst}' for src, dst in sorted(dead))}"


def crosses(one: Connection, u: str, v: str, *, rnic: str | None) -> bool:
    """Whether its data goes from u to v next; a host's link only if it is the link of the RNIC in use."""
    if rnic is not None and f"{u}:{rnic}" != one.src and f"{v}:{rnic}" != one.dst:
        return False
    return (u, v) in itertools.pairwise(one.path)


def ack_path(one: Connection) -> tuple[str, ...]:
    """The nodes that its ACKs cross; where the run did not record them, its data's backwards."""
    return one.ack_path or one.path[::-1]


def acks_cross(one: Connection, u: str, v: str, *, rnic: str | None) -> bool:
    """Whether its ACKs go from u to v next; a host's link only if it is the link of the RNIC in use."""
    if rnic is not None and f"{u}:{rnic}" != one.dst and f"{v}:{rnic}" != one.src:
        return False
    return (u, v) in itertools.pairwise(ack_path(one))


def _died(src: str, dst: str) -> _Key:
    return "dead", f"{src}>{dst}"


def _cosine(left: Mapping[_Key, float], right: Mapping[_Key, float]) -> float:
    product = sum(value * right.get(key, 0.0) for key, value in left.items())
    sizes = math.hypot(*left.values()) * math.hypot(*right.values()) if left and right else 0.0
    return product / sizes if sizes else 0.0


def _lost_in(run: Measurements, deltas: Deltas) -> dict[str, int]:
    """Packets that a switch took in and did not send out; one whose carrier changed is left out, its ports drop.

    Those to and from the switch itself, its control plane's, are not counted, where it tells how many they are.
    """
    found = {}
    for switch in run.topology.switches:
        seen = deltas.get(switch.name, {})
        ports = [link.end(switch.name).netdev for link in run.topology.links_of(switch.name)]
        if any(seen.get(f"{port}.carrier_changes", 0) for port in ports):
            continue
        taken, given = (sum(seen.get(f"{layer}.{name}", 0) for layer in ("ip", "ip6")) for name in _ITS_OWN)
        received = sum(seen.get(f"{port}.rx_packets", 0) for port in ports) - taken
        sent = sum(seen.get(f"{port}.tx_packets", 0) for port in ports) - given
        # ARP has no counter, and the ports are read one after the other.
        if received - sent > (_KEPT_FEW if _IS_EXACT in seen else _LOST_FEW + received // 5000):
            found[switch.name] = received - sent
    return found


def _lost_on(run: Measurements, deltas: Deltas) -> dict[tuple[str, str], int]:
    """Packets that one end of a link sent and the other did not get; the ends are read a moment apart."""
    found = {}
    for link in run.topology.links:
        for near, far in ((link.a, link.b), (link.b, link.a)):
            sent = deltas.get(near.node, {}).get(f"{near.netdev}.tx_packets", 0)
            received = deltas.get(far.node, {}).get(f"{far.netdev}.rx_packets", 0)
            if received and sent - received > _LOST_FEW + sent // 1000:
                found[near.node, far.node] = sent - received
    return found


def _evidence(signs: Signs, lossy: str) -> tuple[str, ...]:
    words = {
        "gap": "gaps in the PSNs of what it received",
        "nak": "NAKs for a gap at the other end",
        "timer": "timers of its queue pairs more than usual in this run",
        "duplicate": "duplicates received more than usual in this run",
        "mark": "packets with CE marks received",
        "passed": "packets with CE marks came in",
    }
    lines = [
        f"{end}: {count:,.0f} {words[sign]}"
        for (sign, end), count in sorted(signs.counts.items(), key=lambda item: -item[1])
        if count >= _FEW
    ][:6]
    if signs.dead:
        lines.append(out_of_retries(signs.dead))
    if signs.lost_in.get(lossy):
        lines.append(f"{lossy}: {signs.lost_in[lossy]:,} packets came in and did not go out")
    lines += [f"{u} to {v}: {count:,} packets were sent and did not arrive" for (u, v), count in signs.lost_on.items()]
    return tuple(lines)
