"""Signatures of loss: what loss on each link would change on the RNICs, compared with the counters. Pure.

A queue pair's data goes one way, its ACKs the other. When near→far loses packets,

    of the data that crosses near→far    the receiver sees gaps, the sender gets NAKs or its timer expires
    of the ACKs that cross near→far      the sender's timer expires, the receiver gets duplicates

If near→far loses everything for longer than the retries last, all queue pairs of both groups fail. If some packets get
through, as gaps show, any queue pair of the first group may fail. Every directed link therefore predicts a different
vector over (sign, RNIC). The link whose vector has the smallest angle to the vector of counts explains it best
(cosine, 0 to 1).

Details:

- Load adds timers and duplicates everywhere: the median over RNICs is subtracted first, and small excesses are ignored.
- A switch that received more packets than it sent lost them: its links are preferred, most of all outgoing ones, where
  queues are. A link that delivered fewer packets than were sent lost them on the wire.
- ACKs return on their own path if the run recorded it, else on the path of the data. A few lost ACKs have no effect,
  because the next one repeats them, so their signs weigh less.
- Among hypotheses that are almost equal, the one whose queue pairs explain which gaps belong to which NAKs is best.

If a switch or a link is known to have lost packets and no receiver saw a gap, only ACKs may have been lost. That
hypothesis is tried only for links out of, into and at this place, because load causes timers and duplicates as well.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.telemetry_evidence import Deltas
from faultbed.harness.record.evidence.workload_evidence import Connection, connection_between
from faultbed.testbed.model.topology import Link
from faultbed.testbed.observe.counters import MLX5
from faultbed.traffic.engine.run_results import QpError

__all__ = ["Match", "Signs", "acks_cross", "acks_lost", "crosses", "match", "match_acks", "out_of_retries"]

_WEIGHTS = {"gap": 1.0, "nak": 0.7, "timer": 0.5, "duplicate": 0.3, "mark": 1.0, "passed": 1.0, "dead": 1.0}
_RXE = {
    "gap": "out_of_seq_request",
    "nak": "rcvd_seq_err",
    "timer": "completer_retry_err",
    "duplicate": "duplicate_request",
}
_COUNTERS = {sign: (name, MLX5.get(name, name)) for sign, name in _RXE.items()}
"""By sign: the counter of rdma_rxe, and that of mlx5."""
_BACKGROUND = ("timer", "duplicate")
_RETRIES_EXCEEDED = "RETRY_EXC_ERR"
_FEW = 3
_LEAST_COUNT = {"timer": _FEW, "duplicate": _FEW, "mark": _FEW, "passed": _FEW, "gap": 2, "nak": 2}
"""A sign is ignored if its largest count over all RNICs is below this. Load alone causes no gaps and no NAKs."""
_MARKS = ("mark", "passed")
_LOST_FEW, _KEPT_FEW = 10, 3
"""Tolerance in packets at a switch, and at a switch that counts its own packets exactly."""
_ITS_OWN, _IS_EXACT = ("InDelivers", "OutRequests"), "ip6.InDelivers"
_OUT, _IN, _WIRE = 1.2, 1.15, 1.4
"""Preference for a link where packets are missing: outgoing from a switch, incoming, lost on the wire."""
_SILENT = 1.25
"""Preference for a host that hangs, which explains the signs of all its peers at once."""
_APART_NS, _ONE_PLACE, _MOMENT = 1_000_000_000, 0.7, 1 / 3
"""Queue pairs that fail more than `_APART_NS` after each other belong to different moments. At least `_ONE_PLACE` of
those of a moment must have a place in common. A moment with less than `_MOMENT` of the failures of the largest is
ignored."""
_ACKS = 0.4
"""Weight of the signs of lost ACKs, relative to those of lost data."""
_LEAST = 0.6
"""Minimum likeness of the best hypothesis."""
_NEAR, _ALIKE = 0.05, 1e-6
"""Differences in likeness and in `unfit` up to which hypotheses cannot be distinguished."""

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """Signs of a fault that RNICs and switches counted.

    `counts`: by (sign, `host1:rxe0`); CE-marked packets that a switch received by ("passed", `ctsw1`). `dead`: pairs of
    RNICs whose queue pairs ran out of retries. `lost_in`: how many more packets a switch received than it sent; `kept`:
    those switches whose count is exact. `lost_on`: how many packets a link received and did not deliver, by its two
    nodes in that direction. `counted`: the counts before the contribution of load was subtracted.
    """

    counts: Mapping[_Key, float]
    counted: Mapping[_Key, float] = field(default_factory=dict)
    dead: frozenset[tuple[str, str]] = frozenset()
    lost_in: Mapping[str, int] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    lost_on: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @classmethod
    def of(cls, run: RunEvidence, deltas: Deltas) -> Signs:
        """Return the signs of a run on the RNICs of its workload."""
        rnics = sorted({end for connection in run.workload.connections for end in (connection.src, connection.dst)})
        counts: dict[_Key, float] = {}
        for end in rnics:
            host, _, rnic = end.partition(":")
            counters = deltas.get(host, {})
            for sign, names in _COUNTERS.items():
                counts[sign, end] = float(max((counters.get(f"{rnic}.{name}", 0) for name in names), default=0))
            counts["mark", end] = float(counters.get("ip.InCEPkts", 0))
        counted = dict(counts)
        for sign in _BACKGROUND:
            usual = float(np.median([counts[sign, end] for end in rnics])) if rnics else 0.0
            noise = max(_FEW, 5 * math.sqrt(usual), usual / 2)
            for end in rnics:
                excess = counts[sign, end] - usual
                counts[sign, end] = excess if excess > noise else 0.0
        counts |= {
            ("passed", switch.name): float(deltas[switch.name]["ip.InCEPkts"])
            for switch in run.lab.topology.switches
            if "ip.InCEPkts" in deltas.get(switch.name, {})
        }
        lost_in = _lost_in(run, deltas)
        kept = frozenset(name for name in lost_in if _IS_EXACT in deltas.get(name, {}))
        return cls(
            counts=counts,
            counted=counted,
            dead=_dead_pairs(run),
            lost_in=lost_in,
            kept=kept,
            lost_on=_lost_on(run, deltas),
        )

    @property
    def gaps(self) -> float:
        """Number of gaps that all receivers saw."""
        return sum(count for (sign, _), count in self.counts.items() if sign == "gap")

    @property
    def marked(self) -> bool:
        """Whether CE marks arrived."""
        return any(count >= _FEW for (sign, _), count in self.counts.items() if sign == "mark")

    def marks(self) -> Signs:
        """Return only the marks."""
        return Signs(counts={key: count for key, count in self.counts.items() if key[0] in _MARKS})

    def losses(self) -> Signs:
        """Return all signs except the marks."""
        counts = {key: count for key, count in self.counts.items() if key[0] not in _MARKS}
        return replace(self, counts=counts)

    def vector(self) -> dict[_Key, float]:
        """Return each sign relative to its own maximum, weighted; a sign that barely changed is 0."""
        changed = {sign for (sign, _), count in self.counts.items() if count >= _LEAST_COUNT[sign]}
        return _weighed({key: count for key, count in self.counts.items() if key[0] in changed and count}, self.dead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The best hypothesis: a link, or a host that hangs (`link` is None); `likeness` is 0 to 1."""

    link: Link | None
    host: str
    likeness: float
    evidence: tuple[str, ...]


def acks_lost(src: str, dst: str) -> str:
    """Return the line of evidence for lost ACKs."""
    return f"only ACKs were lost, from {src} to {dst}: senders' timers ran out, receivers got duplicates and saw no gap"


def match(run: RunEvidence, signs: Signs, *, among: Iterable[Link], hosts: bool = False) -> Match | None:
    """Return the hypothesis most similar to the signs; None if nothing changed or none is similar."""
    if not signs.vector():
        return None
    hypotheses = [hypothesis for link in among for hypothesis in _of_link(run, link, signs)]
    if hosts and signs.gaps < _FEW and not signs.kept:
        hypotheses += _of_hosts(run, signs)
    best = max(hypotheses, key=lambda hypothesis: hypothesis.likeness, default=None)
    if best is None or best.likeness < _LEAST:
        return None
    evidence = _evidence(signs, _lossiest(signs))
    if best.link is not None:
        near_best = best.likeness - _NEAR
        rivals = [rival for rival in hypotheses if rival.link is not None and rival.likeness > near_best]
        best = min(rivals, key=lambda rival: (rival.unfit, -rival.likeness))
        same = {rival.link.name for rival in rivals if rival.link and rival.unfit < best.unfit + _ALIKE}
        if alike := sorted(same - {best.link.name if best.link else ""}):
            evidence += (f"{', '.join(alike)} would leave the same traces",)
    return Match(link=best.link, host=best.host, likeness=min(1.0, best.likeness), evidence=evidence)


class _Hypothesis(NamedTuple):
    """A link, or a host that hangs (`link` is None), with its likeness to the counts and how badly it fits them."""

    likeness: float
    link: Link | None
    host: str = ""
    unfit: float = 1.0


def _of_link(run: RunEvidence, link: Link, signs: Signs) -> list[_Hypothesis]:
    """Return a hypothesis for each direction of a link, with a higher likeness where packets are missing."""
    lossy = _lossiest(signs)
    directions = ((link.a.node, link.b.node), (link.b.node, link.a.node))
    unfit = min(1.0, *(_unfit(run, near, far, signs, rnic=link.rnic) for near, far in directions))
    hypotheses = []
    for near, far in directions:
        likeness = _likeness(run, near, far, signs, rnic=link.rnic)
        if signs.lost_on.get((near, far)):
            likeness *= _WIRE
        elif lossy in (near, far):
            likeness *= _OUT if lossy == near else _IN
        hypotheses.append(_Hypothesis(likeness=likeness, link=link, unfit=unfit))
    return hypotheses


def _of_hosts(run: RunEvidence, signs: Signs) -> list[_Hypothesis]:
    """Return a hypothesis for each host that receives data, unless packets were lost on the way to it."""
    observed = signs.vector()
    return [
        _Hypothesis(likeness=_SILENT * _cosine(observed, _silent(run, host, signs)), link=None, host=host)
        for host in sorted({connection.dst.partition(":")[0] for connection in run.workload.connections})
        if not _lost_towards(run, host, signs)
    ]


def _lossiest(signs: Signs) -> str:
    """Return the switch that lost most packets; empty if none lost any."""
    return max(signs.lost_in, key=lambda name: signs.lost_in[name], default="")


def match_acks(run: RunEvidence, signs: Signs, *, among: Iterable[Link]) -> Match | None:
    """Return the link and direction where the loss of only ACKs matches best; None if nothing matches.

    Only places that are known to have lost packets are tried, and only if no receiver saw a gap.
    """
    if any(count for (sign, _), count in signs.counts.items() if sign in ("gap", "nak")):
        return None
    if not (observed := _late_acks(signs)):
        return None
    lossy = _lossiest(signs)
    hypotheses: list[tuple[float, Link, tuple[str, str]]] = []
    for link in among:
        for near, far in ((link.a.node, link.b.node), (link.b.node, link.a.node)):
            prefer = _WIRE if (near, far) in signs.lost_on else _OUT if near == lossy else _IN if far == lossy else 0.0
            if prefer:
                likeness = _cosine(observed, _predicted_of_acks(run, near, far, signs, rnic=link.rnic))
                hypotheses.append((prefer * likeness, link, (near, far)))
    best = max(hypotheses, key=lambda hypothesis: hypothesis[0], default=None)
    if best is None or best[0] < _LEAST:
        return None
    evidence = (acks_lost(*best[2]), *_evidence(signs, lossy))
    return Match(link=best[1], host="", likeness=min(1.0, best[0]), evidence=evidence)


def _likeness(run: RunEvidence, near: str, far: str, signs: Signs, *, rnic: str | None) -> float:
    """Return the similarity of the counts to a loss on near→far, of all packets or, if gaps show traffic, of some."""
    observed = signs.vector()
    likeness = _cosine(observed, _predicted(run, near, far, signs, rnic=rnic))
    if signs.dead and signs.gaps >= _FEW:
        likeness = max(likeness, _cosine(observed, _predicted(run, near, far, signs, rnic=rnic, some=True)))
    return likeness


def _predicted(
    run: RunEvidence, near: str, far: str, signs: Signs, *, rnic: str | None, some: bool = False
) -> dict[_Key, float]:
    """Return the signs that loss on near→far would leave, or the marks if `signs` are marks. ACKs weigh less than data.

    With `some`, only some packets are lost: of the queue pairs whose data crosses near→far, only
    those that failed are expected.
    """
    predicted: dict[_Key, float] = {}

    def add(sign: str, end: str, share: float = 1.0) -> None:
        predicted[sign, end] = max(predicted.get((sign, end), 0.0), share * _WEIGHTS[sign])

    marks = all(sign in _MARKS for sign, _ in signs.counts)
    for connection in run.workload.connections:
        forth, back = crosses(connection, near, far, rnic=rnic), acks_cross(connection, near, far, rnic=rnic)
        if marks and (forth or back):
            path, share = (connection.path, 1.0) if forth else (ack_path(connection), _ACKS)
            add("mark", connection.dst if forth else connection.src, share)
            for node in path[path.index(far) :]:
                if ("passed", node) in signs.counts:
                    add("passed", node, share)
            continue
        if signs.dead and (((connection.src, connection.dst) in signs.dead and forth) if some else (forth or back)):
            add(*_dead_key(connection.src, connection.dst))
        if forth:
            add("gap", connection.dst)
            add("nak", connection.src)
            add("timer", connection.src)
        elif back:
            add("timer", connection.src, _ACKS)
            add("duplicate", connection.dst, _ACKS)
    return predicted


def _late_acks(signs: Signs) -> dict[_Key, float]:
    """Return timers and duplicates in excess of the lower quartile of the RNICs, and dead queue pairs.

    With many RNICs the median would be enough; with few, half of them may have lost ACKs.
    """
    excess: dict[_Key, float] = {}
    for sign in _BACKGROUND:
        values = {end: count for (counted_sign, end), count in signs.counted.items() if counted_sign == sign}
        if not values:
            continue
        usual = float(np.percentile(list(values.values()), 25, method="lower"))
        noise = max(_FEW, 5 * math.sqrt(usual))
        excess |= {(sign, end): count - usual for end, count in values.items() if count - usual > noise}
    return _weighed(excess, signs.dead)


def _weighed(counts: Mapping[_Key, float], dead: Iterable[tuple[str, str]]) -> dict[_Key, float]:
    """Return each sign relative to its own maximum, weighted, and the queue pairs that failed."""
    largest: dict[str, float] = {}
    for (sign, _), count in counts.items():
        largest[sign] = max(largest.get(sign, 0.0), count)
    weighed = {(sign, end): _WEIGHTS[sign] * count / largest[sign] for (sign, end), count in counts.items()}
    return weighed | {_dead_key(*pair): _WEIGHTS["dead"] for pair in dead}


def _predicted_of_acks(run: RunEvidence, near: str, far: str, signs: Signs, *, rnic: str | None) -> dict[_Key, float]:
    """Return the predicted signs if near→far loses only ACKs: timers and duplicates, in proportion to queue pairs."""
    hit = [connection for connection in run.workload.connections if acks_cross(connection, near, far, rnic=rnic)]
    counts: Counter[_Key] = Counter()
    for connection in hit:
        counts["timer", connection.src] += 1
        counts["duplicate", connection.dst] += 1
    return _weighed(counts, {(connection.src, connection.dst) for connection in hit} if signs.dead else ())


def _unfit(run: RunEvidence, near: str, far: str, signs: Signs, *, rnic: str | None) -> float:
    """Return how poorly losses on near→far explain the gaps and NAKs: 0 fully explained, 1 not at all.

    A lost packet is a gap at its receiver and a NAK at its sender, so pairs that cross another link do not fit.
    """
    ends = sorted({end for connection in run.workload.connections for end in (connection.src, connection.dst)})
    place = {(sign, end): row for row, (sign, end) in enumerate((s, e) for s in ("gap", "nak") for e in ends)}
    counted = np.array([signs.counts.get(key, 0.0) for key in place])
    crossing = sorted(
        {
            (connection.src, connection.dst)
            for connection in run.workload.connections
            if crosses(connection, near, far, rnic=rnic)
        }
    )
    size = float(np.linalg.norm(counted))
    if not crossing or not size:
        return 1.0
    lost = np.zeros((len(place), len(crossing)))
    for column, (src, dst) in enumerate(crossing):
        lost[place["gap", dst], column] = lost[place["nak", src], column] = 1.0
    best = np.linalg.lstsq(lost, counted, rcond=None)[0]
    return float(np.linalg.norm(lost @ best.clip(min=0.0) - counted)) / size


def _dead_pairs(run: RunEvidence) -> frozenset[tuple[str, str]]:
    """Return pairs of RNICs whose queue pairs ran out of retries at moments that one place can explain.

    If many fail at once between all hosts, the machine that runs the VMs stood still; the network is not the reason.
    """
    moments: list[list[QpError]] = []
    for lost_qp in sorted(run.workload.qps_lost, key=lambda lost: lost.time_ns):
        if lost_qp.status != _RETRIES_EXCEEDED:
            continue
        if not moments or lost_qp.time_ns - moments[-1][-1].time_ns > _APART_NS:
            moments.append([])
        moments[-1].append(lost_qp)
    placed: list[list[tuple[str, str]]] = []
    for moment in moments:
        pairs = [(lost_qp.endpoint, lost_qp.peer) for lost_qp in moment]
        places: Counter[frozenset[str]] = Counter()
        for lost_qp in moment:
            connection = connection_between(
                run.workload, (lost_qp.endpoint, lost_qp.peer), index=lost_qp.connection, qpn=lost_qp.qpn
            )
            places.update({frozenset((end.partition(":")[0],)) for end in (lost_qp.endpoint, lost_qp.peer)})
            places.update({frozenset(link) for link in itertools.pairwise(connection.path if connection else ())})
        if max(places.values()) >= _ONE_PLACE * len(pairs):
            placed.append(pairs)
    most = max(map(len, placed), default=0)
    return frozenset(pair for pairs in placed if len(pairs) >= _MOMENT * most for pair in pairs)


def _lost_towards(run: RunEvidence, host: str, signs: Signs) -> bool:
    """Return whether packets are missing at the switches or on the links of a host: then the host does not hang."""
    links = run.lab.topology.links_of(host)
    return any(link.other(host).node in signs.lost_in for link in links) or any(
        host in (near, far) for near, far in signs.lost_on
    )


def _silent(run: RunEvidence, host: str, signs: Signs) -> dict[_Key, float]:
    predicted: dict[_Key, float] = {}
    for connection in run.workload.connections:
        if connection.dst.partition(":")[0] == host:
            if signs.dead:
                predicted[_dead_key(connection.src, connection.dst)] = _WEIGHTS["dead"]
            predicted["timer", connection.src] = _WEIGHTS["timer"]
            predicted["duplicate", connection.dst] = _WEIGHTS["duplicate"]
    return predicted


def out_of_retries(dead: Iterable[tuple[str, str]]) -> str:
    """Return the line of evidence for queue pairs that ran out of retries."""
    return f"queue pairs ran out of retries from {', '.join(f'{src} to {dst}' for src, dst in sorted(dead))}"


def crosses(connection: Connection, near: str, far: str, *, rnic: str | None) -> bool:
    """Return whether a connection's data goes from `near` to `far`; a host's link must be that of the RNIC in use."""
    return _is_on_path(connection.path, connection.src, connection.dst, (near, far), rnic)


def ack_path(connection: Connection) -> tuple[str, ...]:
    """Return the path of a connection's ACKs, or its data path reversed if the run did not record it."""
    return connection.ack_path or connection.path[::-1]


def acks_cross(connection: Connection, near: str, far: str, *, rnic: str | None) -> bool:
    """Return whether a connection's ACKs go from `near` to `far`; a host's link must be that of the RNIC in use."""
    return _is_on_path(ack_path(connection), connection.dst, connection.src, (near, far), rnic)


def _is_on_path(path: tuple[str, ...], src: str, dst: str, link: tuple[str, str], rnic: str | None) -> bool:
    is_of_rnic = rnic is None or f"{link[0]}:{rnic}" == src or f"{link[1]}:{rnic}" == dst
    return is_of_rnic and link in itertools.pairwise(path)


def _dead_key(src: str, dst: str) -> _Key:
    return "dead", f"{src}>{dst}"


def _cosine(left: Mapping[_Key, float], right: Mapping[_Key, float]) -> float:
    product = sum(value * right.get(key, 0.0) for key, value in left.items())
    sizes = math.hypot(*left.values()) * math.hypot(*right.values()) if left and right else 0.0
    return product / sizes if sizes else 0.0


def _lost_in(run: RunEvidence, deltas: Deltas) -> dict[str, int]:
    """Return by how much each switch received more packets than it sent. Switches with carrier changes are left out.

    Packets to and from the switch's own control plane are not counted, if the switch reports them.
    """
    lost = {}
    for switch in run.lab.topology.switches:
        counters = deltas.get(switch.name, {})
        ports = [link.end(switch.name).netdev for link in run.lab.topology.links_of(switch.name)]
        if any(counters.get(f"{port}.carrier_changes", 0) for port in ports):
            continue
        to_switch, from_switch = (
            sum(counters.get(f"{layer}.{name}", 0) for layer in ("ip", "ip6")) for name in _ITS_OWN
        )
        received = sum(counters.get(f"{port}.rx_packets", 0) for port in ports) - to_switch
        sent = sum(counters.get(f"{port}.tx_packets", 0) for port in ports) - from_switch
        # ARP has no counter, and the ports are read one after the other.
        if received - sent > (_KEPT_FEW if _IS_EXACT in counters else _LOST_FEW + received // 5000):
            lost[switch.name] = received - sent
    return lost


def _lost_on(run: RunEvidence, deltas: Deltas) -> dict[tuple[str, str], int]:
    """Return packets that one end of a link sent and the other did not receive.

    Both ends are read at slightly different times.
    """
    lost = {}
    for link in run.lab.topology.links:
        for near, far in ((link.a, link.b), (link.b, link.a)):
            sent = deltas.get(near.node, {}).get(f"{near.netdev}.tx_packets", 0)
            received = deltas.get(far.node, {}).get(f"{far.netdev}.rx_packets", 0)
            if received and sent - received > _LOST_FEW + sent // 1000:
                lost[near.node, far.node] = sent - received
    return lost


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
    lines += [
        f"{src} to {dst}: {count:,} packets were sent and did not arrive" for (src, dst), count in signs.lost_on.items()
    ]
    return tuple(lines)
