"""Run programs on hosts: start their roles in order, follow their queue pairs, end them in time, and collect results.

The measured work starts with the first progress of any process, not with the processes: often a single one reports what
all of them do. Programs that end without any have no measured work.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from faultbed.testbed.errors import LabError, UsageError
from faultbed.traffic.engine.engine_client import Engines, TrafficLab, endpoint
from faultbed.traffic.engine.run_results import Connection, Endpoint, Sample
from faultbed.traffic.engine.running_traffic import SETUP_TIMEOUT_S, OnEvent, Running
from faultbed.traffic.engine.samples import BIN_NS, iterations_of, samples_of
from faultbed.traffic.engine.task_specs import Plan, TaskPlan
from faultbed.traffic.programs.command_spec import CommandSpec, Role
from faultbed.traffic.programs.foreign_connections import Connections
from faultbed.traffic.programs.program_results import OutputLine, ProgramEnd, ProgramsResult

__all__ = ["RunningPrograms", "start", "values_of"]

_NOT_STARTED = (126, 127)
"""Exit codes with which a shell reports that it could not start a program (POSIX, XCU 2.8.2)."""
_GRACE_S = 60.0


class RunningPrograms(Running[ProgramsResult]):
    """Programs that run. Create it with `start`."""

    def __init__(
        self, engines: Engines, spec: CommandSpec, ends: tuple[Endpoint, ...], on_event: OnEvent | None
    ) -> None:
        self._spec = spec
        self._ends_of_ranks = ends
        self._role_of = tuple(role for role in spec.roles for _ in role.rnics)
        self._task_names = tuple(f"{role.name}{rank}" for rank, role in enumerate(self._role_of))
        self._rank = {name: rank for rank, name in enumerate(self._task_names)}
        self._made: set[str] = set()
        self._ready: set[str] = set()
        self._begun: set[str] = set()
        self._foreign = Connections(ends)
        self._program_ends: list[ProgramEnd] = []
        self._output: dict[str, list[OutputLine]] = {name: [] for name in self._task_names}
        self._is_ending = False
        self.not_started: str | None = None
        """Why a program could not be started; None: all were."""
        super().__init__(engines, self._plan(), lambda _: self._result_of_run(), on_event, owns_engines=True)

    def _plan(self) -> Plan:
        tasks = [
            TaskPlan(
                name=name,
                kind="program",
                endpoint=self._ends_of_ranks[rank],
                spec=_task_spec(self._spec, role, rank, self._ends_of_ranks),
                active=True,
            )
            for rank, (name, role) in enumerate(zip(self._task_names, self._role_of, strict=True))
        ]
        programs = ", ".join(dict.fromkeys(role.words[0].split()[0] for role in self._spec.roles))
        return Plan(
            what=programs,
            tasks=tuple(tasks),
            connections=(),
            peer_deadline_s=self._spec.timeout_s,
            stall_deadline_s=self._spec.timeout_s + _GRACE_S,
        )

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The queue pairs that the programs have now."""
        return self._foreign.now

    def _prepare(self) -> None:
        super()._prepare()
        names = set(self._task_names)
        if not self._handle_events_until(
            lambda: self._made == names,
            SETUP_TIMEOUT_S,
            lambda: f"no answer after {SETUP_TIMEOUT_S:.0f} s: {', '.join(sorted(names - self._made))}",
        ):
            raise LabError(f"{self.plan.what} did not start: {self.failure}")

    def _begin_task(self, task: TaskPlan) -> None:
        """Start a process; those of a later role follow when all of the roles before it are ready."""
        if self._role_of[self._rank[task.name]] is self._spec.roles[0]:
            self._begun.add(task.name)
            super()._begin_task(task)

    def _begin_next(self) -> None:
        for role in self._spec.roles:
            names = [name for name in self._task_names if self._role_of[self._rank[name]] is role]
            for name in names:
                if name not in self._begun and not self._is_ending:
                    self._begun.add(name)
                    super()._begin_task(self._tasks[name])
            if not set(names) <= self._ready:
                return

    def _check_connections(self, now_ns: int) -> None:
        """End the programs when their time is over, and those that serve when nothing is left to serve."""
        if not self.began_ns:
            return
        duration_s = self._spec.duration_s
        if duration_s is not None and not self._warming_up and now_ns - self.started_ns > duration_s * 1e9:
            self._end_all()
        serving = {name for name in self._task_names if self._role_of[self._rank[name]].serves}
        if set(self._task_names) - serving <= set(self.done):
            self._end_all()

    def _end_all(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self.stop()

    def _on_task(self, message: Mapping[str, Any], _host: str, _now_ns: int) -> None:
        self._made.add(message["task"])

    def _on_ready(self, message: Mapping[str, Any], _host: str, _now_ns: int) -> None:
        self._ready.add(message["task"])
        self._begin_next()

    def _on_warm(self, message: Mapping[str, Any], _host: str, now_ns: int) -> None:
        """Handle the first progress of a process, or its end without any."""
        self._progress_ns = now_ns
        if message["has_progress"] and self._warming_up:
            self.started_ns = message["at_ns"]
            self._warming_up.clear()
            self._publish("ready", self.started_ns)
        self._warming_up.discard(message["task"])

    def _on_output(self, message: Mapping[str, Any], host: str, _now_ns: int) -> None:
        offset_ns = self._engines.offsets[host].offset_ns
        self._output[message["task"]] += [
            OutputLine(time_ns=at_ns + offset_ns, attempt=message["attempt"], stream=stream, text=text)
            for at_ns, stream, text in message["lines"]
        ]

    def _on_queue_pairs(self, message: Mapping[str, Any], _host: str, now_ns: int) -> None:
        self._foreign.update(self._rank[message["task"]], message["listed"])
        self._publish("qps", now_ns, connections=list(self.connections))

    def _on_ended(self, message: Mapping[str, Any], host: str, now_ns: int) -> None:
        rank = self._rank[message["task"]]
        end = ProgramEnd(
            rank=rank,
            role=self._role_of[rank].name,
            rnic=self._ends_of_ranks[rank].name,
            attempt=message["attempt"],
            start_ns=message["start_ns"],
            end_ns=message["at_ns"],
            code=message["code"],
            stopped=message["stopped"],
            timed_out=message["timed_out"],
            left=message["left"],
            removed=message["removed"],
            cut_bytes=message["cut_bytes"],
        )
        self._program_ends.append(end)
        self._progress_ns = now_ns
        if end.code in _NOT_STARTED and end.attempt == 1 and message["task"] in self._warming_up:
            said = [line.text for line in self._output[message["task"]][-1:]]
            self.not_started = f"{host}: {end.role} could not be started: {'; '.join(said) or f'exit code {end.code}'}"
            self.failure = self.failure or self.not_started

    def _on_error(self, message: Mapping[str, Any], host: str, now_ns: int) -> None:
        super()._on_error(message, host, now_ns)
        self.not_started = self.not_started or self.failure

    def _result_of_run(self) -> ProgramsResult:
        resolution_ns = max((message.get("resolution_ns", 0) for message in self.done.values()), default=0)
        bins = max(1, -(-resolution_ns // BIN_NS))
        return ProgramsResult(
            outcome=self.outcome,
            where=self.failure,
            ranks=tuple(end.name for end in self._ends_of_ranks),
            samples=tuple(_merged(samples_of(self, {name}), bins) for name in self._task_names),
            iterations=tuple(iterations_of(self, name) for name in self._task_names),
            resolution_ns=bins * BIN_NS,
            connections=self._foreign.all_seen,
            ends=tuple(self._program_ends),
            output={name: tuple(lines) for name, lines in self._output.items()},
            clock_error_ns=self.clock_error_ns,
        )


def start(lab: TrafficLab, spec: CommandSpec, on_event: OnEvent | None = None) -> RunningPrograms:
    """Start programs on a lab, and wait for their first progress.

    Raises:
        UsageError: the spec names an RNIC that the lab does not have; nothing was started.
        LabError: a program could not be started; nothing is left running.
    """
    ends = tuple(endpoint(lab.topology, rnic) for rnic in spec.rnics)
    if not ends:
        raise UsageError("no role has an RNIC; name one, such as host1:rxe0")
    engines = Engines.start(lab, dict.fromkeys(end.host for end in ends))
    try:
        running = RunningPrograms(engines, spec, ends, on_event)
        running._start()  # noqa: SLF001  # `start` is the constructor of `RunningPrograms`
    except BaseException:
        engines.close()
        raise
    if running.not_started is not None:
        with running:
            pass
        raise LabError(f"{running.plan.what}: {running.not_started}")
    return running


def values_of(spec: CommandSpec, role: Role, rank: int, ends: tuple[Endpoint, ...]) -> dict[str, str]:
    """Return the values of the placeholders of one process, except those that its host knows."""
    first = {name: ends[index].address for name, index in _first_ranks(spec).items()}
    return {
        **first,
        "rnic": ends[rank].rnic,
        "addr": ends[rank].address,
        "role": role.name,
        "rank": str(rank),
        "world": str(len(ends)),
        "hosts": ",".join(end.address for end in ends),
    }


def _first_ranks(spec: CommandSpec) -> dict[str, int]:
    first, rank = {}, 0
    for role in spec.roles:
        first[role.name] = rank
        rank += len(role.rnics)
    return first


def _task_spec(spec: CommandSpec, role: Role, rank: int, ends: tuple[Endpoint, ...]) -> dict[str, Any]:
    return {
        "words": list(role.words),
        "values": values_of(spec, role, rank, ends),
        "shell": spec.shell,
        "environment": dict(spec.environment),
        "directory": spec.directory,
        "files": {name: base64.b64encode(content).decode() for name, content in spec.files.items()},
        "progress": spec.progress,
        "warmup": 1,
        "restart": spec.restart,
        "attempts": spec.attempts,
        "timeout_ms": round(spec.timeout_s * 1000),
        "ready_ms": round(spec.ready_s * 1000),
    }


def _merged(samples: tuple[Sample, ...], bins: int) -> tuple[Sample, ...]:
    """Return samples of `bins` bins each: a program that reports once a second says nothing about 100 ms."""
    length_ns = bins * BIN_NS
    size_of: dict[int, int] = {}
    for sample in samples:
        start_ns = sample.start_ns // length_ns * length_ns
        size_of[start_ns] = size_of.get(start_ns, 0) + sample.size_bytes
    return tuple(
        Sample(
            endpoint=samples[0].endpoint,
            start_ns=start_ns,
            duration_ns=length_ns,
            size_bytes=size,
            task=samples[0].task,
        )
        for start_ns, size in sorted(size_of.items())
    )
