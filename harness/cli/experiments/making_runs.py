"""Runs of a command, made on its lab one after the other, or by the workers of `--on` on several labs at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from faultbed.harness.cli.context import Session
from faultbed.harness.run import loop
from faultbed.harness.run.loop import Finished, Progress
from faultbed.harness.run.prepare.resolve import ResolvedRun
from faultbed.harness.run.repeats.made_by_workers import made_by
from faultbed.harness.run.workers.worker_places import Place
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.errors import DirtyLab, UsageError
from faultbed.testbed.extras import extra
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.tenancy.lab_lease import hold

__all__ = ["Make", "Progress", "runs_made"]

Make = Callable[[Sequence[ResolvedRun], Path], Generator[Finished, None, None]]
"""What yields the runs of some plans, in their order, with directories in a folder. Closing it ends the others."""


@contextlib.contextmanager
def runs_made(
    session: Session, inventory: Inventory, out: Path, *, place: Place | None, why: str
) -> Iterator[tuple[Make, Progress]]:
    """Yield what makes runs, and what shows their progress. A lab that a run leaves DIRTY is reset before the next one.

    Args:
        session: of the command.
        inventory: the lab, or that of each worker.
        out: the folder of run directories.
        place: where the workers are; None: the runs are made on this lab.
        why: what the lab is reserved for.

    Raises:
        UsageError: the place refuses workers, or the lab has machines of its own.
        DirtyLab: from the generator: a lab could not be reset.
        FaultbedError: from the generator: a run could not be made.
    """
    if place is None:
        with (
            hold(inventory, (), why=why, mode="exclusive") as holding,
            session.progress(also=holding.heartbeat) as progress,
        ):
            backend_of(inventory.kind).make_ready(inventory, progress)
            yield (lambda trials, folder: _made_here(trials, folder, inventory, progress, holding.refresh)), progress
        return
    if not traits_of(inventory.kind).has_snapshot:
        raise UsageError(f"--on {place}: {inventory.name} has machines of its own, which cannot be started twice")
    with extra("scale", "--on"):
        from faultbed.harness.run.workers.open_pool import open_pool  # noqa: PLC0415 - an optional package
    with (
        session.progress() as progress,
        open_pool(place, inventory=inventory.path, runs=out, progress=progress) as workers,
    ):
        yield (lambda trials, folder: made_by(workers, trials, inventory, folder)), progress


def _made_here(
    trials: Sequence[ResolvedRun], out: Path, inventory: Inventory, progress: Progress, guard: Callable[[], None]
) -> Generator[Finished, None, None]:
    for trial in trials:
        finished = loop.execute(trial, inventory, out=out, progress=progress, guard=guard)
        if finished.verdict.lab_state == "DIRTY" and not backend_of(inventory.kind).reset(inventory, progress):
            path = finished.run_dir.path
            raise DirtyLab(f"{inventory.name} is DIRTY after {path}; run `faultbed heal`, then repeat")
        yield finished
