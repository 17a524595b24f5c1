"""A running piece of traffic: connections made, work started, QPs rebuilt after errors, events kept, one typed end.

`Running` owns one thread, which reads the engines' events and answers them; the harness may inject faults meanwhile
from any other. A run always ends: by its work being done, by `stop`, or by a failure that says where - a peer that
stayed unreachable longer than `peer_deadline_s`, an engine that is gone, or nothing moving for `stall_deadline_s`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from testbed.errors import FaultbedError, LabError, UsageError
from traffic.engine import Engines, Event, TrafficLab
from traffic.results import Connection, Endpoint, Outcome, QpError, Rebuild

__all__ = ["Cable", "OnEvent", "Plan", "QpParams", "Running", "TaskPlan", "begin"]

OnEvent = Callable[[dict[str, Any]], None]
Result = TypeVar("Result")

RETRY_PAUSE_NS = 250_000_000
SETUP_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QpParams:
    """Parameters of a reliable connection, all explicit.

    `timeout` is the local ACK timeout of 4.096 us x 2^timeout (14: 67 ms); a packet is sent `retry_cnt` + 1 times
    before the QP dies. `min_rnr_timer` 12 is 0.64 ms. rxe takes `retry_cnt` 7 and `rnr_retry` 7 as for ever.
    """

    timeout: int = 14
    retry_cnt: int = 6
    rnr_retry: int = 6
    min_rnr_timer: int = 12
    mtu: int = 4096
    traffic_class: int = 0
    flow_label: int = 0

    def to_dict(self) -> dict[str, int]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """A task of one engine, as the engine is told to make it."""

    name: str
    kind: str
    endpoint: Endpoint
    spec: Mapping[str, Any]
    active: bool
    """Whether it is started, and ends with `done`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """A connection to make: number and the names of the tasks at its ends; data goes from `src` to `dst`."""

    index: int
    src: str
    dst: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run: tasks, and the connections between them."""

    what: str
    tasks: tuple[TaskPlan, ...]
    cables: tuple[Cable, ...]
    peer_deadline_s: float
    stall_deadline_s: float


class _Link:
    """Where one connection is in being made or made again."""

    def __init__(self, cable: Cable) -> None:
        self.cable = cable
        self.generation = -1
        self.ends: dict[str, dict[str, Any]] = {}
        self.joined: set[str] = set()
        self.is_up = False
        self.retry_ns: int | None = None
        self.episode: Rebuild | None = None
        self.described: Connection | None = None


class Running(Generic[Result]):
    """Traffic that runs. Made by `begin`; `wait` gives its result, `stop` brings it to an orderly end."""

    def __init__(
        self,
        engines: Engines,
        plan: Plan,
        finish: Callable[[Running[Result]], Result],
        on_event: OnEvent | None,
    ) -> None:
        self.plan = plan
        self.events: list[Event] = []
        self.qp_errors: list[QpError] = []
        self.rebuilds: list[Rebuild] = []
        self.failure: str | None = None
        self.done: dict[str, Mapping[str, Any]] = {}
        self.started_ns = self.ended_ns = 0
        self._engines = engines
        self._finish = finish
        self._on_event = on_event
        self._tasks = {task.name: task for task in plan.tasks}
        self._links = {cable.index: _Link(cable) for cable in plan.cables}
        self._lock = threading.Lock()
        self._moved_ns = time.monotonic_ns()
        self._psn_answers: dict[str, Mapping[str, Any]] = {}
        self._psn_news = threading.Condition()
        self._over = threading.Event()
        self._result: Result | None = None
        self._thread = threading.Thread(target=self._run, name=f"traffic: {plan.what}", daemon=True)

    # For the harness, from any thread.

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The connections as they are now (one that is being rebuilt: as it was), in order of their index."""
        with self._lock:
            return tuple(link.described for link in self._links.values() if link.described is not None)

    @property
    def outcome(self) -> Outcome:
        """How it ended, or would end now."""
        if self.failure is not None:
            return "failed"
        return "recovered" if self.rebuilds or any(link.episode for link in self._links.values()) else "completed"

    @property
    def is_over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._over.is_set()

    @property
    def clock_error_ns(self) -> dict[str, int]:
        """By host: how wrong its times may be, in ns."""
        return {host: offset.error_ns for host, offset in self._engines.offsets.items()}

    def psns(self, *, timeout_s: float = 5.0) -> dict[int, tuple[int, int]]:
        """For each connection: the next PSN that `src` sends, and the next one that `src` expects from `dst`.

        Raises:
            LabError: an engine did not answer in time, or the run is over.
        """
        sources = {link.cable.src for link in self._links.values()}
        deadline = time.monotonic() + timeout_s
        with self._psn_news:
            self._psn_answers = {}
            for name in sources:
                self._engines.send(self._tasks[name].endpoint.host, {"do": "psn", "task": name})
            while set(self._psn_answers) != sources:
                if self._over.is_set() or not self._psn_news.wait(max(0.0, deadline - time.monotonic())):
                    raise LabError(f"{self.plan.what}: no PSNs from {', '.join(sources - set(self._psn_answers))}")
            return {
                item["conn"]: (item["sq_psn"], item["rq_psn"])
                for name, answer in self._psn_answers.items()
                for item in answer["conns"]
                if self._links[item["conn"]].cable.src == name
            }

    def stop(self) -> None:
        """Ask for an orderly end: what is in flight is finished. The result is still got by `wait`."""
        for task in self.plan.tasks:
            if task.active and not self._over.is_set():
                self._try_send(task.endpoint.host, {"do": "stop", "task": task.name})

    def wait(self, timeout_s: float) -> Result:
        """The result, when the run is over.

        Raises:
            LabError: it is not over by the timeout. It is ended then, and nothing is left on the nodes.
        """
        if not self._over.wait(timeout_s):
            self.abort(f"not over after {timeout_s:.0f} s")
            self._over.wait(15.0)
            raise LabError(f"{self.plan.what}: not over after {timeout_s:.0f} s; it was ended")
        self._thread.join(timeout=10.0)
        if self._result is None:
            raise LabError(f"{self.plan.what}: {self.failure}")
        return self._result

    def abort(self, reason: str) -> None:
        """End at once, as failed."""
        self._engines.events.put(Event(host="controller", message={"event": "abort", "error": reason}))

    def __enter__(self) -> Running[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._over.is_set():
            self.abort("given up by its user")
            self._over.wait(15.0)

    # Setting up, in the caller's thread.

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
        for link in self._links.values():
            self._make(link)
        self._pump_until(lambda: all(link.is_up for link in self._links.values()))
        self._publish("qps", time.monotonic_ns(), connections=[self._describe(link) for link in self._links.values()])

    def _pump_until(self, is_there: Callable[[], bool]) -> None:
        deadline_ns = time.monotonic_ns() + int(SETUP_TIMEOUT_S * 1e9)
        while not is_there():
            event = self._engines.next(min(deadline_ns, time.monotonic_ns() + RETRY_PAUSE_NS))
            now_ns = time.monotonic_ns()
            if event is not None:
                self._handle(event, now_ns)
            self._retry_due(now_ns)
            if self.failure is None and now_ns > deadline_ns:
                missing = [self._name(link) for link in self._links.values() if not link.is_up]
                self.failure = f"no connection {', '.join(missing)} after {SETUP_TIMEOUT_S:.0f} s"
            if self.failure is not None:
                raise LabError(f"{self.plan.what} did not start: {self.failure}")

    def _start(self) -> None:
        self._prepare()
        self.started_ns = self._moved_ns = time.monotonic_ns()
        for task in self.plan.tasks:
            if task.active:
                self._engines.send(task.endpoint.host, {"do": "start", "task": task.name})
        self._publish("ready", self.started_ns)
        self._thread.start()

    # The run's own thread.

    def _run(self) -> None:
        try:
            active = {task.name for task in self.plan.tasks if task.active}
            while self.failure is None and not active <= set(self.done):
                event = self._engines.next(time.monotonic_ns() + RETRY_PAUSE_NS)
                now_ns = time.monotonic_ns()
                if event is not None:
                    self._handle(event, now_ns)
                self._retry_due(now_ns)
                if now_ns - self._moved_ns > self.plan.stall_deadline_s * 1e9:
                    self.failure = f"nothing moved for {self.plan.stall_deadline_s:.0f} s{self._where()}"
        except FaultbedError as error:
            self.failure = str(error)
        except Exception as error:  # noqa: BLE001  # a defect of ours must end the run, not hang its user
            self.failure = f"{type(error).__name__}: {error}"
        self.ended_ns = time.monotonic_ns()
        try:
            self._engines.close()
            self.rebuilds += [link.episode for link in self._links.values() if link.episode is not None]
            for link in self._links.values():
                link.episode = None
            self._result = self._finish(self)
            self._publish("done", self.ended_ns, outcome=self.outcome, where=self.failure)
        finally:
            self._over.set()

    def _where(self) -> str:
        down = [self._name(link) for link in self._links.values() if not link.is_up]
        late = [name for name, task in self._tasks.items() if task.active and name not in self.done]
        return f" (down: {', '.join(down)})" if down else f" (not done: {', '.join(late)})"

    def _handle(self, event: Event, now_ns: int) -> None:
        message = event.message
        handler = getattr(self, f"_on_{event.name}", None)
        if handler is not None:
            handler(message, event.host, now_ns)
        if event.name in ("sample", "iteration", "error"):
            self.events.append(event)
            self._publish(event.name, now_ns, host=event.host, **{k: v for k, v in message.items() if k != "event"})

    def _on_sample(self, message: Mapping[str, Any], _host: str, now_ns: int) -> None:
        if any(message["sizes"]):
            self._moved_ns = now_ns

    def _on_iteration(self, _message: Mapping[str, Any], _host: str, now_ns: int) -> None:
        self._moved_ns = now_ns

    def _on_done(self, message: Mapping[str, Any], _host: str, now_ns: int) -> None:
        self.done[message["task"]] = message
        self._moved_ns = now_ns

    def _on_psn(self, message: Mapping[str, Any], _host: str, _now_ns: int) -> None:
        with self._psn_news:
            self._psn_answers[message["task"]] = message
            self._psn_news.notify_all()

    def _on_error(self, message: Mapping[str, Any], host: str, _now_ns: int) -> None:
        self.failure = self.failure or f"{host}, {message.get('where')}: {message.get('error')}"

    def _on_abort(self, message: Mapping[str, Any], _host: str, _now_ns: int) -> None:
        self.failure = self.failure or str(message["error"])

    def _on_gone(self, message: Mapping[str, Any], host: str, _now_ns: int) -> None:
        said = f": {message['error']}" if message.get("error") else ""
        self.failure = self.failure or f"{host}: the traffic engine is gone{said}"

    # Connections.

    def _make(self, link: _Link) -> None:
        link.generation += 1
        link.ends, link.joined, link.is_up, link.retry_ns = {}, set(), False, None
        generation = link.generation & 0xF
        for side, task in enumerate((link.cable.src, link.cable.dst)):
            # Not 0, another one for every end and every rebuild: a packet of the QP before does not fit in.
            psn = (generation << 20 | link.cable.index << 12 | side << 11 | 0x100) & 0xFFFFFF
            self._tell(task, link, {"do": "qp", "psn": psn})

    def _tell(self, task: str, link: _Link, message: dict[str, Any]) -> None:
        message |= {"task": task, "conn": link.cable.index, "generation": link.generation}
        self._engines.send(self._tasks[task].endpoint.host, message)

    def _link_of(self, message: Mapping[str, Any]) -> _Link | None:
        link = self._links[message["conn"]]
        return link if link.generation == message["generation"] else None

    def _on_qp(self, message: Mapping[str, Any], _host: str, _now_ns: int) -> None:
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

    def _on_joined(self, message: Mapping[str, Any], _host: str, now_ns: int) -> None:
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
            self._moved_ns = now_ns
            self._publish("rebuilt", now_ns, rebuild=link.episode, connection=self._describe(link))

    def _on_join_failed(self, message: Mapping[str, Any], _host: str, now_ns: int) -> None:
        link = self._link_of(message)
        if link is not None and link.retry_ns is None:
            link.retry_ns = now_ns + RETRY_PAUSE_NS
            self._give_up_if_late(link, now_ns, str(message.get("error")))

    def _on_qp_error(self, message: Mapping[str, Any], _host: str, now_ns: int) -> None:
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
        if self._link_of(message) is None or not link.is_up:
            return  # the other end has said so before, and the rebuild is under way
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

    def _on_recovered(self, message: Mapping[str, Any], _host: str, now_ns: int) -> None:
        link = self._link_of(message)
        if link is None or link.episode is None:
            return
        self.rebuilds.append(replace(link.episode, recovered_ns=message["at_ns"]))
        link.episode = None
        self._moved_ns = now_ns

    def _retry_due(self, now_ns: int) -> None:
        for link in self._links.values():
            if link.retry_ns is not None and now_ns >= link.retry_ns:
                self._rebuild(link, now_ns)

    def _give_up_if_late(self, link: _Link, now_ns: int, reason: str) -> None:
        if link.episode is not None and now_ns - link.episode.error_ns > self.plan.peer_deadline_s * 1e9:
            self.failure = f"{self._name(link)}: unreachable for {self.plan.peer_deadline_s:.0f} s ({reason})"

    def _name(self, link: _Link) -> str:
        return f"{self._tasks[link.cable.src].endpoint.name} -> {self._tasks[link.cable.dst].endpoint.name}"

    def _describe(self, link: _Link) -> Connection:
        src, dst = self._tasks[link.cable.src].endpoint, self._tasks[link.cable.dst].endpoint
        here, there = link.ends[link.cable.src], link.ends[link.cable.dst]
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
        )

    def _try_send(self, host: str, message: Mapping[str, Any]) -> None:
        try:
            self._engines.send(host, message)
        except FaultbedError as error:
            self.failure = self.failure or str(error)

    def _publish(self, name: str, now_ns: int, **fields: object) -> None:
        if self._on_event is not None:
            self._on_event({"event": name, "time_ns": now_ns, **fields})


def _refuse_local(lab: TrafficLab, plan: Plan) -> None:
    """On a soft lab: Linux delivers to an address of its own through lo, where no rxe listens."""
    places = {task.name: task.endpoint for task in plan.tasks}
    for cable in plan.cables:
        src, dst = places[cable.src], places[cable.dst]
        if lab.kind == "soft" and src.host == dst.host:
            raise UsageError(
                f"{plan.what}: {src.name} -> {dst.name} is inside one host, and soft RoCE cannot talk to itself over "
                "the fabric; order the ranks so that neighbours are on different hosts"
            )


def begin(
    lab: TrafficLab,
    plan: Plan,
    finish: Callable[[Running[Result]], Result],
    on_event: OnEvent | None = None,
) -> Running[Result]:
    """Start engines, make all connections, start the work.

    Raises:
        UsageError: the lab cannot carry it.
        LabError: it could not be started; nothing is left running on any node.
    """
    _refuse_local(lab, plan)
    engines = Engines.start(lab, (task.endpoint.host for task in plan.tasks))
    running = Running(engines, plan, finish, on_event)
    try:
        running._start()  # noqa: SLF001  # the two are one
    except BaseException:
        engines.close()
        raise
    return running
