"""The path of each probe while paths change.

Switches are queried repeatedly. Between two queries with equal answers the path is known; otherwise it is unknown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.lab import Lab
from faultbed.testbed.stopping import STEP_S, Deadline
from faultbed.traffic.engine.run_results import Connection
from faultbed.traffic.probes.ecmp_entropy import QUERY_TIMEOUT_S, data_paths
from faultbed.traffic.probes.rtt import Echo, Trip

__all__ = ["PathQuery", "PathTracker", "trips"]

SPACING_S = 1.0
"""Minimum time between two queries. Changes that come sooner share one query."""

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathQuery:
    """The switches' answer to a query that ran from `start_ns` to `end_ns` (controller): paths by connection.

    Each entry holds both QPNs, the path there and the path back. A connection without a path, or without an answer, has
    no entry.
    """

    start_ns: int
    end_ns: int
    paths: Mapping[int, tuple[int, int, Path, Path]]


class PathTracker:
    """Queries paths at the start, at the end, and after each reported change, on its own thread."""

    def __init__(self, lab: Lab, connections: Callable[[], Sequence[Connection]]) -> None:
        self._lab = lab
        self._connections = connections
        self.queries: list[PathQuery] = []
        self.failure: str | None = None
        """Why the last failed query failed, or None."""
        self._change_reported = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="paths of probes", daemon=True)

    def report_change(self) -> None:
        """Report that paths may have changed, so that they are queried again.

        Any thread may call this; it does not block.
        """
        self._change_reported.set()

    def open(self) -> None:
        """Make the first query, and start to follow changes."""
        self.query()
        # Probing has just begun, and every later change is reported: the first answer is valid from the beginning.
        self.queries[0] = replace(self.queries[0], start_ns=0, end_ns=0)
        self._thread.start()

    def close(self) -> None:
        """Make the last query and stop. Safe to call twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._change_reported.set()
        if self._thread.ident is not None:
            Deadline(2 * QUERY_TIMEOUT_S).join(self._thread)

    def query(self) -> None:
        """Query the paths now. A failed query is a gap: probes next to it have no known path."""
        start_ns, paths = time.monotonic_ns(), {}
        connections = self._connections()
        try:
            paths = _current_paths(self._lab, connections)
        except FaultbedError as error:
            self.failure = str(error)
        self.queries.append(PathQuery(start_ns=start_ns, end_ns=time.monotonic_ns(), paths=paths))

    def _follow(self) -> None:
        closing = False
        while not closing:
            if not self._change_reported.wait(STEP_S):
                continue
            self._change_reported.clear()
            closing = self._closing.is_set()
            self.query()
            self._closing.wait(SPACING_S)


def trips(echoes: Sequence[Echo], queries: Sequence[PathQuery]) -> tuple[tuple[Trip, ...], int]:
    """Return the probes with a known path, and the number of the others.

    The path of a probe is known if the queries before and after it have the same answer.

    Args:
        echoes: probes, in any order.
        queries: answers of the switches, in order of time.

    Returns:
        Trips in the order of their start, and the number of probes whose path is not known.
    """
    known, index = [], 0
    ordered = sorted(echoes, key=lambda echo: echo.sent_ns)
    for echo in ordered:
        while index + 1 < len(queries) and queries[index + 1].end_ns <= echo.sent_ns:
            index += 1
        after = next((query for query in queries[index:] if query.start_ns > echo.sent_ns), None)
        if after is None or queries[index].end_ns > echo.sent_ns:
            continue
        path = queries[index].paths.get(echo.connection)
        if path is not None and path == after.paths.get(echo.connection):
            known.append(Trip(there=path[2], back=path[3], echo=echo))
    return tuple(known), len(ordered) - len(known)


def _current_paths(lab: Lab, connections: Sequence[Connection]) -> dict[int, tuple[int, int, Path, Path]]:
    forward, backward = (
        data_paths(lab, connections_one_way)
        for connections_one_way in (connections, [_reversed(connection) for connection in connections])
    )
    both_ways = {}
    for connection in connections:
        pair_of_paths = (
            _between(forward[connection.index], connection.src, connection.dst),
            _between(backward[connection.index], connection.dst, connection.src),
        )
        if all(pair_of_paths):
            both_ways[connection.index] = connection.lqpn, connection.rqpn, *pair_of_paths
    return both_ways


def _between(path: Path, src: str, dst: str) -> Path:
    """Replace the hosts at the ends of a path by RNICs. Return nothing if it crosses no switch or ends at one."""
    if len(path) < 3 or path[-1] != dst.partition(":")[0]:  # noqa: PLR2004
        return ()
    return (src, *path[1:-1], dst)


def _reversed(connection: Connection) -> Connection:
    """Return the connection as its answers travel: from the other end, possibly over another spine."""
    return replace(
        connection,
        src=connection.dst,
        dst=connection.src,
        src_ip=connection.dst_ip,
        dst_ip=connection.src_ip,
        lqpn=connection.rqpn,
        rqpn=connection.lqpn,
    )
