"""Probes beside the workload of an experiment that asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from harness.experiment.experiment_file import Experiment
from testbed.lab import Lab
from testbed.observe.telemetry import Change
from traffic.probes import prober
from traffic.probes.prober import Probing

__all__ = ["both", "probing"]


def probing(
    experiment: Experiment, lab: Lab, progress: Callable[[str], None] = lambda _text: None
) -> AbstractContextManager[Probing | None]:
    """Probes on every way through the lab while the block lasts; None: the experiment wants none.

    They are no progress of the run: a lab is not held for a workload that hangs because its probes go on.

    Raises:
        UsageError: the lab has no two hosts to probe between.
        LabError: they could not be started.
    """
    if experiment.probe is None:
        return contextlib.nullcontext()
    progress(f"probing {len(prober.pairs(lab.topology))} pairs of RNICs")
    return prober.start(lab, experiment.probe)


def both(first: Callable[[Change], None], probing: Probing | None) -> Callable[[Change], None]:
    """Tells of changes, and lets the probes look for new ways when those may have changed."""

    def told(change: Change) -> None:
        first(change)
        if probing is not None and change.subject != "kernel":
            probing.changed()

    return told
