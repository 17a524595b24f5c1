"""Runs the points of a sweep, one after the other, by the same code as a single run; finished runs are not repeated.

    DIR/runs/<run directory>    each run, as `faultbed run` leaves it
    DIR/sweep.json              written anew after every run
    DIR/sweep.parquet, sweep.html  written when the command ends, also by Ctrl-C

The run directories say what is done, and not `sweep.json`: a run counts if its experiment and its plan are byte for
byte those of the point, it has a verdict that is no ERROR, and it left the lab CLEAN. Everything else is run again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from harness.experiment import run_plan
from harness.experiment.metrics import Metric
from harness.experiment.parameters import Parameter
from harness.quantities import format_duration
from harness.record import sweep_file
from harness.record.rundir import RunDir
from harness.record.sweep_file import SweepFile, SweptParameter
from harness.run import loop
from harness.run.prepare.resolve import Decided
from harness.run.sweeps.point_values import MODEL, swept_point, took_s
from harness.run.sweeps.sweep_points import Point, expected_s
from harness.verdict import Verdict
from inject.injector import Mutation
from testbed.errors import UsageError
from testbed.inventory.lab_inventory import Inventory

__all__ = ["Sweep", "find_done"]

Progress = Callable[[str], None]


@dataclass(kw_only=True)
class Sweep:
    """A sweep in its folder: its points, and the runs of each that are done, by the point's number."""

    folder: Path
    inventory: Inventory
    parameters: Sequence[Parameter]
    points: Sequence[Point]
    metrics: Sequence[Metric]
    done: dict[int, list[RunDir]] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        folder: Path,
        inventory: Inventory,
        parameters: Sequence[Parameter],
        points: Sequence[Point],
        metrics: Sequence[Metric],
    ) -> Sweep:
        """Return the sweep with what its folder has of it.

        Raises:
            UsageError: the folder holds the sweep of another experiment or lab.
        """
        before = sweep_file.read(folder)
        name = points[0].experiment.name
        if before is not None and (before.experiment, before.lab) != (name, inventory.name):
            held = f"{before.experiment} on {before.lab}"
            raise UsageError(
                f"{folder}: holds a sweep of {held}, not of {name} on {inventory.name}; choose another --out"
            )
        return cls(
            folder=folder, inventory=inventory, parameters=parameters, points=points, metrics=metrics,
            done=find_done(folder / "runs", points),
        )  # fmt: skip

    def left(self) -> list[tuple[Point, Decided]]:
        """Return the runs that are still to be made, in order."""
        return [
            (point, decided)
            for point in self.points
            for decided in point.runs
            if decided.plan.seed not in {run.read_plan().seed for run in self.done.get(point.number, ())}
        ]

    def expected_s(self) -> dict[int, float | None]:
        """Return how long one run of each point may take, by its number."""
        return expected_s(self.points, {number: [took_s(run) for run in runs] for number, runs in self.done.items()})

    def execute(
        self, *, progress: Progress, guard: Callable[[], None] = lambda: None, mutate: Mutation | None = None
    ) -> SweepFile:
        """Make the runs that are left and return the whole sweep. A DIRTY lab ends it: nothing after it counts.

        Ctrl-C and errors are raised again after the sweep, as far as it has come, is written.
        """
        try:
            left = self.left()
            for index, (point, decided) in enumerate(left):
                progress(f"point {point.number} of {len(self.points)}: {point.name}{self._remaining(left[index:])}")
                finished = loop.execute(
                    decided, self.inventory, out=self.folder / "runs", progress=progress, guard=guard, mutate=mutate
                )
                self.done.setdefault(point.number, []).append(finished.run_dir)
                sweep_file.write(self.result(), self.folder)
                said = finished.verdict
                progress(f"point {point.number}, seed {said.seed}: {said.verdict}, lab {said.lab_state}")
                if said.lab_state == "DIRTY":
                    break
        except BaseException:
            # What is written must not replace the reason why it ends.
            with contextlib.suppress(Exception):
                self.write()
            raise
        return self.write()

    def result(self) -> SweepFile:
        """Return the sweep as far as it has come."""
        points = tuple(
            swept_point(point, self.done.get(point.number, ()), self.metrics, self.folder) for point in self.points
        )
        has_model = any(value.predicted is not None for point in points for value in point.values)
        return SweepFile(
            faultbed=metadata.version("faultbed"),
            experiment=self.points[0].experiment.name,
            lab=self.inventory.name,
            seed=self.points[0].runs[0].plan.seed,
            repeat=len(self.points[0].runs),
            over=tuple(SweptParameter(path=one.path, values=one.values) for one in self.parameters),
            metrics=tuple(metric.name for metric in self.metrics),
            verdict=sweep_file.verdict_of(points),
            lab_state=sweep_file.lab_state_of(points),
            points=points,
            model=MODEL if has_model else "",
        )

    def write(self) -> SweepFile:
        """Write `sweep.json`, `sweep.parquet` and `sweep.html`, and return the sweep."""
        # matplotlib takes a second to import, and most commands draw nothing.
        from harness.report.sweeps import sweep_page  # noqa: PLC0415

        result = self.result()
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep_file.write(result, self.folder)
        sweep_file.write_table(result, self.folder)
        sweep_page.render(result, self.folder)
        return result

    def _remaining(self, left: Sequence[tuple[Point, Decided]]) -> str:
        each = self.expected_s()
        times = [each[point.number] for point, _ in left]
        known = [time for time in times if time is not None]
        if len(known) < len(times):
            return ""
        return f"; {len(left)} run{'s' if len(left) > 1 else ''} left, about {format_duration(sum(known) * 1e9)}"


def find_done(runs: Path, points: Sequence[Point]) -> dict[int, list[RunDir]]:
    """Return the finished runs in a folder that are those of the points, by the point's number, in order of seeds."""
    by_plan = {
        (decided.source, run_plan.encode(decided.plan)): (point.number, decided.plan.seed)
        for point in points
        for decided in point.runs
    }
    found: dict[tuple[int, int], RunDir] = {}
    for path in sorted(runs.iterdir()) if runs.is_dir() else ():
        place = _place(RunDir(path), by_plan)
        if place is not None:
            found[place] = RunDir(path)
    done: dict[int, list[RunDir]] = {}
    for (number, _), run in sorted(found.items()):
        done.setdefault(number, []).append(run)
    return done


def _place(run: RunDir, by_plan: Mapping[tuple[bytes, bytes], tuple[int, int]]) -> tuple[int, int] | None:
    """Return point and seed of a run that counts, or None."""
    try:
        place = by_plan.get((run.read_experiment(), (run.path / "plan.json").read_bytes()))
        if place is None:
            return None
        run.read_measurements()
        said = run.read_verdict()
    except (OSError, UsageError):
        return None
    return place if said.verdict is not Verdict.ERROR and said.lab_state == "CLEAN" else None
