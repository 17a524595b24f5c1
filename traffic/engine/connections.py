"""Establish the connections of a run, and rebuild a connection after a QP error.

Establishing a connection takes three requests to both of its ends. `qp`: create a QP and report it. `connect`: move the
QP to RTS. `go`: start to send. Every attempt has its own generation number. Messages about an older generation change
nothing; an error in one is still recorded.

Two tasks may have several connections between them. With `has_substitutes`, the data of a lost connection go over the
others: while another one is up, the lost one is rebuilt at intervals, without a deadline.

An episode begins with the first error of a connection. Further errors during the episode count as attempts. The episode
ends when data has completed on the new QPs. The run fails if that takes longer than the plan's `peer_deadline_s`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from faultbed.traffic.engine.run_results import Connection, QpError, Rebuild
from faultbed.traffic.engine.task_specs import ConnectionSpec, Plan

__all__ = ["ConnectionManager", "first_psn"]

RETRY_PAUSE_NS = 250_000_000
_GOLDEN = 5_184_445
"""2**23 divided by the golden ratio, rounded to an odd number: multiples of an odd number modulo 2**23 are distinct."""


class _ConnectionState:
    """State of one connection while it is established or rebuilt."""

    def __init__(self, spec: ConnectionSpec) -> None:
        self.spec = spec
        self.generation = -1
        self.ends: dict[str, dict[str, Any]] = {}
        self.joined: set[str] = set()
        self.is_up = False
        self.retry_ns: int | None = None
        self.episode: Rebuild | None = None
        self.connection: Connection | None = None


def first_psn(number: int) -> int:
    """Return the first PSN of the QP end with serial number `number`, which counts from 1.

    PSNs are multiples of 2**23 over the golden ratio, modulo 2**23. The first 2**23 - 1 ends get different PSNs, none
    of them 0. The PSNs of n ends are at least about 2**23 / (2.6 n) apart (three-distance theorem). A packet of a lost
    QP is therefore out of sequence for its replacement, and a capture can identify queue pairs by their PSNs. First
    PSNs use only the lower half of the PSN range, so that PSNs can count up without wrapping.
    """
    return number * _GOLDEN % (1 << 23)


class ConnectionManager:
    """Establishes and rebuilds the connections of a run. One thread calls it; any thread may read `connections`."""

    def __init__(
        self,
        plan: Plan,
        send: Callable[[str, Mapping[str, Any]], None],
        publish: Callable[..., None],
        *,
        ends_created: int = 0,
    ) -> None:
        self.qp_errors: list[QpError] = []
        self.rebuilds: list[Rebuild] = []
        self.failure: str | None = None
        self.progress_ns = time.monotonic_ns()
        self._plan = plan
        self._send = send
        self._publish = publish
        self._tasks = {task.name: task for task in plan.tasks}
        self._states = {spec.index: _ConnectionState(spec) for spec in plan.connections}
        self._lock = threading.Lock()
        self.ends_created = ends_created
        """Number of QP ends created so far, rebuilds and earlier connections of the run included."""

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The current connections in index order. A connection that is being rebuilt appears as it was before."""
        with self._lock:
            return tuple(state.connection for state in self._states.values() if state.connection is not None)

    @property
    def down(self) -> tuple[str, ...]:
        """Names of the connections that are not up."""
        return tuple(self._name(state) for state in self._states.values() if not state.is_up)

    @property
    def down_hosts(self) -> tuple[tuple[str, str], ...]:
        """The hosts at the ends of each connection that is not up."""
        return tuple(self._hosts(state) for state in self._states.values() if not state.is_up)

    @property
    def failing_hosts(self) -> tuple[tuple[str, str], ...]:
        """The hosts at the ends of each connection that was up and had an error since."""
        return tuple(self._hosts(state) for state in self._states.values() if state.episode is not None)

    @property
    def was_rebuilt(self) -> bool:
        """Whether any QP was lost so far."""
        return bool(self.rebuilds) or any(state.episode is not None for state in self._states.values())

    def establish_all(self) -> None:
        """Start to establish every connection."""
        for state in self._states.values():
            self._establish(state)

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
        for state in self._states.values():
            if state.retry_ns is not None and now_ns >= state.retry_ns:
                self._rebuild(state, now_ns)

    def record_open_episodes(self) -> None:
        """Record episodes that are still open when the run ends."""
        for state in self._states.values():
            if state.episode is not None:
                self.rebuilds.append(state.episode)
                state.episode = None

    def _establish(self, state: _ConnectionState) -> None:
        state.generation += 1
        state.ends, state.joined, state.is_up, state.retry_ns = {}, set(), False, None
        for task in (state.spec.src, state.spec.dst):
            self.ends_created += 1
            self._request(
                task, state, {"do": "qp", "psn": first_psn(self.ends_created), "flow_label": self._label(state)}
            )

    def _label(self, state: _ConnectionState) -> int:
        return state.spec.flow_label or self._tasks[state.spec.src].spec.get("qp", {}).get("flow_label", 0)

    def _request(self, task: str, state: _ConnectionState, message: dict[str, Any]) -> None:
        message |= {"task": task, "conn": state.spec.index, "generation": state.generation}
        self._send(self._tasks[task].endpoint.host, message)

    def _state_of(self, message: Mapping[str, Any]) -> _ConnectionState | None:
        state = self._states[message["conn"]]
        return state if state.generation == message["generation"] else None

    def _on_qp(self, message: Mapping[str, Any], _now_ns: int) -> None:
        state = self._state_of(message)
        if state is None:
            return
        state.ends[message["task"]] = message["end"]
        spec = state.spec
        if {spec.src, spec.dst} <= set(state.ends):
            with self._lock:
                state.connection = self._describe(state)
            for task, peer in ((spec.src, spec.dst), (spec.dst, spec.src)):
                self._request(task, state, {"do": "connect", "peer": state.ends[peer]})

    def _on_joined(self, message: Mapping[str, Any], now_ns: int) -> None:
        state = self._state_of(message)
        if state is None:
            return
        state.joined.add(message["task"])
        if state.joined != {state.spec.src, state.spec.dst}:
            return
        state.is_up = True
        for task in (state.spec.src, state.spec.dst):
            self._request(task, state, {"do": "go"})
        if state.episode is not None:
            state.episode = replace(state.episode, rebuilt_ns=now_ns)
            self.progress_ns = now_ns
            self._publish("rebuilt", now_ns, rebuild=state.episode, connection=self._describe(state))

    def _on_join_failed(self, message: Mapping[str, Any], now_ns: int) -> None:
        state = self._state_of(message)
        if state is not None and state.retry_ns is None:
            state.retry_ns = now_ns + RETRY_PAUSE_NS
            self._fail_if_late(state, now_ns, str(message.get("error")))

    def _on_qp_error(self, message: Mapping[str, Any], now_ns: int) -> None:
        state = self._states[message["conn"]]
        task = message["task"]
        other = state.spec.dst if task == state.spec.src else state.spec.src
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
        if self._state_of(message) is None:
            return  # the other end has reported the error already, and the rebuild is under way
        if not state.is_up:
            state.retry_ns = now_ns  # retry at once: the other end would wait for a QP that is lost
            return
        if state.episode is None:
            state.episode = Rebuild(
                connection=state.spec.index,
                src=self._tasks[state.spec.src].endpoint.name,
                dst=self._tasks[state.spec.dst].endpoint.name,
                error_ns=error.time_ns,
                rebuilt_ns=None,
                recovered_ns=None,
                attempts=0,
                reason=error.status,
            )
        state.is_up = False
        if state.episode.attempts and self._has_substitute(state):
            state.retry_ns = now_ns + RETRY_PAUSE_NS  # not urgent: its substitutes carry the data meanwhile
            return
        self._rebuild(state, now_ns)

    def _rebuild(self, state: _ConnectionState, now_ns: int) -> None:
        self._fail_if_late(state, now_ns, state.episode.reason if state.episode else "no connection")
        if self.failure is None:
            if state.episode is not None:
                state.episode = replace(state.episode, attempts=state.episode.attempts + 1)
            self._establish(state)

    def _on_redone(self, message: Mapping[str, Any], _now_ns: int) -> None:
        state = self._state_of(message)
        if state is not None and state.episode is not None:
            state.episode = replace(
                state.episode,
                redone_segments=state.episode.redone_segments + message["segments"],
                redone_bytes=state.episode.redone_bytes + message["size_bytes"],
            )

    def _on_recovered(self, message: Mapping[str, Any], now_ns: int) -> None:
        state = self._state_of(message)
        if state is None or state.episode is None:
            return
        self.rebuilds.append(replace(state.episode, recovered_ns=message["at_ns"]))
        state.episode = None
        self.progress_ns = now_ns

    def _fail_if_late(self, state: _ConnectionState, now_ns: int, reason: str) -> None:
        if self._has_substitute(state):
            return
        if state.episode is not None and now_ns - state.episode.error_ns > self._plan.peer_deadline_s * 1e9:
            self.failure = f"{self._name(state)}: unreachable for {self._plan.peer_deadline_s:.0f} s ({reason})"

    def _has_substitute(self, state: _ConnectionState) -> bool:
        """Return whether another connection between the same two tasks is up and can carry the data of this one."""
        ends = state.spec.src, state.spec.dst
        return state.spec.has_substitutes and any(
            other.is_up and other.episode is None
            for other in self._states.values()
            if other is not state and (other.spec.src, other.spec.dst) == ends
        )

    def _name(self, state: _ConnectionState) -> str:
        return f"{self._tasks[state.spec.src].endpoint.name} -> {self._tasks[state.spec.dst].endpoint.name}"

    def _hosts(self, state: _ConnectionState) -> tuple[str, str]:
        return self._tasks[state.spec.src].endpoint.host, self._tasks[state.spec.dst].endpoint.host

    def _describe(self, state: _ConnectionState) -> Connection:
        src, dst = self._tasks[state.spec.src].endpoint, self._tasks[state.spec.dst].endpoint
        local, remote = state.ends[state.spec.src], state.ends[state.spec.dst]
        spec = self._tasks[state.spec.src].spec
        return Connection(
            index=state.spec.index,
            src=src.name,
            dst=dst.name,
            src_ip=src.address,
            dst_ip=dst.address,
            lqpn=local["qpn"],
            rqpn=remote["qpn"],
            sq_psn=local["psn"],
            rq_psn=remote["psn"],
            generation=state.generation,
            flow_label=self._label(state),
            transport=spec.get("transport", "rc"),
        )
