"""What parts do while a workload runs: the passes of a run, and what a part keeps of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.ledger.sealed import Evidence, Phase
from faultbed.harness.record.rundir import RunDir
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe.telemetry import Change

__all__ = ["Active", "Ended", "Pass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One workload, from before its start until everything beside it is released.

    `progress` is called with each progress line; in the twin it prints nothing.
    """

    phase: Phase
    experiment: Experiment
    lab: Lab
    progress: Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A pass that is over.

    Attributes:
        phase: which one.
        run_dir: where large series are written, beside the evidence.
        t0_ns: when the measured work began (controller ns).
        windows: first firing (or arming) and removal of each fault (controller ns).
    """

    phase: Phase
    run_dir: RunDir
    t0_ns: int
    windows: Mapping[str, tuple[int, int]]


class Active:
    """A part in one pass. Its `around` starts it and releases it; by default nothing else happens."""

    def on_change(self, change: Change) -> None:
        """Handle a change that a machine's kernel reported. Called from the thread that reads it: never wait."""

    def end(self) -> None:
        """Take the last looks: the workload is over, and nothing is released yet.

        Raises:
            LabError: a machine did not answer.
        """

    def sealed(self, _ended: Ended) -> Evidence | None:
        """Return what the part knows of the pass; None: nothing, so that every claim about it is unknown.

        Raises:
            OSError: the run directory cannot be written.
        """
        return None
