"""Probes on every way through the fabric: datagrams between RNICs, on so many queue pairs that ECMP spreads them.

Each RNIC sends to one in its own rack and to one in every other rack, so that every host's link carries probes in both
directions, and every uplink most probably: which one they took is asked of the switches' kernels, and what was not
covered is said. Where they are lost is for `traffic.tomography`. Each that arrives is answered by the process at the
other end, which tells the network's round trip from what that process took: `traffic.rtt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from testbed.errors import LabError, UsageError
from testbed.lab import Lab
from testbed.topology import Topology
from traffic import flow, rtt, tomography
from traffic.entropy import ways
from traffic.flow import FlowSpec, FlowsResult
from traffic.plan import QpParams
from traffic.results import Connection
from traffic.rtt import Echo, PathTimes, SlowPlace
from traffic.run import OnEvent
from traffic.tomography import Probes, Suspect

__all__ = ["ProbeResult", "ProbeSpec", "check", "pairs", "run", "uncovered"]

PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """`per_s` datagrams a second of `size_bytes` on each of `qps` queue pairs between two RNICs, for `duration_s`."""

    duration_s: float = 5.0
    per_s: float = 20.0
    qps: int = 4
    size_bytes: int = 64
    qp: QpParams = field(default_factory=QpParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What became of the probes.

    `paths` are the round trips by way there and back, `slow` the places that make them long; `stamps` says whose times
    they are.
    `uncovered` are directed links that none of them took; `moved` how many paths changed meanwhile: their probes are
    left out.
    """

    spec: ProbeSpec
    probes: tuple[Probes, ...]
    suspects: tuple[Suspect, ...]
    links: Mapping[str, tuple[int, int]]
    uncovered: tuple[str, ...]
    moved: int
    paths: tuple[PathTimes, ...] = ()
    slow: tuple[SlowPlace, ...] = ()
    stamps: str = rtt.STAMPS

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        found = asdict(self)
        found["suspects"] = [{**asdict(one), "names": one.names} for one in self.suspects]
        found["slow"] = [{**asdict(one), "names": one.names} for one in self.slow]
        return found


def check(spec: ProbeSpec) -> None:
    """Refuse what cannot be meant.

    Raises:
        UsageError: in one sentence.
    """
    if spec.duration_s <= 0 or spec.per_s <= 0 or spec.qps < 1:
        raise UsageError("probes need a time, a rate and a number of queue pairs above 0")


def pairs(topology: Topology) -> tuple[tuple[str, str], ...]:
    """(source, destination) of every flow of probes: each RNIC to one in each rack, and each is sent to alike."""
    racks: dict[str, list[str]] = {}
    for host in topology.hosts:
        racks.setdefault(host.rack, []).append(host.name)
    found = []
    for host in topology.hosts:
        place = racks[host.rack].index(host.name)
        for number, rnic in enumerate(host.rnics):
            for rack, names in racks.items():
                shift = 1 if rack == host.rack else number
                other = topology.host_by_name[names[(place + shift) % len(names)]]
                if other.name != host.name and number < len(other.rnics):
                    found.append((f"{host.name}:{rnic.name}", f"{other.name}:{other.rnics[number].name}"))
    return tuple(found)


def uncovered(topology: Topology, probes: tuple[Probes, ...]) -> tuple[str, ...]:
    """Directed links between RNICs and switches, and between switches, that no probe took."""
    seen = tomography.links_of(probes)
    wanted = []
    for link in topology.links:
        far = link.b.node if link.rnic is None else f"{link.b.node}:{link.rnic}"
        wanted += [(link.a.node, far), (far, link.a.node)]
    return tuple(f"{near} -> {far}" for near, far in wanted if not seen.get((near, far), (0, 0))[0])


def run(lab: Lab, spec: ProbeSpec, on_event: OnEvent | None = None) -> ProbeResult:
    """Probe a lab, from start to end.

    Raises:
        UsageError: the lab has no two hosts to probe between.
        LabError: the probes did not run.
    """
    check(spec)
    chosen = pairs(lab.topology)
    if not chosen:
        raise UsageError(f"{lab.name} has no two hosts with RNICs: there is nothing to probe")
    specs = [
        FlowSpec(
            src=src,
            dst=dst,
            verb="send",
            transport="ud",
            message_bytes=spec.size_bytes,
            qps=spec.qps,
            spread="round-robin",
            rate_bps=spec.per_s * spec.qps * spec.size_bytes * 8,
            duration_s=spec.duration_s,
            echo=True,
            qp=spec.qp,
        )
        for src, dst in chosen
    ]
    with flow.start_all(lab, specs, on_event) as running:
        before, before_back = _ways(lab, running.connections), _ways(lab, _turned(running.connections))
        result = running.wait(spec.duration_s + PATIENCE_S)
    if result.outcome == "failed":
        raise LabError(f"the probes failed: {result.where}")
    after, after_back = _ways(lab, result.connections), _ways(lab, _turned(result.connections))
    same = {index: way for index, way in after.items() if before.get(index) == way}
    back = {index: way for index, way in after_back.items() if before_back.get(index) == way}
    probes, paths = _probes(result, same), _round_trips(result, same, back)
    return ProbeResult(
        spec=spec,
        probes=probes,
        suspects=tomography.locate(probes),
        links={" -> ".join(link): count for link, count in sorted(tomography.links_of(probes).items())},
        uncovered=uncovered(lab.topology, probes),
        moved=len(after) - len(same),
        paths=paths,
        slow=rtt.locate(paths),
    )


def _turned(connections: Sequence[Connection]) -> list[Connection]:
    """The same queue pairs as their answers go: from the other end, which ECMP may send over another spine."""
    return [
        replace(
            one,
            src=one.dst,
            dst=one.src,
            src_ip=one.dst_ip,
            dst_ip=one.src_ip,
            lqpn=one.rqpn,
            rqpn=one.lqpn,
        )
        for one in connections
    ]


def _round_trips(
    result: FlowsResult, there: Mapping[int, tuple[str, ...]], back: Mapping[int, tuple[str, ...]]
) -> tuple[PathTimes, ...]:
    """The times of all probes whose way there and way back stayed the same, by these ways."""
    by_path: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Echo]] = {}
    for one in result.flows:
        for echo in one.echoes:
            if echo.connection in there and echo.connection in back:
                by_path.setdefault((there[echo.connection], back[echo.connection]), []).append(echo)
    return rtt.times_of(by_path)


def _ways(lab: Lab, connections: Sequence[Connection]) -> dict[int, tuple[str, ...]]:
    """Path of each connection by index, RNICs at both ends; none that crosses no switch."""
    ends = {one.index: (one.src, one.dst) for one in connections}
    return {
        index: (ends[index][0], *way[1:-1], ends[index][1])
        for index, way in ways(lab, connections).items()
        if len(way) > 2  # noqa: PLR2004
    }


def _probes(result: FlowsResult, taken: Mapping[int, tuple[str, ...]]) -> tuple[Probes, ...]:
    found = []
    for one in result.flows:
        came = {total.connection: total.messages for total in one.totals}
        for total in one.sent_totals:
            if total.connection in taken:
                lost = max(0, total.messages - came.get(total.connection, 0))
                found.append(Probes(path=taken[total.connection], sent=total.messages, lost=lost))
    return tuple(found)
