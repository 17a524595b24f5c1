"""Running traffic: establish connections, start the work, rebuild QPs after errors, and produce one typed result.

`Running` owns one thread, which reads the engines' events and answers them. The harness may inject faults from any
other thread. A run always ends: its work is done, `stop` is called, or it fails with a location. Failures are a peer
that stays unreachable longer than `peer_deadline_s`, an engine that is gone, or no progress for `stall_deadline_s`.

A request for the flight recorders (`faultbed.traffic.engine.dump_signal`) is answered by an event `flights`. It holds
the recorders that were received, and under `silent` the RNICs whose engines did not reply.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from faultbed.testbed.errors import FaultbedError, LabError, UsageError
from faultbed.testbed.stopping import Deadline
from faultbed.traffic.engine import dump_signal
from faultbed.traffic.engine.connections import ConnectionManager
from faultbed.traffic.engine.engine_client import Engines, Event, TrafficLab
from faultbed.traffic.engine.flight_recorder import STORAGE_WAITS, Flight, flight_of
from faultbed.traffic.engine.run_results import Connection, Outcome, QpError, Rebuild, Standstill
from faultbed.traffic.engine.task_specs import Plan, TaskPlan, refuse_local

__all__ = ["BackgroundService", "OnEvent", "Running", "begin"]

OnEvent = Callable[[dict[str, Any]], None]
"""Called with every event of a run: `event` (its name), `time_ns` (controller), and the fields of that event."""
Result = TypeVar("Result")


class BackgroundService(Protocol):
    """A service of a run that is closed when the run ends, such as a storage server."""

    def close(self) -> None:
        """Stop the service."""


POLL_NS = 250_000_000
"""Longest wait for an event, so that deadlines and retries are checked in time."""
SETUP_TIMEOUT_S = 120.0
POSTMORTEM_TIMEOUT_S = 5.0
ABORT_TIMEOUT_S = 15.0
"""How long the caller waits for the end of a run that it aborts. The run may take longer to finish its current step."""
DUMP_TIMEOUT_NS = 5_000_000_000
"""How long ranks have to send their flight recorders when a dump is requested during a run."""


class Running(Generic[Result]):
    """Traffic that runs. Create it with `begin`; `wait` returns its result, `stop` ends it in an orderly way."""

    def __init__(
        self,
        engines: Engines,
        plan: Plan,
        finish: Callable[[Running[Result]], Result],
        on_event: OnEvent | None,
        *,
        owns_engines: bool,
        services: Sequence[BackgroundService] = (),
    ) -> None:
        self.plan = plan
        self._owns_engines = owns_engines
        self._services = services
        self.events: list[Event] = []
        self._rounds: dict[str, int] = {}
        """The round of each rank that has reported that it is stopping."""
        self.failure: str | None = None
        self.done: dict[str, Mapping[str, Any]] = {}
        self.began_ns = self.started_ns = self.ended_ns = 0
        self._engines = engines
        self._finish = finish
        self._on_event = on_event
        self._tasks = {task.name: task for task in plan.tasks}
        self._manager = ConnectionManager(plan, engines.send, self._publish)
        self._progress_ns = time.monotonic_ns()
        self.flights: dict[str, Flight] = {}
        """Flight recorders of a failed run, by task."""
        self._received_flights: dict[str, Flight] = {}
        self._awaited_flights: set[str] | None = None
        self._dump_requested_ns = 0
        self.standstills: list[Standstill] = []
        self.stamps: dict[str, list[Sequence[int]]] = {}
        """Timestamps of probes, by task (`faultbed.traffic.node.flows.echo`)."""
        self.was_awaited = False
        """Whether the user has called `wait`, so that its result or its error is known to them."""
        self.warmup_wrong = 0
        """Wrong elements in the results of the warm-up, on all ranks that have reported its end."""
        self._dead_hosts: set[str] = set()
        self._warming_up: set[str] = set()
        self._psn_answers: dict[str, Mapping[str, Any]] = {}
        self._reply_arrived = threading.Condition()
        self._over = threading.Event()
        self._result: Result | None = None
        self._thread = threading.Thread(target=self._run, name=f"traffic: {plan.what}", daemon=True)

    # Interface for the harness, callable from any thread.

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The current connections in index order. A connection that is being rebuilt appears as it was before."""
        return self._manager.connections

    @property
    def qp_errors(self) -> tuple[QpError, ...]:
        """Every QP that was lost so far."""
        return tuple(self._manager.qp_errors)

    @property
    def rebuilds(self) -> tuple[Rebuild, ...]:
        """Completed rebuilds. After the run this also includes rebuilds that did not complete."""
        return tuple(self._manager.rebuilds)

    @property
    def outcome(self) -> Outcome:
        """The outcome of the run, or the outcome it would have if it ended now."""
        if self.failure is not None:
            return "failed"
        return "recovered" if self._manager.was_rebuilt else "completed"

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, for any reason."""
        return self._over.is_set()

    @property
    def clock_error_ns(self) -> dict[str, int]:
        """Clock error of each host, in ns."""
        return {host: offset.error_ns for host, offset in self._engines.offsets.items()}

    def offset_ns(self, task: str) -> int:
        """Return the offset in ns that converts the clock of a task's host to the controller's."""
        return self._engines.offsets[self._tasks[task].endpoint.host].offset_ns

    def psns(self, *, timeout_s: float = 5.0) -> dict[int, tuple[int, int]]:
        """Return, for each connection, the next PSN that `src` sends and the next one that `src` expects from `dst`.

        Raises:
            LabError: an engine did not answer in time, or the run is over.
        """
        source_of = {connection.index: connection.src for connection in self.plan.connections}
        sources = set(source_of.values())
        deadline = Deadline(timeout_s)
        with self._reply_arrived:
            self._psn_answers = {}
            for name in sources:
                self._engines.send(self._tasks[name].endpoint.host, {"do": "psn", "task": name})
            while set(self._psn_answers) != sources:
                if self._over.is_set() or (not self._reply_arrived.wait(deadline.step_s) and deadline.is_over):
                    raise LabError(
                        f"{self.plan.what}: no reply with PSNs from {', '.join(sources - set(self._psn_answers))}"
                    )
            return {
                item["conn"]: (item["sq_psn"], item["rq_psn"])
                for name, answer in self._psn_answers.items()
                for item in answer["conns"]
                if source_of[item["conn"]] == name
            }

    def dump(self, *, timeout_s: float = 5.0) -> dict[str, Flight]:
        """Return the current flight recorders by task. Engines that do not answer in time are left out."""
        deadline = Deadline(timeout_s)
        with self._reply_arrived:
            self._received_flights = {}
            pending = self._request_flights()
            while pending - set(self._received_flights) and not self._over.is_set():
                if not self._reply_arrived.wait(deadline.step_s) and deadline.is_over:
                    break
            return dict(self._received_flights)

    def stop(self) -> None:
        """Request an orderly end: requests in flight are completed. `wait` still returns the result."""
        for task in self.plan.tasks:
            if task.active and not self._over.is_set():
                self._try_send(task.endpoint.host, {"do": "stop", "task": task.name})

    def wait(self, timeout_s: float) -> Result:
        """Return the result when the run is over.

        Raises:
            LabError: the run is not over by the timeout, or its result could not be built. A run that is not over is
                aborted, and nothing is left on the nodes once it has ended; the message says whether it has.
        """
        self.was_awaited = True
        if not Deadline(timeout_s).wait(self._over):
            self.abort(f"not over after {timeout_s:.0f} s")
            ended = Deadline(ABORT_TIMEOUT_S).wait(self._over)
            state = "it was ended" if ended else f"aborted {ABORT_TIMEOUT_S:g} s ago, it may still be ending"
            raise LabError(f"{self.plan.what}: not over after {timeout_s:.0f} s; {state}")
        self._thread.join(timeout=10.0)
        if self._result is None:
            raise LabError(f"{self.plan.what}: {self.failure}")
        return self._result

    def abort(self, reason: str) -> None:
        """End the run at once, as failed."""
        self._engines.events.put(Event(host="controller", message={"event": "abort", "error": reason}))

    def __enter__(self) -> Running[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._over.is_set():
            self.abort("abandoned by its user")
            Deadline(ABORT_TIMEOUT_S).wait(self._over)

    # Setup, in the caller's thread.

    def _prepare(self) -> None:
        for task in self.plan.tasks:
            self._engines.send(
                task.endpoint.host,
                {
                    "do": "task",
                    "task": task.name,
                    "kind": task.kind,
                    "rnic": task.endpoint.rnic,
                    "address": task.endpoint.address,
                    "spec": dict(task.spec),
                },
            )
        self._manager.establish_all()
        if not self._handle_events_until(
            lambda: not self._manager.down,
            SETUP_TIMEOUT_S,
            lambda: f"not connected after {SETUP_TIMEOUT_S:.0f} s: {', '.join(self._manager.down)}",
        ):
            raise LabError(f"{self.plan.what} did not start: {self.failure}")
        self._publish("qps", time.monotonic_ns(), connections=list(self.connections))

    def _handle_events_until(
        self, is_ready: Callable[[], bool], timeout_s: float, timeout_message: Callable[[], str]
    ) -> bool:
        """Handle events until a condition holds; False if the run fails first, or `timeout_s` passes (a failure)."""
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        while not is_ready():
            self._handle_next_event(deadline_ns)
            now_ns = time.monotonic_ns()
            self._check_connections(now_ns)
            if self.failure is None and now_ns > deadline_ns:
                self.failure = timeout_message()
            if self.failure is not None:
                return False
        return True

    def _handle_next_event(self, deadline_ns: int) -> None:
        """Wait for an event until the deadline, but at most `POLL_NS`, and handle it."""
        event = self._engines.next(min(deadline_ns, time.monotonic_ns() + POLL_NS))
        if event is not None:
            self._handle(event, time.monotonic_ns())

    def _begin_task(self, task: TaskPlan) -> None:
        self._engines.send(task.endpoint.host, {"do": "start", "task": task.name, **self._start_fields(task)})

    def _start_fields(self, _task: TaskPlan) -> Mapping[str, Any]:
        """Return further fields of the request that starts a task."""
        return {}

    def _start(self) -> None:
        self._prepare()
        self.began_ns = self.started_ns = self._progress_ns = time.monotonic_ns()
        active = [task for task in self.plan.tasks if task.active]
        for task in active[: 1 if self.plan.one_by_one else None]:
            self._begin_task(task)
        self._warming_up = {task.name for task in active if task.spec.get("warmup")}
        if not self._warming_up:
            self._publish("ready", self.started_ns)
        self._thread.start()
        while self._warming_up and not self._over.wait(0.05):
            pass

    # The run's own thread.

    def _run(self) -> None:
        try:
            self._serve()
            while self.failure is not None and self._recover():
                self._serve()
        except Exception as error:  # noqa: BLE001  # a defect in this code must end the run, not hang the user
            self.failure = f"{type(error).__name__}: {error}"
        self.ended_ns = time.monotonic_ns()
        try:
            if self.failure is not None:
                with contextlib.suppress(FaultbedError):  # an engine that is gone while its peers are queried
                    self._collect_flights()
            self._serve_dump_request(self.ended_ns, at_end=True)
            self._engines.widen_clocks()
            self._release_engines()
            self._manager.record_open_episodes()
            self._result = self._finish(self)
            self._publish("done", self.ended_ns, outcome=self.outcome, where=self.failure)
        finally:
            for service in self._services:
                service.close()
            self._over.set()

    def _serve(self) -> None:
        """Serve events until all work is done, or the run has failed."""
        try:
            active = {task.name for task in self.plan.tasks if task.active}
            while self.failure is None and not active <= set(self.done):
                self._handle_next_event(time.monotonic_ns() + POLL_NS)
                now_ns = time.monotonic_ns()
                self._check_connections(now_ns)
                self._serve_dump_request(now_ns)
                if now_ns - self._progress_ns > self.plan.stall_deadline_s * 1e9:
                    self.failure = f"nothing moved for {self.plan.stall_deadline_s:.0f} s{self._where()}"
        except FaultbedError as error:
            self.failure = str(error)

    def _recover(self) -> bool:
        """Continue a run that has failed; return whether it continues. Most traffic cannot."""
        return False

    def _release_engines(self) -> None:
        """Return borrowed engines without tasks, or close them.

        After a failure they may hold anything, so they are closed.
        """
        if self._owns_engines or self.failure is not None:
            self._engines.close()
            return
        try:
            self._engines.forget()
        except FaultbedError as error:
            self.failure = str(error)
            self._engines.close()

    def _request_flights(self) -> set[str]:
        requested = set()
        for task in self.plan.tasks:
            if task.kind == "rank" and task.endpoint.host not in self._dead_hosts:
                with contextlib.suppress(FaultbedError):
                    self._engines.send(task.endpoint.host, {"do": "dump", "task": task.name})
                    requested.add(task.name)
        return requested

    def _serve_dump_request(self, now_ns: int, *, at_end: bool = False) -> None:
        """Serve a dump request: send it to all ranks, and publish the replies when they are complete or late."""
        if self._awaited_flights is None:
            if at_end or not dump_signal.take_request():
                return
            with self._reply_arrived:
                self._received_flights = {}
                self._awaited_flights, self._dump_requested_ns = self._request_flights(), now_ns
        with self._reply_arrived:
            received = dict(self._received_flights)
        if self._awaited_flights <= set(received) or at_end or now_ns - self._dump_requested_ns > DUMP_TIMEOUT_NS:
            self._awaited_flights = None
            ranks = [task for task in self.plan.tasks if task.kind == "rank"]
            self._publish(
                "flights",
                now_ns,
                flights=[received[task.name] for task in ranks if task.name in received],
                silent=[task.endpoint.name for task in ranks if task.name not in received],
            )

    def _collect_flights(self) -> None:
        """Collect the flight recorders of the remaining ranks. Ranks that do not reply in time are left out.

        If an engine is gone, its peers first get two retry timeouts to report QP errors. These errors are the evidence
        for a rank that died, and would be lost with the queue pairs.
        """
        began_ns = time.monotonic_ns()
        deadline_ns = began_ns + int(POSTMORTEM_TIMEOUT_S * 1e9)
        timers = [4096 << task.spec["qp"]["timeout"] for task in self.plan.tasks if "qp" in task.spec]
        errors_by_ns = min(began_ns + 2 * max(timers, default=0), deadline_ns) if self._dead_hosts else began_ns
        with self._reply_arrived:
            self._received_flights = {}
        pending = self._request_flights()
        while pending - set(self._received_flights) and time.monotonic_ns() < deadline_ns:
            event = self._engines.next(deadline_ns)
            if event is not None:
                self._handle(event, time.monotonic_ns())
                pending -= {task.name for task in self.plan.tasks if task.endpoint.host in self._dead_hosts}
        while (left_ns := errors_by_ns - time.monotonic_ns()) > 0:
            event = self._engines.next(time.monotonic_ns() + left_ns)
            if event is not None:
                self._handle(event, time.monotonic_ns())
        self.flights = dict(self._received_flights)

    def _check_connections(self, now_ns: int) -> None:
        self._manager.retry_due(now_ns)
        self._progress_ns = max(self._progress_ns, self._manager.progress_ns)
        self.failure = self.failure or self._manager.failure

    def _where(self) -> str:
        down = self._manager.down
        late = [name for name, task in self._tasks.items() if task.active and name not in self.done]
        return f" (down: {', '.join(down)})" if down else f" (not done: {', '.join(late)})"

    def _handle(self, event: Event, now_ns: int) -> None:
        message = event.message
        self._manager.handle(event.name, message, now_ns)
        handler = getattr(self, f"_on_{event.name}", None)
        if handler is not None:
            handler(message, event.host, now_ns)
        if event.name in ("sample", "iteration", "stored", "error"):
            self.events.append(event)
            self._publish(event.name, now_ns, host=event.host, **{k: v for k, v in message.items() if k != "event"})

    def _on_sample(self, message: Mapping[str, Any], _host: str, now_ns: int) -> None:
        if any(message["sizes"]):
            self._progress_ns = now_ns

    def _on_iteration(self, _message: Mapping[str, Any], _host: str, now_ns: int) -> None:
        self._progress_ns = now_ns

    _on_stored = _on_iteration

    def _on_stamps(self, message: Mapping[str, Any], _host: str, now_ns: int) -> None:
        self._progress_ns = now_ns
        self.stamps.setdefault(message["task"], []).extend(message["rows"])

    def _on_warm(self, message: Mapping[str, Any], host: str, now_ns: int) -> None:
        """Handle the end of warm-up on one rank. The measured work starts when the last rank has reported it."""
        self._progress_ns = now_ns
        self.started_ns = max(self.started_ns, message["at_ns"])
        if message["wrong"]:
            self.warmup_wrong += message["wrong"]
            self.failure = f"{host}, {message['task']}: {message['wrong']} wrong elements in the warm-up"
        elif self._warming_up == {message["task"]}:
            self._publish("ready", self.started_ns)
        self._warming_up.discard(message["task"])

    def _on_done(self, message: Mapping[str, Any], _host: str, now_ns: int) -> None:
        self.done[message["task"]] = message
        self._progress_ns = now_ns
        for task in self.plan.tasks:
            if task.stops_after == message["task"]:
                self._try_send(task.endpoint.host, {"do": "stop", "task": task.name})
        if self.plan.one_by_one:
            following = next((task for task in self.plan.tasks if task.active and task.name not in self.done), None)
            if following is not None:
                self._begin_task(following)

    def _on_stopping(self, message: Mapping[str, Any], _host: str, _now_ns: int) -> None:
        """Make all ranks end after the furthest round that any of them has begun.

        Ranks of different groups exchange no data, so they cannot agree on that round themselves. A rank that is
        stopping begins no other round until it gets `end_after`.
        """
        self._rounds[message["task"]] = message["round"]
        ranks = [task for task in self.plan.tasks if task.kind == "rank"]
        if all(task.name in self._rounds for task in ranks):
            # Rounds count from 0 with the warm-up, so this leaves at least one measured iteration.
            last_round = max(*(task.spec.get("warmup", 0) for task in ranks), *self._rounds.values())
            for task in ranks:
                self._try_send(task.endpoint.host, {"do": "end_after", "task": task.name, "round": last_round})

    def _on_psn(self, message: Mapping[str, Any], _host: str, _now_ns: int) -> None:
        with self._reply_arrived:
            self._psn_answers[message["task"]] = message
            self._reply_arrived.notify_all()

    def _on_flight(self, message: Mapping[str, Any], _host: str, _now_ns: int) -> None:
        task = self._tasks[message["task"]]
        rank = next(index for index, other in enumerate(self.plan.tasks) if other is task)
        flight = flight_of(message, rank=rank, endpoint=task.endpoint.name, offset_ns=self.offset_ns(task.name))
        with self._reply_arrived:
            self._received_flights[task.name] = flight
            self._reply_arrived.notify_all()

    def _on_standstill(self, message: Mapping[str, Any], host: str, _now_ns: int) -> None:
        self.standstills.append(Standstill(host=host, start_ns=message["start_ns"], end_ns=message["end_ns"]))

    def _on_overdue(self, message: Mapping[str, Any], host: str, _now_ns: int) -> None:
        took_s = message["after_ms"] / 1000
        waits = STORAGE_WAITS.get(message.get("phase", ""))
        self.failure = self.failure or (
            f"{host}, {message['task']}: iteration {message['iteration']} is not over after {took_s:g} s"
            f"{f': it {waits}' if waits else ''}"
        )

    def _on_error(self, message: Mapping[str, Any], host: str, _now_ns: int) -> None:
        self.failure = self.failure or f"{host}, {message.get('where')}: {message.get('error')}"

    def _on_abort(self, message: Mapping[str, Any], _host: str, _now_ns: int) -> None:
        self.failure = self.failure or str(message["error"])

    def _on_gone(self, message: Mapping[str, Any], host: str, _now_ns: int) -> None:
        self._dead_hosts.add(host)
        reason = f": {message['error']}" if message.get("error") else ""
        self.failure = self.failure or f"{host}: the traffic engine is gone{reason}"

    def _try_send(self, host: str, message: Mapping[str, Any]) -> None:
        try:
            self._engines.send(host, message)
        except FaultbedError as error:
            self.failure = self.failure or str(error)

    def _publish(self, name: str, now_ns: int, **fields: object) -> None:
        if self._on_event is not None:
            self._on_event({"event": name, "time_ns": now_ns, **fields})


def _refuse_local(lab: TrafficLab, plan: Plan) -> None:
    """Reject connections inside one host of a soft lab: Linux delivers them through lo, where rxe does not listen."""
    endpoints = {task.name: task.endpoint for task in plan.tasks}
    refuse_local(
        lab.kind, plan.what, [(endpoints[connection.src], endpoints[connection.dst]) for connection in plan.connections]
    )


def begin(
    lab: TrafficLab,
    plan: Plan,
    finish: Callable[[Running[Result]], Result],
    on_event: OnEvent | None = None,
    engines: Engines | None = None,
    *,
    services: Sequence[BackgroundService] = (),
) -> Running[Result]:
    """Start the engines (unless `engines` are given), establish all connections and start the work.

    Raises:
        UsageError: the lab cannot carry the traffic.
        LabError: the traffic could not be started; nothing is left running on any node.
    """
    with contextlib.ExitStack() as undo:
        for service in services:
            undo.callback(service.close)
        _refuse_local(lab, plan)
        hosts = tuple(dict.fromkeys(task.endpoint.host for task in plan.tasks))
        if engines is not None and not set(hosts) <= set(engines.hosts):
            lacking = ", ".join(host for host in hosts if host not in engines.hosts)
            raise UsageError(f"{plan.what}: the given engines do not run on {lacking}; start engines there, too")
        owns_engines = engines is None
        engines = engines or Engines.start(lab, hosts)
        undo.callback(engines.close)
        running = Running(engines, plan, finish, on_event, owns_engines=owns_engines, services=services)
        running._start()  # noqa: SLF001  # `begin` is the constructor of `Running`
        undo.pop_all()
    return running
