"""The command that runs one experiment at many values of its parameters: sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.text import Text

from faultbed.harness.cli.context import COLOURS, Session, json_option, pass_session, styled
from faultbed.harness.cli.options.experiment_seed import SEED
from faultbed.harness.cli.options.names import experiment_argument
from faultbed.harness.cli.options.sharding import shard_option, workers_options
from faultbed.harness.experiment import experiment_file as experiment_module
from faultbed.harness.experiment.parameters import parse
from faultbed.harness.quantities import format_duration
from faultbed.harness.record.sweep_file import SweepFile, SweptPoint
from faultbed.harness.report.sweeps import sweep_text
from faultbed.harness.run.prepare.resolve import touched
from faultbed.harness.run.sweeps.finished_runs import join
from faultbed.harness.run.sweeps.shards import Shard
from faultbed.harness.run.sweeps.sweep_points import metrics_for, points_of
from faultbed.harness.run.sweeps.sweep_runner import Sweep
from faultbed.harness.run.workers.worker_places import Place, with_options
from faultbed.harness.verdict import exit_code
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.errors import UsageError
from faultbed.testbed.extras import extra
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.tenancy.lab_lease import hold

__all__ = ["COMMANDS"]


@click.command()
@experiment_argument
@click.argument("shards", nargs=-1, metavar="[DIR]...", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--over",
    "overs",
    multiple=True,
    required=True,
    metavar="PATH=V1,V2,...",
    help="A parameter of the experiment and its values, such as faults[0].set.share=0.001,0.01. Repeatable: all "
    "combinations are run, and the last one is the axis of the plot.",
)
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1, 1000), help="Runs of each point.")
@click.option("--seed", type=SEED, help="Seed of the first run of each point, instead of the file's.")
@click.option("--metric", "names", multiple=True, help="A metric of the table. Default: those that the file bounds.")
@click.option("--plan", "only_plan", is_flag=True, help="Print the points and how long they may take; run nothing.")
@shard_option
@workers_options
@click.option(
    "--merge",
    is_flag=True,
    help="Run nothing: copy the finished runs of the sweeps in each DIR to --out, and judge them together.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of this sweep (default: runs/sweep-EXPERIMENT); the same command again runs what is missing in it.",
)
@json_option
@pass_session
def sweep(
    session: Session,
    *,
    experiment: Path,
    shards: tuple[Path, ...],
    overs: tuple[str, ...],
    repeat: int,
    seed: int | None,
    names: tuple[str, ...],
    only_plan: bool,
    shard: Shard | None,
    place: Place | None,
    jobs: int | None,
    interface: str | None,
    merge: bool,
    out: Path | None,
    as_json: bool,
) -> int:
    """Run an EXPERIMENT at every combination of parameter values; print and plot its metrics.

    Each point is a run like that of `faultbed run`, with its own run directory. A point that is INCONCLUSIVE or ERROR
    has no number. The exit code is that of the worst point. After Ctrl-C or a kill, the same command resumes. It
    repeats a run that was not finished, ended in ERROR, or left the lab DIRTY.

    With --shard, several labs make the runs of one sweep, and the exit code is that of the worst run of the shard. If
    the labs share --out, the sweep is complete when all shards have ended. If not, `--merge DIR...` joins the folders.
    """
    place = with_options(place, jobs, interface)
    _refuse_mixed_options(shards, merge=merge, others=shard is not None or place is not None or only_plan)
    inventory = session.inventory()
    out = out or Path("runs") / f"sweep-{experiment.stem}"
    content = experiment.read_bytes()
    experiment_module.load(experiment)
    parameters = [parse(text) for text in overs]
    points = points_of(content, parameters, inventory, source=str(experiment), seed=seed, repeat=repeat)
    metrics = metrics_for(points, names)
    if merge:
        with session.progress() as progress:
            join(shards, out / "runs", points, progress)
        result = Sweep.open(out, inventory, parameters, points, metrics).write_outputs()
        _show(session, result, out, as_json=as_json)
        return exit_code(result.verdict, result.lab_state)
    opened = Sweep.open(out, inventory, parameters, points, metrics, shard)
    if only_plan:
        _show_plan(session, opened, as_json=as_json)
        return 0
    decided = [trial for point in points for trial in point.runs]
    whole = traits_of(inventory.kind).has_snapshot
    targets = () if whole else {name for trial in decided for name in touched(trial, inventory.topology)}
    if opened.pending_runs() and place is not None:
        if not whole:
            raise UsageError(f"--on {place}: {inventory.name} has machines of its own; use --shard with more labs")
        with extra("scale", "--on"):
            from faultbed.harness.run.workers.open_pool import open_pool  # noqa: PLC0415 - an optional package
        with (
            session.progress() as progress,
            open_pool(place, inventory=inventory.path, runs=out / "runs", progress=progress) as pool,
        ):
            result = opened.execute_on(pool, progress)
    elif opened.pending_runs():
        with (
            hold(inventory, sorted(targets), why=f"sweep {points[0].experiment.name}", mode="exclusive") as holding,
            session.progress(also=holding.heartbeat) as progress,
        ):
            backend_of(inventory.kind).make_ready(inventory, progress)
            result = opened.execute(progress=progress, guard=holding.refresh)
    else:
        result = opened.write_outputs()
    _show(session, result, out, as_json=as_json)
    if shard is not None:
        verdict, lab_state = opened.own_verdict()
        session.err.print(f"shard {shard}: {verdict}, the worst of its runs, lab {lab_state}", soft_wrap=True)
        return exit_code(verdict, lab_state)
    return exit_code(result.verdict, result.lab_state)


def _refuse_mixed_options(folders: Sequence[Path], *, merge: bool, others: bool) -> None:
    """Raise click's usage error if the options do not fit each other."""
    if merge != bool(folders):
        raise click.UsageError("--merge and the DIRs of the shards need each other; give both or none")
    if merge and others:
        raise click.UsageError("--merge runs nothing; give it without --shard, --on and --plan")


def _show_plan(session: Session, opened: Sweep, *, as_json: bool) -> None:
    expected_s, left = opened.expected_s(), opened.pending_runs()
    counts = {point.number: sum(trial.number == point.number for trial, _ in left) for point in opened.points}
    times = {
        number: 0.0 if not count else None if (time := expected_s[number]) is None else round(time * count, 1)
        for number, count in counts.items()
    }
    known = [time for time in times.values() if time is not None]
    whole_s = sum(known) if len(known) == len(times) else None
    if as_json:
        rows = [
            {
                "number": point.number,
                "parameters": dict(point.parameters),
                "runs": len(point.runs),
                "left": counts[point.number],
                "expected_s": times[point.number],
            }
            for point in opened.points
        ]
        session.json({"points": rows, "expected_s": whole_s, "metrics": [metric.name for metric in opened.metrics]})
        return
    session.table(
        ("point", *(parameter.path for parameter in opened.parameters), "runs", "done", "expected"),
        [
            (
                str(point.number),
                *point.parameters.values(),
                str(len(point.runs)),
                str(len(opened.finished_runs.get(point.number, ()))),
                _time(times[point.number]),
            )
            for point in opened.points
        ],
    )
    runs = f"{len(left)} run{'' if len(left) == 1 else 's'} to make"
    session.out.print(f"{runs}, expected {_time(whole_s)}; nothing is done yet", soft_wrap=True)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown until the first run is over: the workload ends after its iterations"
    return format_duration(seconds * 1e9)


def _show(session: Session, result: SweepFile, out: Path, *, as_json: bool) -> None:
    files = {name: out / f"sweep.{name}" for name in ("json", "parquet", "html")}
    if as_json:
        session.json({**msgspec.to_builtins(result), "files": files})
        return
    with_model = ("predicted",) if result.model else ()
    session.table(
        (*(parameter.path for parameter in result.over), "", *result.metrics, *with_model, "why"),
        [
            (
                *point.parameters.values(),
                _state(point),
                *(sweep_text.cell(point, metric) for metric in result.metrics),
                *(_predicted(point) for _ in with_model),
                point.why,
            )
            for point in result.points
        ],
    )
    if result.model:
        session.out.print(f"predicted: {result.model}", soft_wrap=True)
    decided = (str(result.verdict), f"bold {COLOURS[result.verdict]}")
    session.out.print(
        Text.assemble(decided, f"  {sweep_text.sentence(result)}; report {files['html']}"), soft_wrap=True
    )


def _predicted(point: SweptPoint) -> str:
    predictions: Sequence[float] = [value.predicted for value in point.values if value.predicted is not None]
    return f"{predictions[0]:.2f} at most" if predictions else ""


def _state(point: SweptPoint) -> Text:
    return styled(sweep_text.state(point), "" if point.verdict is None else COLOURS[point.verdict])


COMMANDS = (sweep,)
