"""Run a sweep's points one after the other, and skip runs that are already finished.

    DIR/runs/<run directory>       one per run, with the same files as those of `faultbed run`
    DIR/sweep.json                 rewritten after every run
    DIR/sweep.parquet, sweep.html  written when the command ends, also after Ctrl-C

The run directories, not `sweep.json`, decide what is finished. A run is finished if

    its experiment and plan are byte-identical to the point's,
    the same sources of faultbed made it (`faultbed.harness.record.code`), with full intensity (no `--control`),
    its verdict is not ERROR, and it left the lab CLEAN,
    it was made on the same kind of machine (accelerator and number of CPUs) as the newest run.

All other runs are made again. A finished run is published under its key (`faultbed.harness.record.run_key`), so that
several shards of a sweep can share its folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from faultbed.harness.error_words import describe
from faultbed.harness.experiment.metrics import Metric
from faultbed.harness.experiment.parameters import Parameter
from faultbed.harness.quantities import format_duration
from faultbed.harness.record import sweep_file
from faultbed.harness.record.run_key import machine_of, publish
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.record.sweep_file import SweepFile, SweptParameter, SweptPoint
from faultbed.harness.run import loop
from faultbed.harness.run.prepare.resolve import ResolvedRun
from faultbed.harness.run.sweeps.finished_runs import find_finished_runs
from faultbed.harness.run.sweeps.point_values import MODEL, swept_point, took_s
from faultbed.harness.run.sweeps.shards import Shard, shard_of
from faultbed.harness.run.sweeps.sweep_points import Point, expected_s
from faultbed.harness.run.workers.run_tasks import make_run, task_of
from faultbed.harness.verdict import ExitCode, LabState, Verdict, worst
from faultbed.inject.injector import Mutation
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["Sweep", "Workers"]

Progress = Callable[[str], None]
T = TypeVar("T")
R = TypeVar("R")


class Workers(Protocol):
    """Labs that make runs at the same time."""

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> Generator[tuple[T, R | Exception], None, None]:
        """Do something with each item on some worker, and yield the results as they come, or the error of one.

        Closing the generator withdraws the items that have not begun.
        """


@dataclass(kw_only=True)
class Sweep:
    """A sweep and its folder.

    Attributes:
        folder: holds the run directories and the sweep's files.
        inventory: the lab that the sweep runs on.
        parameters: the swept parameters with their values.
        points: one for each combination of values, each with its resolved runs.
        metrics: the metrics of the table and the plot.
        shard: makes only the runs of this shard; None: all.
        finished_runs: the finished runs of each point, by the point's number. `execute` adds every run that it makes,
            whatever its verdict.
        is_dirty: whether `execute` ended with an error that leaves the lab DIRTY. The run that raised it is not among
            the finished ones.
    """

    folder: Path
    inventory: Inventory
    parameters: Sequence[Parameter]
    points: Sequence[Point]
    metrics: Sequence[Metric]
    shard: Shard | None = None
    finished_runs: dict[int, list[RunDir]] = field(default_factory=dict)
    is_dirty: bool = field(default=False, init=False)
    _failures: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    _swept: dict[tuple[int, tuple[Path, ...]], SweptPoint] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def open(
        cls,
        folder: Path,
        inventory: Inventory,
        parameters: Sequence[Parameter],
        points: Sequence[Point],
        metrics: Sequence[Metric],
        shard: Shard | None = None,
    ) -> Sweep:
        """Return a sweep with the finished runs in its folder. The folder may be missing.

        Args:
            folder: the sweep's folder.
            inventory: the lab to run on.
            parameters: the swept parameters.
            points: the points, at least one, each with at least one run.
            metrics: the metrics to record.
            shard: the part of the runs to make; None: all.

        Raises:
            UsageError: the folder holds the sweep of another experiment or lab, or its `sweep.json` cannot be read.
        """
        before = sweep_file.read(folder)
        name = points[0].experiment.name
        if before is not None and (before.experiment, before.lab) != (name, inventory.name):
            stored = f"{before.experiment} on {before.lab}"
            raise UsageError(
                f"{folder}: holds a sweep of {stored}, not of {name} on {inventory.name}; choose another --out"
            )
        return cls(
            folder=folder, inventory=inventory, parameters=parameters, points=points, metrics=metrics, shard=shard,
            finished_runs=find_finished_runs(folder / "runs", points),
        )  # fmt: skip

    def pending_runs(self) -> list[tuple[Point, ResolvedRun]]:
        """Return the own runs that are not finished, each with its point, in the order of execution."""
        return [
            (point, resolved)
            for point, resolved in self._own_runs()
            if resolved.plan.seed not in {run.read_plan().seed for run in self.finished_runs.get(point.number, ())}
        ]

    def own_verdict(self) -> tuple[Verdict, LabState]:
        """Return the worst verdict of the shard's runs and whether one left the lab DIRTY; a missing run is undecided.

        The sweep itself is judged over the runs of all shards.
        """
        by_run = {
            (number, verdict.seed): verdict
            for number, runs in self.finished_runs.items()
            for verdict in (run.read_verdict() for run in runs)
        }
        own = [by_run.get((point.number, resolved.plan.seed)) for point, resolved in self._own_runs()]
        is_dirty = self.is_dirty or any(verdict is not None and verdict.lab_state == "DIRTY" for verdict in own)
        verdict = worst(Verdict.INCONCLUSIVE if verdict is None else verdict.verdict for verdict in own)
        return verdict, "DIRTY" if is_dirty else "CLEAN"

    def _own_runs(self) -> list[tuple[Point, ResolvedRun]]:
        runs = [(point, resolved) for point in self.points for resolved in point.runs]
        return runs if self.shard is None else shard_of(self.shard, runs, lambda run: run[1])

    def expected_s(self) -> dict[int, float | None]:
        """Return the expected seconds of one run of each point, by the point's number; None: not known."""
        durations = {number: [took_s(run) for run in runs] for number, runs in self.finished_runs.items()}
        return expected_s(self.points, durations)

    def execute(
        self,
        *,
        progress: Progress,
        guard: Callable[[], None] = lambda: None,
        mutations: Mapping[str, Mutation] | None = None,
    ) -> SweepFile:
        """Make the pending runs and return the whole sweep.

        A run that leaves the lab DIRTY ends the sweep, because runs after it prove nothing. An error or Ctrl-C is
        raised again after the sweep's files are written.

        Args:
            progress: receives a line before and after every run, and the lines of the runs.
            guard: called before and during every run; raises if the lab is no longer reserved for this sweep.
            mutations: for tests: makes a part a no-op (`noop`), or one that also reports success (`lie`), by its name.
        """
        try:
            while pending := self.pending_runs():
                point, resolved = pending[0]
                progress(f"point {point.number} of {len(self.points)}: {point.name}{self._remaining(pending)}")
                runs = self.folder / "runs"
                finished = loop.execute(
                    resolved, self.inventory, out=runs, progress=progress, guard=guard, mutations=mutations
                )
                run_dir = publish(finished.run_dir)
                self.finished_runs.setdefault(point.number, []).append(run_dir)
                self._drop_runs_of_other_machines(run_dir, progress)
                if self.shard is None:  # with shards, each writes the file once, with the runs of all
                    sweep_file.write(self.snapshot(), self.folder)
                verdict = finished.verdict
                progress(f"point {point.number}, seed {verdict.seed}: {verdict.verdict}, lab {verdict.lab_state}")
                if verdict.lab_state == "DIRTY":
                    break
        except BaseException as error:
            self.is_dirty = getattr(error, "exit_code", None) == ExitCode.DIRTY
            # An error while writing must not hide the error or interrupt that ended the sweep.
            with contextlib.suppress(Exception):
                self.write_outputs()
            raise
        return self.write_outputs()

    def execute_on(self, workers: Workers, progress: Progress) -> SweepFile:
        """Make the pending runs on several labs at a time, and return the whole sweep.

        A run that a worker could not make or record makes its point an ERROR, and the others go on. What ends the
        command is raised again after the sweep's files are written.

        Args:
            workers: where runs are made.
            progress: receives a line after every run.
        """
        tasks = {
            task_of(resolved, self.inventory.path, self.folder / "runs"): point
            for point, resolved in self.pending_runs()
        }
        try:
            for task, outcome in workers.map(make_run, list(tasks)):
                point = tasks[task]
                if isinstance(outcome, Exception):
                    self._failures[point.number] = f"seed {task.seed}: {describe(outcome)}"
                    progress(f"point {point.number}, {self._failures[point.number]}")
                    continue
                self._add(point, RunDir(self.folder / "runs" / outcome.name), progress)
        finally:
            written = self.write_outputs()
        return written

    def _add(self, point: Point, run: RunDir, progress: Progress) -> None:
        runs = self.finished_runs.setdefault(point.number, [])
        runs.append(run)
        runs.sort(key=lambda one: one.read_verdict().seed)
        self._drop_runs_of_other_machines(run, progress)
        sweep_file.write(self.snapshot(), self.folder)
        verdict = run.read_verdict()
        left = len(self.pending_runs())
        progress(f"point {point.number}, seed {verdict.seed}: {verdict.verdict}, lab {verdict.lab_state}; {left} left")

    def snapshot(self) -> SweepFile:
        """Return the contents of `sweep.json` for the runs that are finished now."""
        points = tuple(self._swept_point(point) for point in self.points)
        has_model = any(value.predicted is not None for point in points for value in point.values)
        return SweepFile(
            faultbed=metadata.version("faultbed"),
            experiment=self.points[0].experiment.name,
            lab=self.inventory.name,
            seed=self.points[0].runs[0].plan.seed,
            repeat=len(self.points[0].runs),
            over=tuple(SweptParameter(path=parameter.path, values=parameter.values) for parameter in self.parameters),
            metrics=tuple(metric.name for metric in self.metrics),
            verdict=sweep_file.verdict_of(points),
            lab_state="DIRTY" if self.is_dirty else sweep_file.lab_state_of(points),
            points=points,
            model=MODEL if has_model else "",
        )

    def write_outputs(self) -> SweepFile:
        """Write `sweep.json`, `sweep.parquet` and `sweep.html` for the finished runs, and return the sweep.

        Raises:
            OSError: the folder or a file cannot be written.
        """
        # matplotlib takes a second to import, and most commands draw nothing.
        from faultbed.harness.report.sweeps import sweep_page  # noqa: PLC0415

        if self.shard is not None:
            self._add_runs_of_other_shards()
        snapshot = self.snapshot()
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep_file.write(snapshot, self.folder)
        sweep_file.write_table(snapshot, self.folder)
        sweep_page.render(snapshot, self.folder)
        return snapshot

    def _add_runs_of_other_shards(self) -> None:
        """Add the runs that other shards have published in the folder meanwhile, on the same kind of machine."""
        mine = {machine_of(run.read_environment()) for runs in self.finished_runs.values() for run in runs}
        for number, runs in find_finished_runs(self.folder / "runs", self.points).items():
            own = self.finished_runs.setdefault(number, [])
            seeds = {run.read_verdict().seed for run in own}
            comparable = [run for run in runs if not mine or machine_of(run.read_environment()) in mine]
            own += [run for run in comparable if run.read_verdict().seed not in seeds]
            own.sort(key=lambda run: run.read_verdict().seed)

    def _drop_runs_of_other_machines(self, newest: RunDir, progress: Progress) -> None:
        """Make runs pending again that were made on another kind of machine: their times cannot be compared."""
        mine = machine_of(newest.read_environment())
        for number, runs in self.finished_runs.items():
            comparable = [run for run in runs if machine_of(run.read_environment()) == mine]
            if dropped := len(runs) - len(comparable):
                other_machine = next(machine_of(run.read_environment()) for run in runs if run not in comparable)
                progress(
                    f"point {number}: {dropped} finished runs discarded: made with {other_machine}, the newest with "
                    f"{mine}"
                )
                self.finished_runs[number] = comparable

    def _swept_point(self, point: Point) -> SweptPoint:
        """Judge a point by its finished runs; again only when there are more, because each run has to be observed."""
        runs = self.finished_runs.get(point.number, [])
        key = point.number, tuple(run.path for run in runs)
        if key not in self._swept:
            self._swept[key] = swept_point(point, runs, self.metrics, self.folder)
        swept = self._swept[key]
        if (failure := self._failures.get(point.number)) is not None:
            return msgspec.structs.replace(swept, verdict=Verdict.ERROR, why=failure, values=())
        return swept

    def _remaining(self, pending: Sequence[tuple[Point, ResolvedRun]]) -> str:
        expected_by_point = self.expected_s()
        times = [expected_by_point[point.number] for point, _ in pending]
        known = [time for time in times if time is not None]
        if len(known) < len(times):
            return ""
        return f"; {len(pending)} run{'s' if len(pending) > 1 else ''} left, about {format_duration(sum(known) * 1e9)}"
