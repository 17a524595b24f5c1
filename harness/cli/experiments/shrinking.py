"""The command that makes a failing experiment small: shrink."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.text import Text

from faultbed.harness.check_places import Place, places
from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.experiments.making_runs import Make, Progress, runs_made
from faultbed.harness.cli.options.experiment_seed import SEED
from faultbed.harness.cli.options.names import experiment_argument
from faultbed.harness.cli.options.sharding import workers_options
from faultbed.harness.experiment import experiment_file as experiment_module
from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.run import loop as run_module
from faultbed.harness.run.loop import Finished
from faultbed.harness.run.prepare.resolve import ResolvedRun
from faultbed.harness.run.repeats import shrink as shrink_module
from faultbed.harness.run.repeats.shrink import Subset
from faultbed.harness.run.workers.worker_places import Place as WorkerPlace
from faultbed.harness.run.workers.worker_places import with_options
from faultbed.harness.run.workload_kinds import kind_of
from faultbed.harness.verdict import ExitCode, Verdict
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["COMMANDS"]

_NOT_OF_THE_WORKLOAD = frozenset({"lab_restored", "harness"})
"""Checks whose failure is no failure of the experiment."""


@dataclass(kw_only=True)
class _Search:
    """Runs of parts of one experiment; `failed_with_all` are the checks that failed with all its faults.

    `make` yields the runs of some plans, in their order.
    """

    source: bytes
    experiment: Experiment
    inventory: Inventory
    seed: int | None
    out: Path
    most: int
    progress: Progress
    make: Make
    failed_with_all: frozenset[Place] = frozenset()
    tried: list[tuple[Subset, Finished]] = field(default_factory=list)

    @property
    def ids(self) -> tuple[str, ...]:
        """The faults, by name."""
        return tuple(fault.id for fault in self.experiment.faults)

    def named(self, some: Subset) -> str:
        """Return the ids of some faults, separated by commas."""
        return ", ".join(self.ids[number] for number in some) or "no faults"

    def runs_of(self, candidates: Sequence[Subset], out: Path) -> Generator[tuple[Subset, Finished], None, None]:
        """Yield the runs with some of the faults, in the order of the candidates. Closing it ends those that go on.

        A candidate that cannot be planned has no run. For example, a stop condition may need a fault that is left out.

        Raises:
            UsageError: `most` runs are done already.
            DirtyLab: the run changed the lab, and the reset did not restore it.
        """
        planned = [(some, resolved) for some in candidates if (resolved := self._resolved(some)) is not None]
        with contextlib.closing(self.make([resolved for _, resolved in planned], out)) as made:
            for some, _ in planned:
                if len(self.tried) == self.most:
                    raise UsageError(
                        f"--most {self.most}: the search is not complete after this number of runs; increase --most"
                    )
                finished = next(made)
                self.tried.append((some, finished))
                self.progress(f"run {len(self.tried)}, {self.named(some)}: {finished.verdict.verdict}")
                yield some, finished

    def run(self, some: Subset, out: Path) -> Finished:
        """Run the experiment with some of the faults, which can be planned.

        Raises:
            FaultbedError: as `runs_of`.
        """
        with contextlib.closing(self.runs_of([some], out)) as runs:
            for _, finished in runs:
                return finished
        raise UsageError(f"{self.named(some)}: cannot be planned; run the experiment alone for the reason")

    def first_failing(self, candidates: Sequence[Subset]) -> Subset | None:
        """Return the first of some sets of faults with which a check fails that fails with all of them."""
        with contextlib.closing(self.runs_of(candidates, self.out)) as runs:
            return next((some for some, finished in runs if _failed(finished) & self.failed_with_all), None)

    def _resolved(self, some: Subset) -> ResolvedRun | None:
        part = shrink_module.without(self.source, self.ids, some)
        try:
            experiment = experiment_module.decode(part, source=self.experiment.source)
            return run_module.resolve(experiment, part, self.inventory, seed=self.seed)
        except ConfigError as error:
            self.progress(f"{self.named(some)}: not run: {error}")
            return None


@click.command()
@experiment_argument
@click.option("--seed", type=SEED, help="Seed of the run that failed.")
@click.option("--most", default=40, show_default=True, type=click.IntRange(min=1), help="Maximum number of runs.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of run directories and of NAME-smallest.toml.",
)
@workers_options
@json_option
@pass_session
def shrink(
    session: Session,
    /,
    *,
    experiment: Path,
    seed: int | None,
    most: int,
    out: Path,
    place: WorkerPlace | None,
    jobs: int | None,
    interface: str | None,
    as_json: bool,
) -> int:
    """Find the fewest faults with which a failing EXPERIMENT still fails, by running parts of it.

    Every run begins from the same snapshot, with the same seed. A part fails if a check is FAIL that was FAIL with all
    faults; INCONCLUSIVE, ERROR and parts that cannot be planned do not count. The result is run once more, to exclude a
    failure by chance. Each run directory has its repro.sh.

    With --on, several labs try parts at a time, and the result is the same as that of one lab.
    """
    place = with_options(place, jobs=jobs, interface=interface)
    inventory = session.inventory()
    source, loaded = experiment.read_bytes(), experiment_module.load(experiment)
    if not loaded.faults:
        raise UsageError(f"{experiment}: there are no faults to remove; give an experiment with [[faults]]")
    run_module.resolve(loaded, source, inventory, seed=seed)
    shrink_module.without(source, [fault.id for fault in loaded.faults], [])
    with runs_made(session, inventory, out, place=place, why=f"shrink {loaded.name}") as (make, progress):
        search = _Search(
            source=source, experiment=loaded, inventory=inventory, seed=seed, out=out, most=most, progress=progress,
            make=make,
        )  # fmt: skip
        whole = search.run(tuple(range(len(loaded.faults))), out)
        search.failed_with_all = _failed(whole)
        if not search.failed_with_all:
            _show_no_failure(session, search, whole, as_json=as_json)
            return ExitCode.INCONCLUSIVE
        smallest = shrink_module.smallest(len(loaded.faults), search.first_failing)
        # A worker does not make a run again that is in the folder of runs already.
        once_more = out if place is None else Path(tempfile.mkdtemp(prefix=f"{loaded.name}-again-", dir=out))
        repeated = search.run(smallest, once_more)
    target = out / f"{loaded.name}-smallest.toml"
    target.write_bytes(shrink_module.without(source, search.ids, smallest))
    kind_of(loaded.workload).keep_inputs(loaded.workload, loaded.source, out)
    _show(session, search, smallest, repeated, target, as_json=as_json)
    return ExitCode.PASS if _failed(repeated) & search.failed_with_all else ExitCode.INCONCLUSIVE


def _show_no_failure(session: Session, search: _Search, whole: Finished, *, as_json: bool) -> None:
    name = search.experiment.name
    why = (
        f"{name} does not fail: {whole.verdict.verdict}, see {whole.report}. Name the seed with which it did (--seed)."
    )
    if as_json:
        session.json(
            {
                "experiment": name,
                "failed": [],
                "smallest": None,
                "again": False,
                "file": None,
                "why": why,
                "runs": _runs(search),
            }
        )
    else:
        session.out.print(why, soft_wrap=True)


def _failed(finished: Finished) -> frozenset[Place]:
    """Return the checks that failed. A metric that is too high where it was too low has not failed in the same way."""
    failed = {place for place, check in places(finished.verdict.checks) if check.verdict is Verdict.FAIL}
    return frozenset(place for place in failed if place[0] not in _NOT_OF_THE_WORKLOAD)


def _names(failed: Iterable[Place]) -> list[str]:
    return sorted({name for name, *_ in failed})


def _runs(search: _Search) -> list[dict[str, object]]:
    return [
        {
            "faults": [search.ids[number] for number in some],
            "verdict": finished.verdict.verdict,
            "run_dir": finished.run_dir.path,
        }
        for some, finished in search.tried
    ]


def _show(
    session: Session, search: _Search, smallest: tuple[int, ...], repeated: Finished, target: Path, *, as_json: bool
) -> None:
    fails_again = bool(_failed(repeated) & search.failed_with_all)
    if as_json:
        session.json(
            {
                "experiment": search.experiment.name,
                "failed": _names(search.failed_with_all),
                "smallest": [search.ids[number] for number in smallest],
                "again": fails_again,
                "file": target,
                "runs": _runs(search),
            }
        )
        return
    session.table(
        ("faults", "verdict", "failed as with all", "run"),
        [
            (
                search.named(some),
                str(finished.verdict.verdict),
                ", ".join(_names(_failed(finished) & search.failed_with_all)),
                str(finished.run_dir.path),
            )
            for some, finished in search.tried
        ],
    )
    once_more = "and fails again" if fails_again else "which did not fail when run once more; try `run --repeat`"
    session.out.print(
        Text.assemble(
            "\nsmallest: ",
            (search.named(smallest), "bold"),
            f", {once_more}. It is {target}; to run it again: {repeated.run_dir.path / 'repro.sh'}",
        ),
        soft_wrap=True,
    )


COMMANDS = (shrink,)
