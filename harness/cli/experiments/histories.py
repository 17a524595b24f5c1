"""Commands over several runs: noise, history; and the comparison of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click
import msgspec
from rich.text import Text

from faultbed.harness import judge
from faultbed.harness.analysis import noise as noise_module
from faultbed.harness.analysis.noise import Conditions, NoiseFloor
from faultbed.harness.cli.context import Session, json_option, pass_session, styled
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.record.run_files import whole
from faultbed.harness.record.rundir import RunDir, open_run
from faultbed.harness.report import history as history_module
from faultbed.harness.report import summary
from faultbed.harness.report.comparison.compare import Row, compare, differences
from faultbed.harness.report.comparison.differences import of_plans
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import UsageError

__all__ = ["COMMANDS"]

_RUN_DIR = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=_RUN_DIR)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the floor here instead of into the lab's state.",
)
@json_option
@pass_session
def noise(session: Session, *, run_dirs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Measure a lab's noise floor (A/A) from fault-free runs of one experiment, and store it.

    RUN_DIRS are runs without faults, or any runs with a fault-free twin. The judge widens intervals by this floor.
    """
    runs = {str(path): (directory := open_run(path), directory.read_run()) for path in run_dirs}
    floor = noise_module.measure(
        {name: (noise_module.conditions_in(directory, run), run) for name, (directory, run) in runs.items()}
    )
    _, measured = next(iter(runs.values()))
    kept = out or lab_dir(measured.lab.name) / noise_module.FILE
    kept.parent.mkdir(parents=True, exist_ok=True)
    with whole(kept) as temporary:
        temporary.write_bytes(noise_module.encode(floor))
    if as_json:
        pairs = {name: spread.pair for name, spread in floor.spreads.items()}
        session.json({**msgspec.to_builtins(floor), "pair": pairs, "kept": kept})
        return
    rows = [
        (
            name,
            str(spread.runs),
            f"{spread.middle:.4g} {spread.unit}",
            f"{100 * spread.log_sd:.1f} %",
            f"{spread.pair:.2f}",
        )
        for name, spread in floor.spreads.items()
    ]
    session.table(("", "runs", "middle", "deviation", "two runs differ by at most"), rows)
    session.out.print(f"{floor.iterations} iterations each; kept in {kept}", soft_wrap=True)


@click.command()
@click.option(
    "--runs",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of run directories.",
)
@click.option("--last", type=click.IntRange(min=1), default=20, show_default=True, help="How many runs to show.")
@json_option
@pass_session
def history(session: Session, *, runs: Path, last: int, as_json: bool) -> None:
    """List runs, oldest first, and mark regressions against earlier runs of the same plan.

    Runs whose seed, faults, workload, routing scheme, inventory or kind of machine differ are not compared; verdicts
    only if the expectations are the same, too.

    The index (.history.sqlite in the folder) is updated first. You can remove it at any time.
    """
    index = history_module.read(history_module.update(runs))
    past = index.past
    worse = history_module.regressions(past)
    if as_json:
        session.json(
            {
                "runs": [{**asdict(past_run), "at_least": sorted(past_run.at_least)} for past_run in past[-last:]],
                "regressions": [asdict(regression) for regression in worse],
                "left_out": index.left_out,
            }
        )
        return
    marked = {regression.run for regression in worse}
    rows = [
        (
            styled("▼", "red") if past_run.name in marked else "",
            past_run.name,
            past_run.verdict,
            *(
                ("≥ " if name in past_run.at_least else "")
                + summary.format_value(past_run.metrics.get(name), METRICS[name].unit)
                for name in ("jct_ratio", "recovery.total", "dip", "iterations")
            ),
            past_run.version,
        )
        for past_run in past[-last:]
    ]
    session.table(("", "run", "verdict", "jct_ratio", "recovery.total", "dip", "iterations", "version"), rows)
    for regression in worse:
        session.out.print(
            Text.assemble(("▼", "red"), f" {regression.run}: {regression.metric} {regression.words}"), soft_wrap=True
        )
    for name, why in index.left_out.items():
        session.out.print(Text.assemble((f"{name} is left out: ", "yellow"), why), soft_wrap=True)


PAIR = 2
"""Number of runs of a comparison."""


def show_comparison(session: Session, first: Path, second: Path, *, html: Path | None, as_json: bool) -> None:
    """Print how run B compares with run A, and write the page of it: to `html`, else to B's directory."""
    run_a, run_b = open_run(first), open_run(second)
    plans = run_a.read_plan(), run_b.read_plan()
    apart = differences(*plans)
    measured, measured_b = run_a.read_run(), run_b.read_run()
    floor, unfit = _floor_of(
        lab_dir(measured.lab.name),
        {"A": noise_module.conditions_in(run_a, measured), "B": noise_module.conditions_in(run_b, measured_b)},
    )
    sealed = run_a.read_evidence(judge.KINDS), run_b.read_evidence(judge.KINDS)
    rows = compare(measured, measured_b, sealed=sealed, floor=floor)
    page, why_not = _page(run_a, run_b, rows, html)
    if as_json:
        document = {"a": first, "b": second, "differ": apart, "metrics": [asdict(row) for row in rows]}
        session.json({**document, "differences": [asdict(difference) for difference in of_plans(*plans)], "html": page})
        return
    colours = {"better": "green", "worse": "red"}
    session.table(
        ("", "A", "B", "B / A", "99 % interval", "B is"),
        [
            (
                row.metric,
                summary.format_value(row.a, row.unit),
                summary.format_value(row.b, row.unit),
                "" if row.ratio is None else f"{row.ratio:.3f}",
                "" if row.interval is None else f"{row.interval.low:.3f}..{row.interval.high:.3f}",
                styled(row.says, colours.get(row.says, "")),
            )
            for row in rows
        ],
    )
    if all(row.says == "not comparable" for row in rows):
        session.out.print(Text.assemble(("not comparable:", "yellow"), f" {rows[0].why}"), soft_wrap=True)
    for line in apart:
        warning = Text.assemble(("A and B differ in more than one thing:", "yellow"), f" {line}")
        session.out.print(warning, soft_wrap=True)
    if floor is None:
        session.out.print(
            "no noise floor is kept for these runs' conditions: the intervals do not include by how much any two "
            "fault-free runs differ; measure it with `faultbed noise`"
        )
    for line in unfit:
        session.out.print(line, soft_wrap=True)
    session.out.print(f"page {page}" if page else f"no page: {why_not}", soft_wrap=True)


def _floor_of(state_dir: Path, conditions: Mapping[str, Conditions]) -> tuple[NoiseFloor | None, list[str]]:
    """Return the lab's noise floor if it fits one of the runs, and a sentence for each run that it does not fit.

    Without a floor, the intervals would ignore that any two runs differ, so the floor of one run is better than none.
    """
    fitting, unfit = None, []
    for letter, of_run in conditions.items():
        reasons: list[str] = []
        floor = noise_module.load(state_dir, of_run, reasons.append)
        fitting = fitting or floor
        unfit += [f"{letter}: {reason}" for reason in reasons]
    return fitting, unfit


def _page(run_a: RunDir, run_b: RunDir, rows: Sequence[Row], html: Path | None) -> tuple[Path | None, str]:
    """Return the page's path, or the reason why it was not written. The numbers are shown in either case."""
    # matplotlib takes a second to import, and most commands draw nothing.
    from faultbed.harness.report.comparison import compare_page as compare_report  # noqa: PLC0415

    try:
        return compare_report.render(run_a, run_b, rows, html or compare_report.default_path(run_a, run_b)), ""
    except UsageError as error:
        if html is not None:
            raise
        return None, str(error)


COMMANDS = (noise, history)
