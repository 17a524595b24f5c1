"""Counters and changes of a lab over time: each machine's watcher samples and listens, all in one clock.

    with telemetry.start(lab) as following:
        ...
        recorded = following.stop()

There are ten samples a second, or fewer if they would cost a machine more than a thousandth of a CPU
(`faultbed.testbed.node.watch`); each has its time. Changes of links, routes and next hops come from the kernels at
once, without sampling.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from faultbed.testbed.errors import FaultbedError, LabError
from faultbed.testbed.observe.clock import ClockOffset, widened
from faultbed.testbed.observe.watcher import Watcher
from faultbed.testbed.side_by_side import on_each

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab

__all__ = ["CHANGES_LOST", "EVERY_MS", "REPORT_MS", "Change", "Following", "Machine", "Recorded", "Sample", "start"]

EVERY_MS = 100
REPORT_MS = 4000
"""How often samples are sent: sending costs an emulated machine as much as two samples."""
_START_S, _STOP_S = 240.0, 20.0
"""Deadlines of all machines to begin, and of each to stop. A machine without a watcher starts an interpreter first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Counters and states of a node that have moved since the last sample. `at_ns` is controller time."""

    at_ns: int
    node: str
    values: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A link, a route or a next hop that is new or has changed; `text` None: it is gone.

    `subject` and `text` are those of a fingerprint (`faultbed.testbed.node.state`), such as `link ctsw1` and `UP mtu
    4200 ...`. If the subject is `kernel`, the change is a message in a machine's kernel log: level (0 to 3 are errors)
    and text. `at_ns` is when the kernel reported it, in controller time.
    """

    at_ns: int
    node: str
    subject: str
    text: str | None


CHANGES_LOST = "news"
"""Subject of a change that reports a loss: the watcher read too late, and the kernel dropped changes (ENOBUFS)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The cost of watching a machine (CPU time in ns, number of samples), and the uncertainty of its times.

    Its clock offset is measured at the start and at the end: `clock_error_ns` covers both.
    """

    name: str
    samples: int
    busy_ns: int
    clock_error_ns: int
    lost: str | None = None
    """Why its data end too early; None: they are complete."""
    no_log: str | None = None
    """Why its kernel's log was not followed; None: it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """All samples and changes, in order of time."""

    samples: tuple[Sample, ...] = ()
    changes: tuple[Change, ...] = ()
    machines: tuple[Machine, ...] = ()


@dataclass(kw_only=True)
class _MachineData:
    """The data of one machine, filled by its watcher's thread."""

    watcher: Watcher
    samples: list[Sample] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    count: int = 0
    busy_ns: int = 0
    at_ns: int = field(default_factory=time.monotonic_ns)
    no_log: str | None = None
    clocks: list[ClockOffset] = field(default_factory=list)
    """Clock offsets measured at the end."""


def start(
    lab: Lab,
    nodes: Iterable[str] | None = None,
    *,
    every_ms: int = EVERY_MS,
    report_ms: int = REPORT_MS,
    on_sample: Callable[[Sample], None] = lambda _: None,
    on_change: Callable[[Change], None] = lambda _: None,
) -> Following:
    """Begin to follow some nodes (default: every host and switch).

    `on_sample` is called for each sample and `on_change` for each change, on the watchers' threads.

    Raises:
        Unreachable: a machine does not answer.
        LabError: a machine cannot watch.
    """
    following = Following(lab, on_sample, on_change)
    try:
        following.follow(nodes, every_ms, report_ms)
    except BaseException:
        following.close()
        raise
    return following


class Following:
    """Running telemetry, made by `start`; its end stops the sampling."""

    def __init__(self, lab: Lab, on_sample: Callable[[Sample], None], on_change: Callable[[Change], None]) -> None:
        self._lab = lab
        self._on_sample, self._on_change = on_sample, on_change
        self._data: dict[str, _MachineData] = {}
        self._lost: dict[str, str] = {}
        self._lock = threading.Lock()

    def follow(self, nodes: Iterable[str] | None, every_ms: int, report_ms: int) -> None:
        """Send the request to all machines. Called by `start`."""
        topology = self._lab.topology
        followed = (*topology.host_by_name, *topology.switch_by_name) if nodes is None else tuple(nodes)
        machines = self._lab.carried(followed)

        def follow_machine(machine: str) -> None:
            watcher = self._lab.watcher(machine)
            watcher.renew_clock()
            data = self._data[machine] = _MachineData(watcher=watcher)
            watcher.on_news = lambda message: self._record(data, message)
            request = {"do": "follow", "nodes": machines[machine], "every_ms": every_ms, "report_ms": report_ms}
            data.no_log = self._lab.request(machine, request).get("no_log")

        on_each(machines, follow_machine, timeout_s=_START_S)

    def heard_ns(self) -> dict[str, int]:
        """Return when the last message of each machine arrived (controller time); samples come every `report_ms`."""
        with self._lock:
            return {name: data.at_ns for name, data in self._data.items()}

    def without_log(self) -> list[str]:
        """Return the machines whose kernel's log is not followed."""
        return [name for name, data in self._data.items() if data.no_log is not None]

    def _record(self, data: _MachineData, message: Mapping[str, Any]) -> None:
        offset = data.watcher.offset
        data.at_ns = time.monotonic_ns()
        if message["event"] == "change":
            change = Change(
                at_ns=offset.to_controller(message["at_ns"]),
                node=message["node"] or data.watcher.machine,
                subject=message["subject"],
                text=message["text"],
            )
            with self._lock:
                data.changes.append(change)
            self._on_change(change)
            return
        data.busy_ns += message["busy_ns"]
        for at_ns, nodes in message["samples"]:
            data.count += 1
            for node, values in nodes.items():
                sample = Sample(at_ns=offset.to_controller(at_ns), node=node, values=values)
                with self._lock:
                    data.samples.append(sample)
                self._on_sample(sample)

    def stop(self) -> Recorded:
        """Stop, and return all samples and changes. Machines that no longer answer are named in the result."""
        self.close()
        with self._lock:
            data = dict(self._data)
            return Recorded(
                samples=tuple(
                    sorted(
                        (sample for machine_data in data.values() for sample in machine_data.samples),
                        key=lambda sample: sample.at_ns,
                    )
                ),
                changes=tuple(
                    sorted(
                        (change for machine_data in data.values() for change in machine_data.changes),
                        key=lambda change: change.at_ns,
                    )
                ),
                machines=tuple(
                    Machine(
                        name=name,
                        samples=machine_data.count,
                        busy_ns=machine_data.busy_ns,
                        clock_error_ns=widened(machine_data.watcher.offset, *machine_data.clocks).error_ns,
                        lost=self._lost.get(name),
                        no_log=machine_data.no_log,
                    )
                    for name, machine_data in data.items()
                ),
            )

    def close(self) -> None:
        """Stop the machines; safe to call twice."""

        def stop_machine(machine: str) -> None:
            watcher = self._data[machine].watcher
            try:
                if watcher.on_news is not None:
                    # Not by `Lab.request`: a watcher that was restarted follows nothing.
                    watcher.request({"do": "unfollow"}, timeout_s=_STOP_S)
                    self._data[machine].clocks.append(watcher.clock())
            except LabError as error:
                self._lost[machine] = str(error)
            watcher.on_news = None

        if self._data:
            with contextlib.suppress(FaultbedError):
                on_each(self._data, stop_machine, timeout_s=2 * _STOP_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
