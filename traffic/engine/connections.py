"""Establish the connections of a run, and rebuild a connection after a QP error.

A connection takes three rounds with both of its ends. `qp`: each end creates a QP and reports it. `connect`: each end
moves its QP to RTS. `go`: both ends may send. Every attempt has its own generation number. A message about an older
generation is recorded and otherwise ignored.

An episode begins with the first error of a connection. Errors during an episode count as further attempts. The episode
ends when data has completed on the new QPs. It is a failure if that takes longer than the plan's `peer_deadline_s`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from traffic.engine.run_results import Connection, QpError, Rebuild
from traffic.engine.task_specs import Cable, Plan

__all__ = ["Cabling", "first_psn"]

RETRY_PAUSE_NS = 250_000_000
_GOLDEN = 5_184_445
"""2**23 divided by the golden ratio, rounded to an odd number. Being odd, its multiples repeat only after 2**23."""


class _Link:
    """State of one connection while it is established or rebuilt."""

    def __init__(self, cable: Cable) -> None:
        self.cable = cable
        self.generation = -1
        self.ends: dict[str, dict[str, Any]] = {}
        self.joined: set[str] = set()
        self.is_up = False
        self.retry_ns: int | None = None
        self.episode: Rebuild | None = None
        self.described: Connection | None = None


def first_psn(made: int) -> int:
    """Return the first PSN of the QP end with serial number `made`, which counts from 1.

    The PSNs are multiples of 2**23 over the golden ratio. No two of 2**23 - 1 ends get the same PSN, and none gets 0.
    The PSNs of n ends are at least about 2**23 / 2.6 n apart (three-distance theorem). A packet of a lost QP is
    therefore out of sequence for its replacement, and a capture can identify queue pairs by their PSNs. Only the lower
    half of the PSN range is used, so that PSNs can count up without wrapping.
    """
    return made * _GOLDEN % (1 << 23)


class Cabling:
    """The connections of a run. One thread feeds it events; any thread may read `connections`."""

    def __init__(
        self, plan: Plan, send: Callable[[str, Mapping[str, Any]], None], publish: Callable[..., None]
    ) -> None:
        self.qp_errors: list[QpError] = []
        self.rebuilds: list[Rebuild] = []
        self.failure: str | None = None
        self.moved_ns = time.monotonic_ns()
        self._plan = plan
        self._send = send
        self._publish = publish
        self._tasks = {task.name: task for task in plan.tasks}
        self._links = {cable.index: _Link(cable) for cable in plan.cables}
        self._lock = threading.Lock()
        self._made = 0
        """Number of QP ends created so far, rebuilds included."""

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The current connections in index order. A connection that is being rebuilt appears as it was before."""
        with self._lock:
            return tuple(link.described for link in self._links.values() if link.described is not None)

    @property
    def down(self) -> tuple[str, ...]:
        """Names of the connections that are not up."""
        return tuple(self._name(link) for link in self._links.values() if not link.is_up)

    @property
    def was_rebuilt(self) -> bool:
        """Whether any QP was lost so far."""
        return bool(self.rebuilds) or any(link.episode is not None for link in self._links.values())

    def make_all(self) -> None:
        """Start to establish every connection."""
        for link in self._links.values():
            self._make(link)

    def handle(self, name: str, message: Mapping[str, Any], now_ns: int) -> None:
        """Handle an engine's event. Events that do not concern connections are ignored."""
        handlers = {
            "qp": self._on_qp,
            "joined": self._on_joined,
            "join_failed": self._on_join_failed,
            "qp_error": self._on_qp_error,
            "redone": self._on_redone,
            "recovered": self._on_recovered,
        }
        if name in handlers:
            handlers[name](message, now_ns)

    def retry_due(self, now_ns: int) -> None:
        """Retry the connections whose pause after a failed attempt is over."""
        for link in self._links.values():
            if link.retry_ns is not None and now_ns >= link.retry_ns:
                self._rebuild(link, now_ns)

    def settle(self) -> None:
        """Record episodes that are still open when the run ends."""
        for link in self._links.values():
            if link.episode is not None:
                self.rebuilds.append(link.episode)
                link.episode = None

    def _make(self, link: _Link) -> None:
        link.generation += 1
        link.ends, link.joined, link.is_up, link.retry_ns = {}, set(), False, None
        for task in (link.cable.src, link.cable.dst):
            self._made += 1
            self._tell(task, link, {"do": "qp", "psn": first_psn(self._made), "flow_label": self._label(link)})

    def _label(self, link: _Link) -> int:
        return link.cable.flow_label or self._tasks[link.cable.src].spec.get("qp", {}).get("flow_label", 0)

    def _tell(self, task: str, link: _Link, message: dict[str, Any]) -> None:
        message |= {"task": task, "conn": link.cable.index, "generation": link.generation}
        self._send(self._tasks[task].endpoint.host, message)

    def _link_of(self, message: Mapping[str, Any]) -> _Link | None:
        link = self._links[message["conn"]]
        return link if link.generation == message["generation"] else None

    def _on_qp(self, message: Mapping[str, Any], _now_ns: int) -> None:
        link = self._link_of(message)
        if link is None:
            return
        link.ends[message["task"]] = message["end"]
        cable = link.cable
        if {cable.src, cable.dst} <= set(link.ends):
            with self._lock:
                link.described = self._describe(link)
            for task, peer in ((cable.src, cable.dst), (cable.dst, cable.src)):
                self._tell(task, link, {"do": "connect", "peer": link.ends[peer]})

    def _on_joined(self, message: Mapping[str, Any], now_ns: int) -> None:
        link = self._link_of(message)
        if link is None:
            return
        link.joined.add(message["task"])
        if link.joined != {link.cable.src, link.cable.dst}:
            return
        link.is_up = True
        for task in (link.cable.src, link.cable.dst):
            self._tell(task, link, {"do": "go"})
        if link.episode is not None:
            link.episode = replace(link.episode, rebuilt_ns=now_ns)
            self.moved_ns = now_ns
            self._publish("rebuilt", now_ns, rebuild=link.episode, connection=self._describe(link))

    def _on_join_failed(self, message: Mapping[str, Any], now_ns: int) -> None:
        link = self._link_of(message)
        if link is not None and link.retry_ns is None:
            link.retry_ns = now_ns + RETRY_PAUSE_NS
            self._give_up_if_late(link, now_ns, str(message.get("error")))

    def _on_qp_error(self, message: Mapping[str, Any], now_ns: int) -> None:
        link = self._links[message["conn"]]
        task = message["task"]
        other = link.cable.dst if task == link.cable.src else link.cable.src
        error = QpError(
            time_ns=message["at_ns"],
            connection=message["conn"],
            endpoint=self._tasks[task].endpoint.name,
            peer=self._tasks[other].endpoint.name,
            qpn=message["qpn"],
            status=message["status"],
            generation=message["generation"],
        )
        self.qp_errors.append(error)
        self._publish("qp_error", now_ns, qp_error=error)
        if self._link_of(message) is None:
            return  # the other end reported it first, and the rebuild is under way
        if not link.is_up:
            link.retry_ns = now_ns  # the other end has not joined yet and would wait for this one
            return
        if link.episode is None:
            link.episode = Rebuild(
                connection=link.cable.index,
                src=self._tasks[link.cable.src].endpoint.name,
                dst=self._tasks[link.cable.dst].endpoint.name,
                error_ns=error.time_ns,
                rebuilt_ns=None,
                recovered_ns=None,
                attempts=0,
                reason=error.status,
            )
        link.is_up = False
        self._rebuild(link, now_ns)

    def _rebuild(self, link: _Link, now_ns: int) -> None:
        self._give_up_if_late(link, now_ns, link.episode.reason if link.episode else "no connection")
        if self.failure is None:
            if link.episode is not None:
                link.episode = replace(link.episode, attempts=link.episode.attempts + 1)
            self._make(link)

    def _on_redone(self, message: Mapping[str, Any], _now_ns: int) -> None:
        link = self._link_of(message)
        if link is not None and link.episode is not None:
            link.episode = replace(
                link.episode,
                redone_segments=link.episode.redone_segments + message["segments"],
                redone_bytes=link.episode.redone_bytes + message["size_bytes"],
            )

    def _on_recovered(self, message: Mapping[str, Any], now_ns: int) -> None:
        link = self._link_of(message)
        if link is None or link.episode is None:
            return
        self.rebuilds.append(replace(link.episode, recovered_ns=message["at_ns"]))
        link.episode = None
        self.moved_ns = now_ns

    def _give_up_if_late(self, link: _Link, now_ns: int, reason: str) -> None:
        if link.episode is not None and now_ns - link.episode.error_ns > self._plan.peer_deadline_s * 1e9:
            self.failure = f"{self._name(link)}: unreachable for {self._plan.peer_deadline_s:.0f} s ({reason})"

    def _name(self, link: _Link) -> str:
        return f"{self._tasks[link.cable.src].endpoint.name} -> {self._tasks[link.cable.dst].endpoint.name}"

    def _describe(self, link: _Link) -> Connection:
        src, dst = self._tasks[link.cable.src].endpoint, self._tasks[link.cable.dst].endpoint
        here, there = link.ends[link.cable.src], link.ends[link.cable.dst]
        spec = self._tasks[link.cable.src].spec
        return Connection(
            index=link.cable.index,
            src=src.name,
            dst=dst.name,
            src_ip=src.address,
            dst_ip=dst.address,
            lqpn=here["qpn"],
            rqpn=there["qpn"],
            sq_psn=here["psn"],
            rq_psn=there["psn"],
            generation=link.generation,
            flow_label=self._label(link),
            transport=spec.get("transport", "rc"),
        )
