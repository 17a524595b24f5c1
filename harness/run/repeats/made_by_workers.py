"""The repeats of a run, made on several labs at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

from faultbed.harness.record.run_key import machine_of
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run.loop import Finished
from faultbed.harness.run.prepare.resolve import ResolvedRun
from faultbed.harness.run.repeats.in_order import in_order
from faultbed.harness.run.sweeps.sweep_runner import Workers
from faultbed.harness.run.workers.run_tasks import make_run, task_of
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["made_by"]


def made_by(
    workers: Workers, trials: Sequence[ResolvedRun], inventory: Inventory, out: Path
) -> Generator[Finished, None, None]:
    """Yield the runs that workers make, in the order of the trials. Closing it withdraws those that have not begun.

    Raises:
        FaultbedError: a run could not be made; the others do not decide without it.
        UsageError: two runs were made on two kinds of machine.
    """
    tasks = [task_of(trial, inventory.path, out) for trial in trials]
    machines: dict[str, Path] = {}
    with contextlib.closing(workers.map(make_run, tasks)) as arriving:
        for outcome in in_order(arriving, tasks):
            if isinstance(outcome, Exception):
                raise outcome
            run = RunDir(out / outcome.name)
            machines.setdefault(machine_of(run.read_environment()), run.path)
            if len(machines) > 1:
                (first, path), (second, other) = machines.items()
                raise UsageError(
                    f"--on: {path} was made with {first}, {other} with {second}; use workers of one kind of machine"
                )
            yield Finished(run_dir=run, verdict=run.read_verdict(), report=run.report)
