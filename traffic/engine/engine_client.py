"""Controller side of the traffic engines: one process per host, started over SSH, with all events in one queue.

Node times are converted to controller monotonic ns on arrival. This applies to the fields that hold a point in time
(`TIME_FIELDS`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from faultbed.testbed.errors import CommandFailed, FaultbedError, LabError, UsageError
from faultbed.testbed.model.lab_kind import LabKind
from faultbed.testbed.model.selectors import resolve
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.observe import clock
from faultbed.testbed.remote.remote_node import Channel, Node
from faultbed.testbed.side_by_side import on_each
from faultbed.testbed.stopping import Deadline
from faultbed.traffic.engine.run_results import Endpoint

__all__ = ["GONE", "TIME_FIELDS", "Engines", "Event", "Fabric", "FabricModel", "TrafficLab", "endpoint"]

MODULE = "faultbed.traffic.node.engine"
START_TIMEOUT_S = 90.0
"""How long an engine may take to start: Python, pyverbs and numpy load slowly on an emulated CPU."""

FORGET_TIMEOUT_S = 30.0
CLOCK_ROUNDS, CLOCK_TIMEOUT_S = 5, 3.0

TIME_FIELDS = ("at_ns", "start_ns", "end_ns", "first_ns", "last_ns")
GONE = "gone"
"""Name of the event that reports the end of an engine."""


class Fabric(Protocol):
    """A lab's description, known without a running lab (`Inventory` of `testbed/inventory/lab_inventory.py`)."""

    @property
    def kind(self) -> LabKind:
        """The kind of lab."""

    @property
    def topology(self) -> Topology:
        """Hosts, switches and links of the lab."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricModel:
    """A `Fabric` without an inventory, for a recorded run or for an experiment that is only checked."""

    kind: LabKind
    topology: Topology


class TrafficLab(Fabric, Protocol):
    """The part of a lab that traffic needs (`faultbed.testbed.lab.Lab` implements it)."""

    def node(self, name: str) -> Node:
        """Return a machine by name."""

    def open_module(self, name: str, module: str, *words: str) -> Channel:
        """Start a node-side module with arguments on a node."""

    def forget(self, machine: str) -> None:
        """Close the connection to a machine; the next use opens a new one."""

    def down_links(self, nodes: Iterable[str], *, timeout_s: float) -> frozenset[str]:
        """Return the names of the links that some nodes report as down. Nodes that do not answer are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A message of one host's engine, with its times in controller ns."""

    host: str
    message: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The kind of the event."""
        return str(self.message.get("event"))


class Engines:
    """The engines of a set of hosts. Create it with `Engines.start`; `close` ends all engines and may be called twice.

    One set of engines can serve several runs in sequence (`engines` of `faultbed.traffic.workloads.collective.start`),
    because starting the engines takes longest.
    """

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.offsets: dict[str, clock.ClockOffset] = {}
        self.pids: dict[str, int | None] = {}
        self._channels: dict[str, Channel] = {}
        self._pumps: list[threading.Thread] = []
        self._clock_seq = 0
        self._clock_sent_ns: dict[str, int] = {}
        self._exchanges: dict[str, list[clock.Exchange]] = {}
        self._clock_replied = threading.Condition()
        self._gone: set[str] = set()
        self.heard_ns: dict[str, int] = {}
        """When the last message of each host arrived, in controller ns."""
        self.answered: dict[str, int] = {}
        """Number of the last ping that each host has answered. Messages sent before the ping arrived do not count."""
        self._pings = 0
        self._is_closing = False
        self._closed = threading.Event()

    @classmethod
    def start(cls, lab: TrafficLab, hosts: Iterable[str], *, module: str = MODULE) -> Engines:
        """Start an engine on every host by its module name, and measure its clock.

        Raises:
            LabError: an engine does not start. Engines that did start are stopped.
        """
        engines = cls()
        try:
            engines.add(lab, hosts, module=module)
        except BaseException:
            engines.close()
            raise
        return engines

    def add(self, lab: TrafficLab, hosts: Iterable[str], *, module: str = MODULE) -> None:
        """Start an engine on further hosts.

        Raises:
            LabError: an engine does not start, or the engines are closed meanwhile. Those that did start are kept.
        """
        names = list(dict.fromkeys(hosts))
        on_each(names, lambda name: self._add_one(lab, name, module), timeout_s=3 * START_TIMEOUT_S)

    def _add_one(self, lab: TrafficLab, host: str, module: str) -> None:
        self._start_one(lab, host, module)
        pump = threading.Thread(target=self._pump, args=(host,), name=f"traffic pump of {host}", daemon=True)
        self._pumps.append(pump)
        pump.start()

    def drop(self, host: str) -> None:
        """Close the channel to one host's engine, which ends it. This does not wait, because the host may be gone."""
        channel = self._channels.pop(host, None)
        self.offsets.pop(host, None)
        if channel is not None:
            channel.close()

    def ping(self, host: str) -> int:
        """Request a sign of life and return its number, which `answered` shows once the engine has replied.

        An engine that cannot be reached is not an error here.
        """
        self._pings += 1
        with contextlib.suppress(FaultbedError):
            self.send(host, {"do": "clock", "seq": -self._pings})  # rounds of `widen_clocks` count up from 0
        return self._pings

    def _start_one(self, lab: TrafficLab, host: str, module: str) -> None:
        self._require_open(host)
        channel = lab.open_module(host, module)
        self._channels[host] = channel
        self._gone.discard(host)
        if self._is_closing:  # `close` may have passed before it could see this channel
            channel.close()
        self._require_open(host)
        channel.send({"do": "clock"})
        reply = channel.receive(timeout_s=START_TIMEOUT_S)
        if reply is None:
            raise LabError(f"{host}: the traffic engine ended at once{_stderr_of(channel)}")
        self.pids[host] = reply.get("pid")
        self.offsets[host] = clock.measure(channel)
        self.heard_ns[host] = time.monotonic_ns()

    def _require_open(self, host: str) -> None:
        if self._is_closing:
            raise LabError(f"{host}: no traffic engine is started, because the run is over")

    def send(self, host: str, message: Mapping[str, Any]) -> None:
        """Send a request to one host's engine.

        Raises:
            LabError: there is no engine on this host (any more), or it is gone.
        """
        channel = self._channels.get(host)
        if channel is None:
            raise LabError(f"{host}: its traffic engine no longer runs")
        channel.send(message)

    def _pump(self, host: str) -> None:
        channel, offset = self._channels[host], self.offsets[host].offset_ns
        while not self._closed.is_set():
            message = _receive(channel)
            if self._channels.get(host) is not channel:
                return  # after `drop`, messages of the host no longer belong to the run
            if message is None:
                continue
            if message.get("event") == GONE:
                self.events.put(Event(host=host, message=message))
                with self._clock_replied:
                    self._gone.add(host)
                    self._clock_sent_ns.pop(host, None)
                    self._clock_replied.notify_all()
                return
            self.heard_ns[host] = time.monotonic_ns()
            if message.get("event") == "clock":
                self._record_clock_reply(host, message)
                continue
            for field in TIME_FIELDS:
                if field in message:
                    message[field] += offset
            self.events.put(Event(host=host, message=message))

    def _record_clock_reply(self, host: str, message: Mapping[str, Any]) -> None:
        received_ns = time.monotonic_ns()
        if (seq := message.get("seq") or 0) < 0:
            self.answered[host] = -seq
        with self._clock_replied:
            if message.get("seq") != self._clock_seq:
                return  # the reply to an earlier round
            sent_ns = self._clock_sent_ns.pop(host, None)
            if sent_ns is not None:
                exchange = clock.Exchange(
                    sent_ns=sent_ns, node_ns=int(message["monotonic_ns"]), received_ns=received_ns
                )
                self._exchanges.setdefault(host, []).append(exchange)
            self._clock_replied.notify_all()

    def widen_clocks(self, *, rounds: int = CLOCK_ROUNDS, timeout_s: float = CLOCK_TIMEOUT_S) -> None:
        """Measure all clocks again. The error of each offset then includes the drift since the last measurement.

        An engine that does not answer in time keeps its previous offset. One that is gone is not waited for.
        """
        deadline = time.monotonic() + timeout_s
        with self._clock_replied:
            self._exchanges.clear()
            for _ in range(rounds):
                self._clock_sent_ns.clear()
                self._clock_seq += 1
                for host, channel in self._channels.items():
                    if host in self._gone:
                        continue
                    self._clock_sent_ns[host] = time.monotonic_ns()
                    try:
                        channel.send({"do": "clock", "seq": self._clock_seq})
                    except FaultbedError:
                        del self._clock_sent_ns[host]
                left_s = deadline - time.monotonic()
                if not self._clock_replied.wait_for(lambda: not self._clock_sent_ns, timeout=max(0.0, left_s)):
                    break
            for host, exchanges in self._exchanges.items():
                self.offsets[host] = clock.widened(self.offsets[host], clock.estimate(exchanges))

    def next(self, deadline_ns: int) -> Event | None:
        """Return the next event of any host, or None at the deadline (controller monotonic ns)."""
        try:
            return self.events.get(timeout=max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9))
        except queue.Empty:
            return None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts that run an engine."""
        return tuple(self._channels)

    def forget(self) -> None:
        """Make every engine release its tasks, and wait until all have, so that the next run can use the engines.

        Raises:
            LabError: an engine is gone or does not answer.
        """
        pending = set(self.hosts)
        for host in pending:
            self.send(host, {"do": "forget"})
        deadline_ns = time.monotonic_ns() + int(FORGET_TIMEOUT_S * 1e9)
        while pending:
            event = self.next(deadline_ns)
            if event is None or event.name == GONE:
                raise LabError(f"{', '.join(sorted(pending))}: the traffic engine did not release its tasks")
            if event.name == "forgotten":
                pending.discard(event.host)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Request every engine to quit, wait for it, and close its channel.

        Closing the channel ends its stdin in any case.
        """
        if self._is_closing:
            return
        self._is_closing = True
        for channel in list(self._channels.values()):
            with contextlib.suppress(FaultbedError):
                channel.send({"do": "quit"})
        deadline = Deadline(5.0)
        for pump in self._pumps:
            deadline.join(pump)
        self._closed.set()
        for channel in list(self._channels.values()):
            channel.close()
        deadline = Deadline(2.0)
        for pump in self._pumps:
            deadline.join(pump)


def endpoint(topology: Topology, name: str) -> Endpoint:
    """Return the RNIC named by `host1:rxe0`, or the first RNIC of the host named by `host1`.

    Raises:
        UsageError: the name does not exist or is not an RNIC.
    """
    target = resolve(topology, name)
    if target.kind == "host":
        rnics = topology.host_by_name[target.node].rnics
        if not rnics:
            raise UsageError(f"{name} has no RNIC; name a host that has one")
        return Endpoint(host=target.node, rnic=rnics[0].name, address=rnics[0].ip)
    if target.rnic is None:
        raise UsageError(f'"{name}" is a {target.kind}, and traffic runs between RNICs; name one, such as host1:rxe0')
    return Endpoint(host=target.node, rnic=target.rnic.name, address=target.rnic.ip)


def _receive(channel: Channel) -> dict[str, Any] | None:
    """Return the next message of an engine, `GONE` at its end, or None if there is no message for a second."""
    try:
        message = channel.receive(timeout_s=1.0)
    except CommandFailed:
        return None
    except FaultbedError as error:
        return {"event": GONE, "error": str(error)}
    return {"event": GONE, "error": _stderr_of(channel).lstrip("; ")} if message is None else message


def _stderr_of(channel: Channel) -> str:
    stderr = getattr(channel, "stderr", None)
    text = stderr() if callable(stderr) else ""
    return f"; stderr: {text}" if text else ""
