"""Add the evidence of background probes to a run's findings: where probes were lost or delayed. Pure.

Round trips show packets that are delayed but not lost, which no counter of rxe shows. If round trips across a link or a
switch take much longer than on similar paths, the cause is *congestion*, whether by a queue, a delay or a limited rate.
If all round trips of a host are long, the host is busy, because its processes take the timestamps
(`faultbed.traffic.probes.rtt`). If probes across a link or a switch are lost, the cause is *loss*; if all probes of a
host are lost, the host is silent.

Only probes during the workload count. They are evaluated in windows, because a mean over the whole run would hide a
short fault. If a place already has a finding, the probes add a line of evidence instead of a second finding. A place
that is barely slower than others gets none. If a host seemed silent but answered all probes, that finding is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from faultbed.harness.analysis.probe_lines import WINDOW_NS
from faultbed.harness.attribution.places import place_of_link, place_of_switch
from faultbed.harness.findings import Attribution, Cause, Place
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.testbed.model.topology import Link, Topology
from faultbed.traffic.engine.traffic_metrics import percentile
from faultbed.traffic.probes import results, rtt
from faultbed.traffic.probes.results import WindowStats
from faultbed.traffic.probes.rtt import PathTimes, SlowPlace, Trip
from faultbed.traffic.probes.tomography import Suspect

__all__ = ["with_probes"]

_LEAST_TIMES = 3.0
"""A place is slow if its round trips take this many times as long as elsewhere. On a busy machine, twice happens by
chance."""
_IN_NETWORK, _AT_HOST = 0.7, 0.5
"""Confidence in a link or switch, and in a host, if probes identify it; divided by the number of possible places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """One line of evidence, and the places it points to."""

    places: Sequence[tuple[Place, str]]
    causes: tuple[Cause, Cause]
    """Cause for a link or switch, and for a host."""
    words: str
    weak: bool = False
    """Whether it only supports a known finding and cannot create a new one."""


def with_probes(run: RunEvidence, findings: Sequence[Attribution], trips: Sequence[Trip]) -> list[Attribution]:
    """Return the findings with the evidence of the probes that were sent while the workload ran."""
    topology, t0_ns = run.lab.topology, run.workload.t0_ns
    during = [trip for trip in trips if t0_ns <= trip.echo.sent_ns < run.workload.end_ns]
    all_evidence = [*_losses(topology, during, t0_ns), *_waits(topology, during, t0_ns)]
    known = [finding for finding in findings if not _answered_all_along(finding, during, all_evidence)]
    for evidence in all_evidence:
        if not evidence.places:
            continue
        place, name = evidence.places[0]
        is_host = place == "rank"
        confidence = (_AT_HOST if is_host else _IN_NETWORK) / len(evidence.places)
        same = next((i for i, finding in enumerate(known) if _supports(evidence, finding, confidence)), None)
        if same is not None:
            known[same] = msgspec.structs.replace(known[same], evidence=(*known[same].evidence, evidence.words))
        elif not evidence.weak:
            known.append(
                Attribution(
                    cause=evidence.causes[is_host],
                    place=place,
                    name=name,
                    confidence=confidence,
                    evidence=(evidence.words,),
                )
            )
    return known


def _answered_all_along(known: Attribution, trips: Sequence[Trip], all_evidence: Sequence[_Evidence]) -> bool:
    """Return whether a host that seems silent, by its peers' timers, answered every probe without delay.

    Its peers' timers may have expired because a link delayed packets for longer than the timeout.
    """
    if known.cause != "silent-host":
        return False
    implicated = {part for evidence in all_evidence for _, name in evidence.places for part in name.split(":")}
    probed = any(known.name in {end.partition(":")[0] for end in (trip.there[0], trip.there[-1])} for trip in trips)
    return probed and known.name not in implicated


def _supports(evidence: _Evidence, known: Attribution, confidence: float) -> bool:
    """Return whether evidence is about a known finding's place, or about a link of its switch.

    A link counts only if the finding about the switch is at least as confident as the evidence.
    """
    names = {name for _, name in evidence.places}
    switches = {name.partition(":")[0] for name in names}
    return bool(names & {known.name, *_hosts_of(known)}) or (known.name in switches and known.confidence >= confidence)


def _hosts_of(finding: Attribution) -> Sequence[str]:
    """Return the hosts of a finding about host links: evidence for such a host is also evidence for its link."""
    return finding.name.split(":")[1:2] if finding.place == "host-link" else ()


def _losses(topology: Topology, trips: Sequence[Trip], t0_ns: int) -> list[_Evidence]:
    return [
        _Evidence(
            places=_places(topology, suspect),
            causes=("loss", "silent-host"),
            words=(
                f"{suspect.lost} of {suspect.sent} probes over {' or '.join(suspect.names)} were lost "
                f"between {_seconds(window.start_ns - t0_ns)} and {_seconds(window.end_ns - t0_ns)}"
            ),
        )
        for window in results.lossy(trips, length_ns=WINDOW_NS)
        for suspect in window.suspects
    ]


def _waits(topology: Topology, trips: Sequence[Trip], t0_ns: int) -> list[_Evidence]:
    if not trips:
        return []
    start_ns, end_ns = trips[0].echo.sent_ns, trips[-1].echo.sent_ns + 1
    length_ns = min(WINDOW_NS, end_ns - start_ns)
    by_place: dict[tuple[str, ...], list[tuple[SlowPlace, WindowStats]]] = {}
    all_windows = results.windows(trips, length_ns=length_ns, start_ns=start_ns, end_ns=end_ns)
    for window in all_windows:
        for slow in window.slow:
            by_place.setdefault(slow.place, []).append((slow, window))
    evidence = []
    for windows in sorted(by_place.values(), key=lambda slow_windows: -sum(slow.gain for slow, _ in slow_windows)):
        worst, worst_window = max(windows, key=lambda slow_window: slow_window[0].gain)
        since, until = (_seconds(at_ns - t0_ns) for at_ns in (windows[0][1].start_ns, windows[-1][1].end_ns))
        period = f"in {len(windows)} of {len(all_windows)} windows of {_seconds(length_ns)}, from {since} to {until}"
        evidence.append(
            _Evidence(
                places=_places(topology, worst),
                causes=("congestion", "busy-host"),
                words=f"{_words(worst, worst_window.paths)}; {period}",
                weak=max(slow.times for slow, _ in windows) < _LEAST_TIMES,
            )
        )
    return evidence


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.1f} s"


def _places(topology: Topology, named: SlowPlace | Suspect) -> list[tuple[Place, str]]:
    """Return the links that probes cannot distinguish; if there are none, the switches, or else the hosts.

    A link is listed once for both directions.
    """
    links: dict[str, Place] = {}
    nodes: dict[str, Place] = {}
    for place in (named.place, *named.alike):
        if len(place) > 1:
            link = _link(topology, *place)
            if link is not None:
                links[link.name] = place_of_link(topology, link)
        elif place[0] in topology.switch_by_name:
            nodes[place[0]] = place_of_switch(topology, place[0])
        elif place[0] in topology.host_by_name:
            nodes[place[0]] = "rank"
    chosen = links or {name: kind for name, kind in nodes.items() if kind != "rank"} or nodes
    return [(kind, name) for name, kind in chosen.items()]


def _link(topology: Topology, near: str, far: str) -> Link | None:
    """Return the link between two nodes of a path, of which one may be an RNIC (`host1:rxe0`)."""
    ends = {near, far}
    for link in topology.links:
        lower = link.b.node if link.rnic is None else f"{link.b.node}:{link.rnic}"
        if {link.a.node, lower} == ends:
            return link
    return None


def _words(slow: SlowPlace, paths: Sequence[PathTimes]) -> str:
    """Describe slow round trips: how long, compared with what, how often, and the share that responders took."""
    crossing = [path for path in paths if path.responder is not None and _crosses(path, slow.place)]
    elsewhere = [path for path in paths if path.responder is not None and not _crosses(path, slow.place)]
    responders = ""
    if crossing and elsewhere:
        crossing_ms, elsewhere_ms = (
            percentile([path.responder.median_ns for path in group if path.responder is not None], 50) / 1e6
            for group in (crossing, elsewhere)
        )
        responders = f"; responders took {crossing_ms:.2f} ms of it, elsewhere {elsewhere_ms:.2f} ms"
    return (
        f"probes over {' or '.join(slow.names)} took {slow.times:.1f} times what they take on similar paths, "
        f"{slow.slow} of {slow.answered} more than {slow.level:g} times{responders} ({rtt.STAMPS} times)"
    )


def _crosses(path: PathTimes, place: tuple[str, ...]) -> bool:
    return place in path.crossed
