"""What parts do while a workload runs: the passes of a run, and what a part is in each of them.

    calibrate()                 before all passes, alone on the lab
    with around():              the part prepares; at the end of the block it releases, also after an error
        begin()                 the workload sends
        with watching():        faults are on and off; the part may request that the pass ends early
            drive()             the part acts on the lab, until it has done everything
        end()                   the workload is over, and nothing is released yet: last looks
    sealed()                    what the part knows of the pass

`faultbed.harness.run.loop` calls these for every part of the registry, and knows no part by its name.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.ledger.sealed import Evidence, Phase
from faultbed.harness.parts.pass_records import FaultsRecord, Readings, WorkloadRecord
from faultbed.harness.record.rundir import RunDir
from faultbed.inject.injector import Mutation
from faultbed.inject.journal import Journal
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe.telemetry import Change

__all__ = ["Active", "Calibration", "EarlyEnd", "Pass", "PassRefuted", "Setting"]


class PassRefuted(LabError):
    """A pass ended with wrong data: a result of the workload and no error of the harness. The run ends with it."""


class EarlyEnd:
    """Whether a pass is to end before its workload does, and why. Thread-safe; only the first reason counts.

    `reason` is for the journal and for people. `error` is what went wrong with the harness itself; None: nothing.
    """

    def __init__(self) -> None:
        self._event, self._lock = threading.Event(), threading.Lock()
        self.reason: str | None = None
        self.error: str | None = None

    def request(self, reason: str, *, error: str | None = None) -> None:
        """Request the end: all faults are cleared, and then the workload is stopped."""
        with self._lock:
            if self.reason is None:
                self.reason, self.error = reason, error
        self._event.set()

    @contextlib.contextmanager
    def until_driven(self) -> Iterator[None]:
        """Have all faults cleared at once if the block ends by an exception, such as Ctrl-C."""
        try:
            yield
        except BaseException:
            self._event.set()
            raise

    @property
    def is_requested(self) -> bool:
        """Whether the end was requested, or faults are to be cleared."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until the end is requested, at most for some seconds; return whether it is."""
        return self._event.wait(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all passes of a run have in common.

    Attributes:
        experiment: bound to the lab.
        plan: `plan.json`.
        faults: the faults of the plan, with how the lab carries them out.
        ranks: the RNIC of each rank of the workload (`host3:rxe0`), in rank order; empty for flows.
        lab: reserved for this run.
        journal: where every change is written before it is made.
        run_dir: where large series are written, beside the evidence.
        progress: called with each progress line.
        mutations: by the name of a part, how a test makes it a no-op; empty: every part does what it says.
        errors: errors of the harness itself, to which parts add theirs. Any of them makes the run an ERROR.
    """

    experiment: Experiment
    plan: Plan
    faults: Sequence[PlannedFault]
    ranks: Sequence[str]
    lab: Lab
    journal: Journal
    run_dir: RunDir
    progress: Callable[[str], None]
    mutations: Mapping[str, Mutation] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The lab before all passes, in its known state and without a workload.

    `to_known_state` restores that state after a change.
    """

    setting: Setting
    to_known_state: Callable[[], None]


@dataclass(kw_only=True)
class Pass:
    """One workload, from before its start until everything beside it is released.

    Attributes:
        phase: which pass of the run it is.
        setting: what it has in common with the other passes.
        earlier: the passes of the run that are over, by phase.
        work: its workload.
        injected: its faults.
        readings: what the machines of the lab reported.
        ending: whether it is to end early.
        active: the parts that take part in it, by name.
        is_sealed: its evidence is on disk.
    """

    phase: Phase
    setting: Setting
    earlier: Mapping[Phase, Pass] = field(default_factory=dict)
    work: WorkloadRecord = field(default_factory=WorkloadRecord)
    injected: FaultsRecord = field(default_factory=FaultsRecord)
    readings: Readings = field(default_factory=Readings)
    ending: EarlyEnd = field(default_factory=EarlyEnd)
    active: dict[str, Active] = field(default_factory=dict)
    is_sealed: bool = False

    def progress(self, line: str) -> None:
        """Print a progress line, if this is the measured pass."""
        if self.phase == "measured":
            self.setting.progress(line)

    def on_event(self, event: dict[str, Any]) -> None:
        """Pass an event of the workload to every part."""
        for part in self.active.values():
            part.on_event(event)

    def on_change(self, change: Change) -> None:
        """Pass a change that a machine's kernel reported to every part."""
        for part in self.active.values():
            part.on_change(change)

    def value(self, name: str) -> float | None:
        """Return the present value of a live metric, from the part that has it; None: unknown.

        Raises:
            FaultbedError: the part can no longer measure it.
        """
        values = (part.value(name) for part in self.active.values())
        return next((value for value in values if value is not None), None)

    def doubts(self) -> tuple[str, ...]:
        """Return why the workload may not have been healthy before the first fault."""
        return tuple(doubt for part in self.active.values() for doubt in part.doubts())

    def left(self) -> tuple[str, ...]:
        """Return one sentence for each thing that parts may have left on the lab, which makes it DIRTY."""
        return tuple(sentence for part in self.active.values() for sentence in part.left())


class Active:
    """A part in one pass. By default nothing happens in it."""

    def around(self) -> AbstractContextManager[None]:
        """Prepare the part, and release it at the end of the block, also after an error.

        Raises:
            UsageError: the lab does not have what the part needs.
            LabError: a machine refused or did not answer.
        """
        return contextlib.nullcontext()

    def begin(self) -> None:
        """Note that the workload sends. `Pass.work` has its times and paths."""

    def on_event(self, event: dict[str, Any]) -> None:
        """Handle an event of the workload. Called from the workload's own thread: never wait."""

    def on_change(self, change: Change) -> None:
        """Handle a change that a machine's kernel reported. Called from the thread that reads it: never wait."""

    def value(self, name: str) -> float | None:  # noqa: ARG002
        """Return the present value of a live metric; None: it is unknown, or not of this part."""
        return None

    def watching(self) -> AbstractContextManager[None]:
        """Watch the run while parts drive it."""
        return contextlib.nullcontext()

    def drive(self) -> None:
        """Act on the lab while the workload runs, until everything is done or the end of the pass is requested."""

    def doubts(self) -> Iterable[str]:
        """Return why the workload may not have been healthy before the first fault."""
        return ()

    def end(self) -> None:
        """Take the last looks: the workload is over, and nothing is released yet.

        Raises:
            LabError: a machine did not answer, or the pass shows that the next ones are pointless.
        """

    def left(self) -> Iterable[str]:
        """Return one sentence for each thing that may still be on the lab after the release."""
        return ()

    def sealed(self) -> Evidence | None:
        """Return what the part knows of the pass; None: nothing, so that every claim about it is unknown.

        Raises:
            OSError: the run directory cannot be written.
        """
        return None
