"""What a lab counts and what changes on it over time: each machine's watcher samples and listens, all in one clock.

    with telemetry.start(lab) as following:
        ...
        recorded = following.stop()

Ten samples a second, or fewer where they would cost a machine more than a thousandth of a CPU
(`testbed.node.watch`): when each was taken stands beside it. Changes of links, routes and next hops are told by the
kernels at once, and are not sampled.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from testbed.errors import FaultbedError, LabError
from testbed.observe.clock import ClockOffset, widened
from testbed.observe.watcher import Watcher

if TYPE_CHECKING:
    from testbed.lab import Lab

__all__ = ["EVERY_MS", "TELL_MS", "Change", "Following", "Machine", "Recorded", "Sample", "start"]

EVERY_MS = 100
TELL_MS = 4000
"""How often samples are sent: an emulated machine pays as much for each time that it tells some as for two samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Counters and states of a node that have moved since the sample before. `at_ns`: the controller's clock."""

    at_ns: int
    node: str
    values: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A link, a route or a next hop that is new or otherwise than before; `text` None: it is gone.

    Or, with the subject `kernel`, what a machine's kernel has written to its log: level (0 to 3 are errors) and text.

    `subject` and `text` are those of a fingerprint (`testbed.node.state`), such as `link ctsw1` and
    `UP mtu 4200 ...`. `at_ns` is when the kernel told it, in the controller's clock.
    """

    at_ns: int
    node: str
    subject: str
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What watching cost a machine: CPU time in ns, number of samples; and how wrong its times may be.

    Its clock is measured before and after: what the two say differently is in `clock_error_ns`.
    """

    name: str
    samples: int
    busy_ns: int
    clock_error_ns: int
    lost: str | None = None
    """Why there is nothing of it from some time on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What was followed, in order of time."""

    samples: tuple[Sample, ...] = ()
    changes: tuple[Change, ...] = ()
    machines: tuple[Machine, ...] = ()


@dataclass(kw_only=True)
class _Heard:
    """Of one machine; filled by its watcher's thread."""

    watcher: Watcher
    samples: list[Sample] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    count: int = 0
    busy_ns: int = 0
    at_ns: int = field(default_factory=time.monotonic_ns)
    clocks: list[ClockOffset] = field(default_factory=list)
    """Measured at the end."""


def start(
    lab: Lab,
    nodes: Iterable[str] | None = None,
    *,
    every_ms: int = EVERY_MS,
    tell_ms: int = TELL_MS,
    on_sample: Callable[[Sample], None] = lambda _: None,
    on_change: Callable[[Change], None] = lambda _: None,
) -> Following:
    """Begin to follow some nodes (default: every host and switch).

    `on_sample` and `on_change` are told as it comes, on the watchers' threads.

    Raises:
        Unreachable: a machine does not answer.
        LabError: it cannot watch.
    """
    following = Following(lab, on_sample, on_change)
    try:
        following.follow(nodes, every_ms, tell_ms)
    except BaseException:
        following.close()
        raise
    return following


class Following:
    """Telemetry that runs. Made by `start`; its end, in whatever way, ends the sampling."""

    def __init__(self, lab: Lab, on_sample: Callable[[Sample], None], on_change: Callable[[Change], None]) -> None:
        self._lab = lab
        self._on_sample, self._on_change = on_sample, on_change
        self._heard: dict[str, _Heard] = {}
        self._lost: dict[str, str] = {}
        self._lock = threading.Lock()

    def follow(self, nodes: Iterable[str] | None, every_ms: int, tell_ms: int) -> None:
        """Ask all machines. Called by `start`."""
        topology = self._lab.topology
        wanted = (*topology.host_by_name, *topology.switch_by_name) if nodes is None else tuple(nodes)
        machines = self._lab.carried(wanted)

        def one(machine: str) -> None:
            watcher = self._lab.watcher(machine)
            watcher.renew_clock()
            heard = self._heard[machine] = _Heard(watcher=watcher)
            watcher.on_news = lambda message: self._take(heard, message)
            asked = {"do": "follow", "nodes": machines[machine], "every_ms": every_ms, "tell_ms": tell_ms}
            self._lab.ask(machine, asked)

        with ThreadPoolExecutor(max_workers=max(1, len(machines))) as pool:
            list(pool.map(one, machines))

    def heard_ns(self) -> dict[str, int]:
        """When each machine has told something last (controller's clock, ns); samples are told every `tell_ms`."""
        with self._lock:
            return {name: heard.at_ns for name, heard in self._heard.items()}

    def _take(self, heard: _Heard, message: Mapping[str, Any]) -> None:
        offset = heard.watcher.offset
        heard.at_ns = time.monotonic_ns()
        if message["event"] == "change":
            change = Change(
                at_ns=offset.to_controller(message["at_ns"]),
                node=message["node"] or heard.watcher.machine,
                subject=message["subject"],
                text=message["text"],
            )
            with self._lock:
                heard.changes.append(change)
            self._on_change(change)
            return
        heard.busy_ns += message["busy_ns"]
        for at_ns, nodes in message["samples"]:
            heard.count += 1
            for node, values in nodes.items():
                sample = Sample(at_ns=offset.to_controller(at_ns), node=node, values=values)
                with self._lock:
                    heard.samples.append(sample)
                self._on_sample(sample)

    def stop(self) -> Recorded:
        """End it, and give what was heard. A machine that does not answer any more is named, never left out."""
        self.close()
        with self._lock:
            heard = dict(self._heard)
            return Recorded(
                samples=tuple(sorted((x for one in heard.values() for x in one.samples), key=lambda x: x.at_ns)),
                changes=tuple(sorted((x for one in heard.values() for x in one.changes), key=lambda x: x.at_ns)),
                machines=tuple(
                    Machine(
                        name=name,
                        samples=one.count,
                        busy_ns=one.busy_ns,
                        clock_error_ns=widened(one.watcher.offset, *one.clocks).error_ns,
                        lost=self._lost.get(name),
                    )
                    for name, one in heard.items()
                ),
            )

    def close(self) -> None:
        """Ask the machines to stop; safe to call twice."""

        def one(machine: str) -> None:
            watcher = self._heard[machine].watcher
            try:
                if watcher.on_news is not None:
                    # Not through `Lab.ask`: a watcher that was started anew follows nothing.
                    watcher.ask({"do": "unfollow"}, timeout_s=20.0)
                    self._heard[machine].clocks.append(watcher.clock())
            except LabError as error:
                self._lost[machine] = str(error)
            watcher.on_news = None

        if self._heard:
            with ThreadPoolExecutor(max_workers=len(self._heard)) as pool, contextlib.suppress(FaultbedError):
                list(pool.map(one, self._heard))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
