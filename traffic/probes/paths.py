"""The path of each probe while paths change: switches are queried repeatedly, and two equal answers bound a period."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from testbed.errors import FaultbedError
from testbed.lab import Lab
from traffic.engine.run_results import Connection
from traffic.probes.ecmp_entropy import ASK_S, ways
from traffic.probes.rtt import Echo, Trip

__all__ = ["Asked", "Ways", "trips"]

SPACING_S = 1.0
"""Minimum time between two queries. Changes that come sooner share one query."""

Way = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Answer of the switches to a query between two times (controller ns): paths there and back by connection.

    Each entry holds both QPNs and both paths. A connection without a path, or without an answer, has no entry.
    """

    start_ns: int
    end_ns: int
    ways: Mapping[int, tuple[int, int, Way, Way]]


class Ways:
    """Queries paths at the start, at the end, and after each reported change, on its own thread."""

    def __init__(self, lab: Lab, connections: Callable[[], Sequence[Connection]]) -> None:
        self._lab = lab
        self._connections = connections
        self.asked: list[Asked] = []
        self.failure: str | None = None
        """Why the last failed query failed, or None."""
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ways of probes", daemon=True)

    def changed(self) -> None:
        """Report that something changed which paths may depend on. Any thread may call it; it does not block."""
        self._news.set()

    def open(self) -> None:
        """Make the first query, and start to follow changes."""
        self.ask()
        # Probing has just begun, and later changes are reported: the first answer holds from the beginning.
        self.asked[0] = replace(self.asked[0], start_ns=0, end_ns=0)
        self._thread.start()

    def close(self) -> None:
        """Make the last query, unless that is done."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(2 * ASK_S)

    def ask(self) -> None:
        """Query the paths now. A failed query is a gap: probes next to it have no known path."""
        start_ns, found = time.monotonic_ns(), {}
        connections = self._connections()
        try:
            found = _ways(self._lab, connections)
        except FaultbedError as error:
            self.failure = str(error)
        self.asked.append(Asked(start_ns=start_ns, end_ns=time.monotonic_ns(), ways=found))

    def _follow(self) -> None:
        closing = False
        while not closing:
            self._news.wait()
            self._news.clear()
            closing = self._closing.is_set()
            self.ask()
            self._closing.wait(SPACING_S)


def trips(echoes: Sequence[Echo], asked: Sequence[Asked]) -> tuple[tuple[Trip, ...], int]:
    """Return the probes with a known path, and the number of the others. The answers before and after must agree.

    Args:
        echoes: probes, in any order.
        asked: in order of time.

    Returns:
        Trips in the order of their start, and the number of probes whose path is not known.
    """
    found, place = [], 0
    ordered = sorted(echoes, key=lambda one: one.sent_ns)
    for one in ordered:
        while place + 1 < len(asked) and asked[place + 1].end_ns <= one.sent_ns:
            place += 1
        after = next((each for each in asked[place:] if each.start_ns > one.sent_ns), None)
        if after is None or asked[place].end_ns > one.sent_ns:
            continue
        way = asked[place].ways.get(one.connection)
        if way is not None and way == after.ways.get(one.connection):
            found.append(Trip(there=way[2], back=way[3], echo=one))
    return tuple(found), len(ordered) - len(found)


def _ways(lab: Lab, connections: Sequence[Connection]) -> dict[int, tuple[int, int, Way, Way]]:
    there, back = (ways(lab, each) for each in (connections, [_turned(one) for one in connections]))
    found = {}
    for one in connections:
        both = _between(there[one.index], one.src, one.dst), _between(back[one.index], one.dst, one.src)
        if all(both):
            found[one.index] = one.lqpn, one.rqpn, *both
    return found


def _between(way: Way, src: str, dst: str) -> Way:
    """Replace the hosts at the ends of a path by RNICs. Return nothing if it crosses no switch or ends at one."""
    if len(way) < 3 or way[-1] != dst.partition(":")[0]:  # noqa: PLR2004
        return ()
    return (src, *way[1:-1], dst)


def _turned(one: Connection) -> Connection:
    """Return the connection as its answers travel: from the other end, possibly over another spine."""
    return replace(one, src=one.dst, dst=one.src, src_ip=one.dst_ip, dst_ip=one.src_ip, lqpn=one.rqpn, rqpn=one.lqpn)
