"""The command that scores programs under the published set of faults: scorecard."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click
import msgspec

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.options.experiment_seed import SEED
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.quantities import format_duration
from faultbed.harness.run.prepare.resolve import touched
from faultbed.harness.run.sweeps.sweep_runner import Sweep
from faultbed.harness.scorecard import score_page, score_points
from faultbed.harness.scorecard.program_file import faults_named, program_named, programs
from faultbed.harness.scorecard.score_table import ScoreFile
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.tenancy.lab_lease import hold

__all__ = ["COMMANDS"]


@click.command()
@click.argument("names", nargs=-1, metavar="PROGRAM...")
@click.option("--fault", "fault_names", multiple=True, help="A fault of the set, by its name. Default: all of them.")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1, 100), help="Runs of each combination.")
@click.option("--seed", default=1, show_default=True, type=SEED, help="Seed of the first of these runs.")
@click.option("--plan", "only_plan", is_flag=True, help="Print the combinations and how long they take; run nothing.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/scorecard"),
    show_default=True,
    help="Folder of the scorecard; the same command again runs what is missing in it.",
)
@json_option
@pass_session
def scorecard(
    session: Session,
    *,
    names: tuple[str, ...],
    fault_names: tuple[str, ...],
    seeds: int,
    seed: int,
    only_plan: bool,
    out: Path,
    as_json: bool,
) -> ExitCode:
    """Score each PROGRAM under a published set of faults: what it survives, and how fast it is back.

    A PROGRAM is one of faultbed's own (without any, they are listed) or the path of a file. Every fault is run with
    each of the program's settings and several seeds. A run counts if its fault provably fired on what the program used.
    Exits with 0 if the outcome of all runs is known, with 2 if not, and with 5 if the lab has changed.

    \b
    faultbed scorecard ib_write_bw rping --fault "link down 2 s" --seeds 3
    """  # noqa: D301 (click's mark for text that is not to be wrapped)
    if not names:
        session.table(("program", ""), [(name, program_named(name).about) for name in programs()])
        return ExitCode.PASS
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{twice[0]} is named twice; name each program once")
    inventory = session.inventory()
    chosen, faults = [program_named(name) for name in names], faults_named(fault_names)
    points = score_points.points_of(chosen, faults, inventory, seed=seed, seeds=seeds)
    parameters = score_points.parameters_of(chosen, faults)
    opened = Sweep.open(out, inventory, parameters, points, [METRICS["recovery.total"]])
    if only_plan:
        return _show_plan(session, opened, as_json=as_json)
    try:
        if opened.pending_runs():
            whole = traits_of(inventory.kind).has_snapshot
            targets = {name for point in points for run in point.runs for name in touched(run, inventory.topology)}
            with (
                hold(inventory, () if whole else sorted(targets), why="scorecard", mode="exclusive") as holding,
                session.progress(also=holding.heartbeat) as progress,
            ):
                backend_of(inventory.kind).make_ready(inventory, progress)
                opened.execute(progress=progress, guard=holding.refresh)
    except BaseException:
        with contextlib.suppress(Exception):  # what is wrong with the files must not hide what ended the command
            score_page.write(score_page.scored(inventory.name, chosen, points, opened.finished_runs, out), out)
        raise
    score = score_page.scored(inventory.name, chosen, points, opened.finished_runs, out)
    _show(session, score, score_page.write(score, out), as_json=as_json)
    if opened.snapshot().lab_state == "DIRTY":
        return ExitCode.DIRTY
    return ExitCode.PASS if score.is_known else ExitCode.INCONCLUSIVE


def _show_plan(session: Session, opened: Sweep, *, as_json: bool) -> ExitCode:
    times, left = opened.expected_s(), opened.pending_runs()
    whole_s = sum(times[point.number] or 0.0 for point, _ in left)
    if as_json:
        session.json({"points": [dict(point.parameters) for point in opened.points], "expected_s": round(whole_s)})
    else:
        session.table(("program", "setting", "fault"), [tuple(point.parameters.values()) for point in opened.points])
        session.out.print(
            f"{len(left)} runs to make, expected {format_duration(whole_s * 1e9)}; nothing is done yet", soft_wrap=True
        )
    return ExitCode.PASS


def _show(session: Session, score: ScoreFile, report: Path, *, as_json: bool) -> None:
    if as_json:
        session.json({**msgspec.to_builtins(score), "report": report})
        return
    session.table(
        ("program", "setting", "fault", "survives", *score_page.COLUMNS.values(), "data", "why"),
        [
            (
                *(row.program, row.setting, row.fault, row.survival),
                *(row.cell(name) for name in score_page.COLUMNS),
                *(row.data, row.why),
            )
            for row in score.rows
        ],
    )
    for program, text in score.decides.items():
        session.out.print(f"{program}: the setting decides under {text}", soft_wrap=True)
    session.out.print(f"{score_page.sentence(score)} Report: {report}", soft_wrap=True)


COMMANDS = (scorecard,)
