"""States of each link and node of the fabric at several moments of a run. Pure.

    fault       a fault is active, by its receipt
    down        a port of the link has no carrier or is down, as the kernels reported
    routes      the node routes differently than before: its routes are missing or use another path
    recovered   it was in one of these states before, and is in none now

A kernel reports changes, not the initial state, which must differ from the first change. If the last change of a route
differs from the first one, the route is assumed to have returned to its initial state. Otherwise it has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from faultbed.harness.report.fabric.drawing_layout import link_of
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.observe.telemetry import Change

__all__ = ["MOST", "Moment", "State", "Window", "link_state", "moments"]

State = Literal["fault", "down", "routes", "recovered"]

MOST = 10
"""Maximum number of moments."""
_SETTLE_NS = 1_000_000_000
"""Time after firing at which the onset of a fault is shown: kernels and BGP need some time to react."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """An active fault: its number in the report, kind, target, firing and removal."""

    number: int
    kind: str
    target: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """States of links and nodes at one moment.

    `links` are keyed by name, `nodes` by `rtsw1`, `host1`, `host1:rxe0` or `host1:gpu0`. Healthy links and nodes have
    no entry. A link may be down and under a fault. `faults` are the numbers of active faults.
    """

    title: str
    at_s: float
    faults: tuple[int, ...]
    links: Mapping[str, tuple[State, ...]]
    nodes: Mapping[str, tuple[State, ...]]
    summary: str


def link_state(text: str | None) -> Literal["up", "no carrier", "down", "gone"]:
    """Return the state of a link from its text (`faultbed.testbed.node.state`)."""
    if text is None:
        return "gone"
    flags = text.split(" mtu ")[0].split()
    if "LOWER_UP" in flags:
        return "up"
    return "no carrier" if "UP" in flags else "down"


def moments(
    topology: Topology, windows: Sequence[Window], changes: Iterable[Change], *, t0_ns: int, end_ns: int
) -> tuple[Moment, ...]:
    """Return moments before the first fault, after each firing, at each removal and at the end; none without faults.

    There are at most `MOST` moments: with many faults, removals are left out first, then the moments of the last
    faults.
    """
    if not windows:
        return ()
    ordered = sorted(changes, key=lambda change: change.at_ns)
    times = [("before", max(t0_ns, min(window.start_ns for window in windows) - 1))]
    with_removals = len(windows) * 2 + 2 <= MOST
    for window in sorted(windows, key=lambda candidate: candidate.start_ns)[: MOST - 2]:
        times.append(
            (f"{window.number} on", min(window.start_ns + _SETTLE_NS, max(window.start_ns, window.end_ns - 1)))
        )
        if with_removals:
            times.append((f"{window.number} cleared", window.end_ns))
    times.append(("end", max(end_ns, *(at_ns for _, at_ns in times))))
    times.sort(key=lambda time: time[1])
    known = _Known(topology, ordered)
    return tuple(
        _moment(
            title,
            (at_ns - t0_ns) / 1e9,
            [window for window in windows if window.start_ns <= at_ns < window.end_ns],
            _states(topology, windows, known, at_ns),
        )
        for title, at_ns in times
    )


class _Known:
    """The kernels' reports, which can be queried for any time."""

    def __init__(self, topology: Topology, changes: Sequence[Change]) -> None:
        self._link_of_port = {
            (port.node, port.netdev): link.name for link in topology.links for port in (link.a, link.b)
        }
        self._reports: dict[tuple[str, str], list[Change]] = {}
        for change in changes:
            if change.subject != "kernel":
                self._reports.setdefault((change.node, change.subject), []).append(change)

    def down(self, at_ns: int) -> tuple[set[str], set[str]]:
        """Return the links that are down, and those that ever were up to this time."""
        now: set[str] = set()
        ever: set[str] = set()
        for (node, subject), reports in self._reports.items():
            kind, _, netdev = subject.partition(" ")
            link = self._link_of_port.get((node, netdev)) if kind == "link" else None
            was_down = [link_state(report.text) != "up" for report in reports if report.at_ns <= at_ns]
            if link is not None and any(was_down):
                ever.add(link)
                if was_down[-1]:
                    now.add(link)
        return now, ever

    def rerouted(self, at_ns: int) -> tuple[dict[str, int], set[str]]:
        """Return the number of changed routes by node, and all nodes that ever had one up to this time."""
        now: dict[str, int] = {}
        ever: set[str] = set()
        for (node, subject), reports in self._reports.items():
            if subject.partition(" ")[0] not in {"route", "nexthop"}:
                continue
            first, last = reports[0].text, reports[-1].text
            came_back = first != last
            was_changed = [
                report.text != last if came_back else report.text == first
                for report in reports
                if report.at_ns <= at_ns
            ]
            if any(was_changed):
                ever.add(node)
            if was_changed and was_changed[-1]:
                now[node] = now.get(node, 0) + 1
        return now, ever


def _states(
    topology: Topology, windows: Sequence[Window], known: _Known, at_ns: int
) -> tuple[dict[str, tuple[State, ...]], dict[str, tuple[State, ...]], dict[str, int]]:
    down, ever_down = known.down(at_ns)
    routes, ever_rerouted = known.rerouted(at_ns)
    links: dict[str, list[State]] = {}
    nodes: dict[str, list[State]] = {}
    for window in windows:
        # A fault on an RNIC is drawn on the RNIC, although a link ends there.
        link = link_of(topology, window.target) if window.target not in _device_names(topology) else None
        place = links.setdefault(link, []) if link else nodes.setdefault(window.target, [])
        if window.start_ns <= at_ns < window.end_ns:
            place.append("fault")
        elif window.end_ns <= at_ns:
            place.append("recovered")
    for name in ever_down:
        links.setdefault(name, []).append("down" if name in down else "recovered")
    for node in ever_rerouted:
        nodes.setdefault(node, []).append("routes" if node in routes else "recovered")
    return _settled(links), _settled(nodes), routes


def _device_names(topology: Topology) -> set[str]:
    return {
        f"{host.name}:{name}"
        for host in topology.hosts
        for name in (*(device.name for device in host.rnics), *(device.name for device in host.gpus))
    }


def _settled(states: Mapping[str, Sequence[State]]) -> dict[str, tuple[State, ...]]:
    """Remove duplicates from states; `recovered` remains only if there is no other state."""
    distinct: dict[str, tuple[State, ...]] = {}
    for place, states_of_place in states.items():
        unhealthy = tuple(state for state in dict.fromkeys(states_of_place) if state != "recovered")
        if states_of_place:
            distinct[place] = unhealthy or ("recovered",)
    return distinct


def _moment(
    title: str,
    at_s: float,
    on: Sequence[Window],
    states: tuple[dict[str, tuple[State, ...]], dict[str, tuple[State, ...]], dict[str, int]],
) -> Moment:
    links, nodes, routes = states
    down = sorted(name for name, states_of_link in links.items() if "down" in states_of_link)
    back = sorted(name for name, states_of_place in (links | nodes).items() if states_of_place == ("recovered",))
    sentences = [f"fault {window.number} ({window.kind} on {window.target}) is on" for window in on]
    if down:
        sentences.append(f"no carrier: {', '.join(down)}")
    if routes:
        sentences.append(f"changed routes: {', '.join(f'{count} on {node}' for node, count in sorted(routes.items()))}")
    if back:
        sentences.append(f"recovered: {', '.join(back)}")
    return Moment(
        title=title,
        at_s=at_s,
        faults=tuple(window.number for window in on),
        links=links,
        nodes=nodes,
        summary="; ".join(sentences) or "all links and nodes are healthy",
    )
