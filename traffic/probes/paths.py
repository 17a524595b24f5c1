"""Which way each probe went, though ways change: the switches are asked now and then, and between two equal answers."""

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
"""Between two questions: changes that come sooner are asked about together."""

Way = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the switches said between two times (controller ns): ways there and back by connection, with its QPNs.

    A connection that had no way, or could not be asked about, is not there.
    """

    start_ns: int
    end_ns: int
    ways: Mapping[int, tuple[int, int, Way, Way]]


class Ways:
    """Asks at its beginning and end, and in between each time that it is told of a change, on a thread of its own."""

    def __init__(self, lab: Lab, connections: Callable[[], Sequence[Connection]]) -> None:
        self._lab = lab
        self._connections = connections
        self.asked: list[Asked] = []
        self.failure: str | None = None
        """Why ways could not be asked for, the last time that they could not."""
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ways of probes", daemon=True)

    def changed(self) -> None:
        """Something has changed that ways may depend on. From any thread, and at once."""
        self._news.set()

    def open(self) -> None:
        """Ask for the first time, and go on when there is news."""
        self.ask()
        # Who probes has just begun: what changed meanwhile was told, and is asked about next.
        self.asked[0] = replace(self.asked[0], start_ns=0, end_ns=0)
        self._thread.start()

    def close(self) -> None:
        """Ask for the last time, where that was not done."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(2 * ASK_S)

    def ask(self) -> None:
        """Ask now. What nobody can tell is a gap: probes beside it have no way."""
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
    """The probes whose way is known: the last answer before each and the first after it say the same. And the others.

    Args:
        echoes: probes, in any order.
        asked: in order of time.

    Returns:
        Trips by the time at which they began, and the number of probes whose way is not known.
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
    """A way with RNICs at its ends instead of hosts; none where it crosses no switch, or ends at one."""
    if len(way) < 3 or way[-1] != dst.partition(":")[0]:  # noqa: PLR2004
        return ()
    return (src, *way[1:-1], dst)


def _turned(one: Connection) -> Connection:
    """The same queue pair as its answers go: from the other end, which ECMP may send over another spine."""
    return replace(one, src=one.dst, dst=one.src, src_ip=one.dst_ip, dst_ip=one.src_ip, lqpn=one.rqpn, rqpn=one.lqpn)
