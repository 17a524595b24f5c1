"""Run a job that restarts after the loss of a rank: execute the phases of the state machine in `machine`.

A loss is detected when the channel to an engine ends, when an engine is silent
(`faultbed.traffic.workloads.elastic.loss`), when a connection stays down, or when a rank reports an error. Engines of
spares run from the start, because starting an engine takes longest.

All of this runs on the thread of `Running`, except for the setup of the first placement.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from faultbed.testbed.errors import FaultbedError, LabError
from faultbed.testbed.model.selectors import select
from faultbed.traffic.engine.connections import ConnectionManager
from faultbed.traffic.engine.engine_client import GONE, Engines, Event, TrafficLab, endpoint
from faultbed.traffic.engine.engine_client import START_TIMEOUT_S as ENGINE_START_TIMEOUT_S
from faultbed.traffic.engine.run_results import Endpoint, Outcome, QpError, Rebuild
from faultbed.traffic.engine.running_traffic import SETUP_TIMEOUT_S, OnEvent, Running
from faultbed.traffic.engine.task_specs import Plan, TaskPlan
from faultbed.traffic.schedules import Program
from faultbed.traffic.workloads import job
from faultbed.traffic.workloads import storage_service as storage
from faultbed.traffic.workloads.elastic import loss, machine
from faultbed.traffic.workloads.elastic.elastic_results import ElasticResult, Restart
from faultbed.traffic.workloads.elastic.finish import result_of
from faultbed.traffic.workloads.elastic.machine import JobState, host_of
from faultbed.traffic.workloads.elastic.placement import reschedule
from faultbed.traffic.workloads.elastic.rejoin import start_engine
from faultbed.traffic.workloads.elastic.resilience import Resilience, check_on_lab
from faultbed.traffic.workloads.elastic.state_history import StateHistory
from faultbed.traffic.workloads.job import JobSpec
from faultbed.traffic.workloads.ranks import gpus_of, rank_of, rank_plan, task_name
from faultbed.traffic.workloads.storage_service import StorageServer

__all__ = ["ElasticRunning", "longest_restarts_s", "start"]

START_TIMEOUT_S = 120.0
"""How long a restart waits for the ranks to restore their state, or to finish their first iteration, in seconds."""
FORGET_NS = 20_000_000_000
"""How long the remaining engines have to release their tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One placement of a job: its spec, the RNIC of each rank, each rank's program, and each phase's algorithm."""

    spec: JobSpec
    ranks: tuple[Endpoint, ...]
    programs: list[Program]
    algorithms: tuple[str, ...]


class ElasticRunning(Running[ElasticResult]):
    """A job that continues after losses. Create it with `start`."""

    def __init__(
        self,
        lab: TrafficLab,
        engines: Engines,
        first: Placement,
        resilience: Resilience,
        server: StorageServer,
        on_event: OnEvent | None,
        began_ns: int,
    ) -> None:
        spec = first.spec
        self._lab, self._server, self._resilience = lab, server, resilience
        self._spec, self._algorithms = spec, first.algorithms
        self._programs: dict[int, list[Program]] = {0: first.programs}
        self._job = machine.begin(
            total=spec.iterations,
            grid=spec.grid,
            ranks=tuple(rank.name for rank in first.ranks),
            spares=resilience.spares,
        )
        self.restarts: list[Restart] = []
        self.states: dict[int, dict[str, Any]] = {}
        self._done_by_task: dict[str, int] = {}
        self._resumes: dict[str, dict[str, Any]] = {}
        self._history = StateHistory()
        self._restored: set[str] = set()
        self._broken_gpus: set[str] = set()
        """Hosts whose GPU failed a rank of the present placement."""
        self._past_errors: list[QpError] = []
        self._past_rebuilds: list[Rebuild] = []
        self._pinged_ns = self._last_progress_ns = 0
        self._is_ending = False
        self._has_tasks = True
        """Whether the engines have the tasks of the plan. Between two placements they have none."""
        self._connected_ns, self._began_ns = 0, began_ns
        super().__init__(
            engines,
            self._plan_of(spec, first.ranks, first.programs),
            lambda _: self._result_of_run(),
            on_event,
            owns_engines=True,
            services=(server,),
        )

    # Interface for the harness.

    @property
    def job(self) -> JobState:
        """The state of the job."""
        return self._job

    @property
    def spec(self) -> JobSpec:
        """The job on its present placement."""
        return self._spec

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithm of each phase on the present placement."""
        return self._algorithms

    @property
    def qp_errors(self) -> tuple[QpError, ...]:
        """Every QP that was lost so far, on any placement."""
        return (*self._past_errors, *self._manager.qp_errors)

    @property
    def rebuilds(self) -> tuple[Rebuild, ...]:
        """Rebuilds of all placements."""
        return (*self._past_rebuilds, *self._manager.rebuilds)

    @property
    def outcome(self) -> Outcome:
        """The outcome; `recovered` also if the job was restarted."""
        return "recovered" if self.failure is None and self._job.restarts else super().outcome

    @property
    def initialised_ns(self) -> int:
        """Nanoseconds from the start of the storage server until the first placement was connected."""
        return self._connected_ns

    def stop(self) -> None:
        """Request an orderly end. A loss after this request ends the run instead of restarting the job."""
        self._is_ending = True
        super().stop()

    def _result_of_run(self) -> ElasticResult:
        """Enter the phase `finished`, or `failed` if the run has failed, and build the result."""
        if self._job.phase not in machine.ENDS:
            event = machine.Ended() if self.failure is None else machine.Impossible(reason=self.failure)
            self._job = machine.step(self._job, event, self._resilience.policy)
        return result_of(self)

    # Events.

    def _handle(self, event: Event, now_ns: int) -> None:
        if event.host not in self._hosts() and event.name not in (GONE, "abort"):
            return  # the event belongs to an earlier placement
        message = {**event.message, "generation_of_job": self._job.generation}
        super()._handle(Event(host=event.host, message=message), now_ns)

    def _request_flights(self) -> set[str]:
        return super()._request_flights() if self._has_tasks else set()

    def _hosts(self) -> set[str]:
        return {task.endpoint.host for task in self.plan.tasks}

    def _on_gone(self, message: Mapping[str, Any], host: str, now_ns: int) -> None:
        if host in self._hosts():
            super()._on_gone(message, host, now_ns)
            return
        self._engines.drop(host)
        spares = tuple(name for name in self._job.spares if host_of(name) != host)
        self._job = replace(self._job, spares=spares)
        self._publish("spare_lost", now_ns, host=host)

    def _on_abort(self, message: Mapping[str, Any], host: str, now_ns: int) -> None:
        if not self._is_ending and self._job.phase != "failed":
            self.failure = None  # a restart could repair an earlier failure: the abort ends the run
        self._is_ending = True
        super()._on_abort(message, host, now_ns)

    def _on_iteration(self, message: Mapping[str, Any], host: str, now_ns: int) -> None:
        super()._on_iteration(message, host, now_ns)
        self._done_by_task[message["task"]] = message["index"] + 1
        finished = min(self._done_by_task.get(task.name, 0) for task in self.plan.tasks)
        if self._job.is_iterating and finished > self._job.finished:
            self._last_progress_ns = now_ns
            before = self._job.phase
            self._job = machine.step(self._job, machine.Progress(finished=finished), self._resilience.policy)
            if before == "catch_up" and self._job.phase == "running":
                self._caught_up(now_ns)

    def _caught_up(self, now_ns: int) -> None:
        self._update_restart(caught_up_ns=now_ns)
        self._publish("restart", now_ns, phase="running", restart=self.restarts[-1])

    def _on_restored(self, message: Mapping[str, Any], _host: str, now_ns: int) -> None:
        self._progress_ns = now_ns
        self._restored.add(message["task"])

    def _on_error(self, message: Mapping[str, Any], host: str, now_ns: int) -> None:
        super()._on_error(message, host, now_ns)
        if message.get("part") == "gpu":
            self._broken_gpus.add(host)

    def _on_state(self, message: Mapping[str, Any], _host: str, now_ns: int) -> None:
        self._progress_ns = now_ns
        self.states[rank_of(message["task"])] = dict(message)

    def _on_warm(self, message: Mapping[str, Any], host: str, now_ns: int) -> None:
        if message["wrong"]:
            self._is_ending = True  # wrong results are no loss: a restart would only hide them
        if self._warming_up or message["wrong"]:
            super()._on_warm(message, host, now_ns)
        self._progress_ns = now_ns  # a job that restarts without a checkpoint warms up again, but starts only once

    def _check_connections(self, now_ns: int) -> None:
        super()._check_connections(now_ns)
        hosts = self._hosts()
        if now_ns - self._pinged_ns > loss.PING_NS:
            self._pinged_ns = now_ns
            for host in hosts:
                self._engines.ping(host)
        silent = loss.silent_hosts(
            self._engines.heard_ns,
            hosts - self._dead_hosts,
            now_ns,
            failing={host for ends in self._manager.failing_hosts for host in ends},
            is_starting=not self.started_ns or self._job.phase == "initialise",
        )
        for host, silent_ns in silent.items():
            self._dead_hosts.add(host)
            self.failure = self.failure or f"{host}: no message from its traffic engine for {silent_ns / 1e9:.1f} s"

    # Start.

    def _plan_of(self, spec: JobSpec, ranks: tuple[Endpoint, ...], programs: list[Program]) -> Plan:
        assert spec.storage is not None  # noqa: S101  # `resilience.check`
        return rank_plan(
            f"job of {len(ranks)} ranks",
            spec,
            ranks,
            programs,
            iterations=spec.iterations,
            gpus=gpus_of(self._lab, spec, ranks),
            storage=self._server.client_spec(spec.storage, len(ranks), generation=self._job.generation),
        )

    def _prepare(self) -> None:
        super()._prepare()
        self._connected_ns = self._connected_ns or time.monotonic_ns() - self._began_ns

    def _start_fields(self, task: TaskPlan) -> Mapping[str, Any]:
        rank = rank_of(task.name)
        resume = self._resumes.get(task.name)
        history = self._history.of_rank(rank, self._job, self._programs, warmup=self._spec.warmup)
        return {"history": history, **({"resume": resume} if resume else {})}

    # Recovery.

    def _recover(self) -> bool:
        """Restart the job after a loss; return whether it runs again.

        A loss during the restart begins another restart. The job ends if `machine` allows no further one, or if the run
        is to end.
        """
        noticed_ns = time.monotonic_ns()
        reason = self.failure or ""
        if self._is_ending:
            return False
        actions: Mapping[str, Callable[[], machine.Event]] = {
            "diagnose": self._diagnose,
            "reschedule": self._reschedule,
            "initialise": self._initialise,
            "restore": self._restore,
        }
        self._begin_restart(reason, noticed_ns)
        while self._job.phase in actions:
            self.failure = None
            phase = self._job.phase
            self._publish("restart", time.monotonic_ns(), phase=phase, restart=self.restarts[-1])
            try:
                event = actions[phase]()
            except FaultbedError as error:
                event = machine.Lost(reason=f"{error} (restart {len(self.restarts)}, phase {phase})")
            if self._is_ending:
                event = machine.Impossible(reason=self._reason_of_end())
            if isinstance(event, machine.Lost):
                self._begin_restart(event.reason, time.monotonic_ns())
            else:
                self._job = machine.step(self._job, event, self._resilience.policy)
        if self._job.phase == "failed":
            self.failure = self._job.reason
            return False
        self.failure = None
        self._progress_ns = time.monotonic_ns()
        if self._job.phase == "running":
            self._caught_up(self._progress_ns)
        else:
            self._publish("restart", self._progress_ns, phase=self._job.phase, restart=self.restarts[-1])
        return True

    def _reason_of_end(self) -> str:
        return self.failure or "the run was stopped during a restart"

    def _begin_restart(self, reason: str, noticed_ns: int) -> None:
        """Enter `diagnose`, and record a new restart. Its cause is `rank` until `_diagnose` has found it."""
        self._job = machine.step(self._job, machine.Lost(reason=reason), self._resilience.policy)
        self.restarts.append(
            Restart(
                number=len(self.restarts) + 1,
                reason=reason,
                cause="rank",
                hosts=(),
                before=self._job.ranks,
                progress_ns=self._last_progress_ns or self.started_ns,
                noticed_ns=noticed_ns,
                iterations=self._job.finished,
            )
        )

    def _update_restart(self, **fields: Any) -> None:
        self.restarts[-1] = replace(self.restarts[-1], **fields)

    def _diagnose(self) -> machine.Event:
        """Determine the cause of the loss and the lost hosts.

        A host is lost if its engine is gone, or does not reply to a ping within `loss.SILENT_AFTER_ERROR_NS`. The cause
        is `process` if all lost hosts still run commands, else `host`. Without a lost host the cause is `gpu` if a GPU
        of a rank is gone or failed, `network` if a connection stays down, `storage` if the server does not answer, and
        otherwise `rank`. With `gpu` the rank's host is lost, too: it is to be drained
        (`faultbed.testbed.observe.gpu_thresholds`). With `network` the lost host is the one that most failed
        connections share.
        """
        pings = {host: self._engines.ping(host) for host in self._hosts() - self._dead_hosts}
        deadline_ns = time.monotonic_ns() + loss.SILENT_AFTER_ERROR_NS

        def silent() -> set[str]:
            late = {host for host, number in pings.items() if self._engines.answered.get(host, 0) < number}
            return late - self._dead_hosts

        while silent() and time.monotonic_ns() < deadline_ns and not self._is_ending:
            # Handling a connection's error sends requests to both of its ends, which fails if one is gone. The pings
            # show that as well.
            with contextlib.suppress(LabError):
                self._handle_next_event(deadline_ns)
        if self._is_ending:
            return machine.Impossible(reason=self._reason_of_end())
        self._dead_hosts |= silent()
        dead = tuple(sorted(self._dead_hosts & {*self._hosts(), *self._engines.hosts}))
        broken = self._broken_gpus & self._hosts()
        cause: machine.Cause = "rank"
        if dead:
            cause = "process" if all(loss.accepts_commands(self._lab, host) for host in dead) else "host"
        elif broken:
            cause = "gpu"
        elif self._manager.failure is not None:
            dead, cause = loss.most_cut_off(self._manager.down_hosts), "network"
        elif not self._storage_answers():
            cause = "storage"
        lost = tuple(sorted({*dead, *broken}))
        self._update_restart(cause=cause, hosts=lost, diagnosed_ns=time.monotonic_ns())
        return machine.Diagnosed(cause=cause, hosts=lost)

    def _storage_answers(self) -> bool:
        try:
            self._server.ping()
        except FaultbedError:
            return False
        return True

    def _reschedule(self) -> machine.Event:
        """Choose the next placement, and stop the tasks of the remaining ranks.

        If there is no placement, the tasks stay: their flight recorders are collected at the end of the run.
        """
        event = reschedule(self._job, self._resilience.policy, self._lab.topology, self._cut_links())
        if isinstance(event, machine.Impossible):
            return event
        self._archive_connection_records()
        for host in self._job.lost_hosts:
            self._engines.drop(host)
        self._release_tasks()
        self._update_restart(after=event.ranks, rescheduled_ns=time.monotonic_ns())
        return event

    def _cut_links(self) -> frozenset[str]:
        """Return the links that are down, by the switches and the hosts of the spares; none if there is no choice."""
        hosts = {host_of(spare) for spare in self._job.spares}
        if len(hosts) < 2:  # noqa: PLR2004
            return frozenset()
        return self._lab.down_links([*self._lab.topology.switch_by_name, *hosts], timeout_s=loss.PROBE_S)

    def _archive_connection_records(self) -> None:
        """Move QP errors and rebuilds of the old placement to the run's history.

        The old connection manager then has none, so `qp_errors` and `rebuilds` return each of them once.
        """
        self._manager.record_open_episodes()
        self._past_errors += self._manager.qp_errors
        self._past_rebuilds += self._manager.rebuilds
        self._manager.qp_errors, self._manager.rebuilds = [], []

    def _release_tasks(self) -> None:
        """Make the remaining engines release their tasks.

        Raises:
            LabError: an engine is gone, or does not answer in time; its host counts as lost.
        """
        self._has_tasks = False
        pending = set(self._engines.hosts)
        for host in pending:
            try:
                self._engines.send(host, {"do": "forget"})
            except FaultbedError as error:
                self._dead_hosts.add(host)
                raise LabError(f"{host}: {error}") from error
        deadline_ns = time.monotonic_ns() + FORGET_NS
        while pending:
            event = self._engines.next(deadline_ns)
            if event is None or (event.name == GONE and event.host in self._hosts()):
                lost = pending if event is None else {event.host}
                self._dead_hosts |= lost
                raise LabError(f"{', '.join(sorted(lost))}: the traffic engine did not release its tasks")
            if event.name in (GONE, "abort", "sample", "iteration", "stored"):
                self._handle(event, time.monotonic_ns())
            if event.name in (GONE, "forgotten"):
                pending.discard(event.host)
            if self._is_ending:
                return

    def _initialise(self) -> machine.Event:
        """Start the engines that do not run yet, create the tasks and connect them."""
        self._dead_hosts.clear()
        self._broken_gpus.clear()
        spec = replace(self._spec, grid=self._job.grid, ranks=self._job.ranks)
        ranks, programs, algorithms = job.fit(self._lab, spec)
        self._spec, self._algorithms = spec, algorithms
        self._programs[self._job.generation] = programs
        self.plan = self._plan_of(spec, ranks, programs)
        self._tasks = {task.name: task for task in self.plan.tasks}
        if self._warming_up:
            self._warming_up = set(self._tasks)
        self.done.clear()
        self.states.clear()
        self._done_by_task.clear()
        self._restored.clear()
        self._manager = ConnectionManager(
            self.plan, self._engines.send, self._publish, ends_created=self._manager.ends_created
        )
        try:
            self._start_engines({rank.host for rank in ranks})
        except LabError as error:
            if self._resilience.policy.restart != "same":
                raise
            return machine.Impossible(reason=f"{error}; the job waited {self._resilience.rejoin_s:g} s for its host")
        now_ns = time.monotonic_ns()
        self._engines.heard_ns.update({rank.host: now_ns for rank in ranks})  # spares were not pinged so far
        self._has_tasks = True
        self._prepare()
        self._update_restart(connections=len(self.plan.connections), initialised_ns=time.monotonic_ns())
        return machine.Initialised()

    def _start_engines(self, hosts: set[str]) -> None:
        """Start missing engines. With `restart = same` a lost host may take long to come back.

        Raises:
            LabError: an engine did not start in time; its host counts as lost.
        """
        deadline = time.monotonic() + _rejoin_s(self._resilience)
        for host in sorted(hosts - set(self._engines.hosts)):
            rnics = {task.endpoint for task in self.plan.tasks if task.endpoint.host == host}
            patience_s = max(0.0, deadline - time.monotonic())
            try:
                start_engine(self._lab, self._engines, host, rnics, patience_s=patience_s, pause=self._pause)
            except LabError:
                self._dead_hosts.add(host)
                raise

    def _pause(self, seconds: float) -> bool:
        """Handle events for some seconds; return whether the job is to continue."""
        deadline_ns = time.monotonic_ns() + int(seconds * 1e9)
        while time.monotonic_ns() < deadline_ns and not self._is_ending:
            self._handle_next_event(deadline_ns)
        return not self._is_ending

    def _restore(self) -> machine.Event:
        """Start the ranks from the newest intact checkpoint, and wait until all have restored it.

        Raises:
            LabError: a rank did not restore its state in time, or another loss occurred.
        """
        assert self._spec.storage is not None  # noqa: S101  # `resilience.check`
        ranks_of = {generation: len(programs) for generation, programs in self._programs.items()}
        patience_s = storage.newest_timeout_s(self._spec.storage, len(self.plan.tasks))
        newest = self._server.newest(ranks_of, timeout_s=patience_s)
        self._update_restart(rejected=newest.rejected)
        iterations = newest.iterations or 0
        generation = newest.generation or 0
        self._resumes = {}
        self._history = self._history.resumed(self._job.generation, stored_by=generation, iterations=iterations)
        if iterations:
            for rank in range(len(self.plan.tasks)):
                self._resumes[task_name(rank)] = {
                    "iterations": iterations,
                    "generation": generation,
                    "rank": self._job.ancestor(rank, generation),
                    "blank": not self._resilience.restores,
                }
        for task in self.plan.tasks:
            self._begin_task(task)
        names = {task.name for task in self.plan.tasks}
        # Without a checkpoint the job starts from iteration 0. Its ranks restore nothing, but warm up first.
        awaited = "restore their state" if iterations else "finish their first iteration"
        if not self._handle_events_until(
            lambda: names <= (self._restored if iterations else set(self._done_by_task)),
            START_TIMEOUT_S,
            lambda: f"ranks did not {awaited} within {START_TIMEOUT_S:.0f} s",
        ):
            raise LabError(self.failure)
        self._update_restart(restored_ns=time.monotonic_ns(), restored_iterations=iterations)
        if (
            iterations and self._warming_up
        ):  # the checkpoint proves that warm-up had ended, although its last report was lost
            self._publish("ready", self.started_ns)
            self._warming_up.clear()
        return machine.Restored(iterations=iterations)


def longest_restarts_s(resilience: Resilience) -> float:
    """Return the longest time that all restarts of a job may take together: the time limits of their phases."""
    restart_s = (
        loss.SILENT_AFTER_ERROR_NS / 1e9
        + FORGET_NS / 1e9
        + _rejoin_s(resilience)
        + ENGINE_START_TIMEOUT_S
        + SETUP_TIMEOUT_S
        + START_TIMEOUT_S
    )
    return resilience.policy.most_restarts * restart_s


def _rejoin_s(resilience: Resilience) -> float:
    """Return how long a restart waits for its lost hosts; other policies than `same` do not wait."""
    return resilience.rejoin_s if resilience.policy.restart == "same" else 0.0


def start(lab: TrafficLab, spec: JobSpec, resilience: Resilience, on_event: OnEvent | None = None) -> ElasticRunning:
    """Start a job that survives losses, on new engines.

    Raises:
        UsageError: the job does not fit the lab, or could not be restarted as demanded; nothing was started.
        LabError: it could not be started; nothing is left running.
    """
    check_on_lab(lab, spec, resilience)
    ranks, programs, algorithms = job.fit(lab, spec)
    assert spec.storage is not None  # noqa: S101  # `resilience.check`
    spares = tuple(
        endpoint(lab.topology, name).name for text in resilience.spares for name in select(lab.topology, text)
    )
    resilience = replace(resilience, spares=spares)
    with contextlib.ExitStack() as undo:
        began_ns = time.monotonic_ns()
        server = storage.serve(lab, spec.storage.host, keep=spec.storage.keep)
        undo.callback(server.close)
        engines = Engines.start(lab, [*(rank.host for rank in ranks), *map(host_of, spares)])
        undo.callback(engines.close)
        first = Placement(spec=spec, ranks=ranks, programs=programs, algorithms=algorithms)
        running = ElasticRunning(lab, engines, first, resilience, server, on_event, began_ns)
        undo.callback(setattr, running, "_is_ending", True)  # noqa: FBT003  # its thread must not restart the job
        running._start()  # noqa: SLF001  # `start` is the constructor of `ElasticRunning`
        undo.pop_all()
    return running
