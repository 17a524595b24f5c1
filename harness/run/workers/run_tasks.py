"""What a worker is given to do: one run of a sweep. A run whose key is published already is not made again."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import faultbed
from faultbed.harness.experiment import experiment_file, run_plan
from faultbed.harness.record import code
from faultbed.harness.record.run_key import key_of_run, may_publish, publish
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run import loop
from faultbed.harness.run.prepare.resolve import ResolvedRun
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.tenancy.lab_lease import hold

__all__ = ["RunTask", "make_run", "task_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTask:
    """One run: what it is (`experiment`, `plan`: the files' bytes), on which lab, and where its directory goes.

    `source` is what messages call the experiment, and where its trace is looked for. `code` is the digest of the
    sources that planned it.
    """

    experiment: bytes
    plan: bytes
    source: str
    seed: int
    code: str
    inventory: Path
    runs: Path


def task_of(resolved: ResolvedRun, inventory: Path, runs: Path) -> RunTask:
    """Return the task of a run, with absolute paths."""
    return RunTask(
        experiment=resolved.source, plan=run_plan.encode(resolved.plan), source=str(resolved.experiment.source),
        seed=resolved.plan.seed, code=code.digest(), inventory=inventory.absolute(), runs=runs.absolute(),
    )  # fmt: skip


def make_run(task: RunTask) -> Path:
    """Make a run on this process's lab, and return its directory: published under its key, if it counts again.

    Raises:
        UsageError: this machine's faultbed or inventory would make another run.
        FaultbedError: the run could not be made, or not recorded.
    """
    inventory = lab_inventory.load(task.inventory)
    experiment = experiment_file.decode(task.experiment, source=task.source)
    resolved = loop.resolve(experiment, task.experiment, inventory, seed=task.seed)
    if (run_plan.encode(resolved.plan), code.digest()) != (task.plan, task.code):
        here = f"faultbed {faultbed.__version__} with {task.inventory} plans another run on this worker"
        raise UsageError(f"{here}; install the same version everywhere, and start the sweep again")
    if (known := _published(task)) is not None:
        return known.path
    with hold(inventory, (), why=f"run {resolved.plan.experiment}", mode="exclusive") as holding:
        backend = backend_of(inventory.kind)
        backend.make_ready(inventory, _say)
        finished = loop.execute(resolved, inventory, out=task.runs, progress=_say, guard=holding.refresh)
        if finished.verdict.lab_state == "DIRTY" and not backend.reset(inventory, _say):
            raise LabError(
                f"{finished.run_dir.path}: {inventory.name} is DIRTY and cannot be reset; restore it by hand"
            )
    return publish(finished.run_dir).path


def _published(task: RunTask) -> RunDir | None:
    """Return the run of this task if it is published, made on this kind of machine; None: it has to be made."""
    for path in task.runs.glob(f"*-{task.seed}-*"):
        run = RunDir(path)
        with contextlib.suppress(UsageError, OSError):
            is_same = (run.read_experiment(), run.read_bytes("plan.json")) == (task.experiment, task.plan)
            if is_same and run.read_environment().code == task.code and may_publish(run) and _is_under_key(run):
                return run
    return None


def _is_under_key(run: RunDir) -> bool:
    """Return whether a run is published, and made on a machine with as many CPUs as this one."""
    cpus = run.read_environment().cpu_count
    return run.path.name.endswith(key_of_run(run)[:16]) and cpus == (os.cpu_count() or 0)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
