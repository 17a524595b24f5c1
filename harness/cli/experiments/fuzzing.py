"""The command that searches for workloads and faults that fail: fuzz."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

import faultbed
from faultbed.harness.cli.context import Session, json_option, pass_session, styled
from faultbed.harness.fuzz import on_lab
from faultbed.harness.fuzz.case import Case, describe, duration_s
from faultbed.harness.fuzz.kinds import kinds_named
from faultbed.harness.fuzz.outcome import Failure, Outcome
from faultbed.harness.verdict import ExitCode, Verdict
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.errors import UsageError
from faultbed.testbed.extras import extra
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.tenancy.lab_lease import hold
from faultbed.testbed.units import parse_duration_ns

if TYPE_CHECKING:  # hypothesis takes half a second to import, and no other command needs it
    from faultbed.harness.fuzz.search import Search

__all__ = ["COMMANDS"]

_DEFAULT_TIME = "10m"
_WORKLOADS = ("collective", "flow", "pattern")
"""Kinds of workload that `fuzz` draws. `harness/fuzz/draw.py` has them too, but its import of hypothesis is slow."""
_SHOWN = 10
"""Default number of cases that `--plan` shows."""


@click.command()
@click.option("--for", "budget", metavar="TIME", help=f"Stop after this time, such as 8m.  [default: {_DEFAULT_TIME}]")
@click.option("--examples", type=click.IntRange(min=1), help="Stop after this number of runs, shrinking included.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of the cases.")
@click.option(
    "--kinds", multiple=True, metavar="PATTERN", help="Fault kinds to draw, such as 'link.*'. Repeatable. Default: all."
)
@click.option(
    "--workloads",
    multiple=True,
    type=click.Choice(_WORKLOADS),
    help="Workloads to draw. Repeatable. Default: all.",
)
@click.option("--most", type=click.IntRange(0, 8), default=3, show_default=True, help="Maximum number of faults.")
@click.option("--plan", "only_plan", is_flag=True, help="Print the first cases that would be drawn, and do nothing.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/fuzz"),
    show_default=True,
    help="Folder of run directories, of failures, and of the database of failures to replay first.",
)
@json_option
@pass_session
def fuzz(
    session: Session,
    *,
    budget: str | None,
    examples: int | None,
    seed: int,
    kinds: tuple[str, ...],
    workloads: tuple[str, ...],
    most: int,
    only_plan: bool,
    out: Path,
    as_json: bool,
) -> int:
    """Search for workloads and fault schedules that fail, and shrink each to the smallest that still fails.

    A case fails if a check is FAIL or ERROR, or if the lab is DIRTY afterwards. Kinds that are meant to end a job or to
    corrupt its data may do so. An unproven fault is counted, but is not a failure.

    Each kind of failure gets a folder under --out with experiment.toml and repro.sh. Earlier failures are replayed
    first. Ctrl-C clears the faults and reports the failures so far.

    Exit codes: 0 no failure, 1 failures, 2 no run was PASS or FAIL, 3 error, 5 DIRTY lab.
    """
    inventory = session.inventory()
    search = _search(
        inventory, kinds_named(kinds, inventory.kind), workloads or _WORKLOADS, most=most, seed=seed, out=out
    )
    if only_plan:
        return _show_plan(session, search, examples or _SHOWN, as_json=as_json)
    limit_s = _limit_s(budget, examples)
    end: BaseException | None = None
    with (
        hold(inventory, (), why="fuzz", mode="exclusive") as holding,
        session.progress(also=holding.heartbeat) as progress,
    ):
        backend_of(inventory.kind).make_ready(inventory, progress)
        ends_at = time.monotonic() + limit_s
        search.run = on_lab.Runner(inventory=inventory, out=out, progress=progress, guard=holding.refresh)
        search.progress = progress
        search.may_run = lambda: time.monotonic() < ends_at and (examples is None or len(search.tried) < examples)
        try:
            search.go()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (raised again, once what was found is shown)
            end = error
        folders = [
            on_lab.keep(failure, out / f"found-{number}", inventory)
            for number, failure in enumerate(search.failures, start=on_lab.next_number(out))
        ]
    _show(session, search, folders, as_json=as_json)
    if end is not None:
        raise end
    return _exit_code(search)


def _exit_code(search: Search) -> ExitCode:
    if search.failures:
        return ExitCode.FAIL
    showed_something = any(Verdict(trial.outcome.verdict).is_conclusive for trial in search.tried)
    return ExitCode.PASS if showed_something else ExitCode.INCONCLUSIVE


def _limit_s(budget: str | None, examples: int | None) -> float:
    if budget is None:
        return float("inf") if examples else parse_duration_ns(_DEFAULT_TIME) / 1e9
    try:
        return parse_duration_ns(budget) / 1e9
    except ValueError as error:
        raise UsageError(f"--for: {error}") from error


def _search(
    inventory: Inventory, kinds: Collection[str], workloads: Collection[str], *, most: int, seed: int, out: Path
) -> Search:
    """Return a search that runs nothing yet."""
    with extra("fuzz", "`faultbed fuzz`"):
        from hypothesis import configuration  # noqa: PLC0415

        from faultbed.harness.fuzz import draw  # noqa: PLC0415
        from faultbed.harness.fuzz.search import Search  # noqa: PLC0415

    configuration.set_hypothesis_home_dir(out / ".hypothesis")
    drawn_from = [faultbed.__version__, inventory.path.read_text(), *sorted(kinds), *sorted(workloads), most]
    return Search(
        strategy=draw.cases(inventory, kinds=kinds, workloads=workloads, most=most),
        run=lambda _: Outcome(verdict=Verdict.INCONCLUSIVE, failures={}),
        may_run=lambda: False,
        database=out / "failed-before",
        key=hashlib.sha256(repr(drawn_from).encode()).hexdigest(),
        seed=seed,
        progress=lambda _: None,
    )


def _show_plan(session: Session, search: Search, count: int, *, as_json: bool) -> int:
    search.may_run = lambda: len(search.tried) < count
    search.database = None
    search.go()
    cases = [trial.case for trial in search.tried]
    if as_json:
        session.json([_plain(case) for case in cases])
        return ExitCode.PASS
    for number, case in enumerate(cases, start=1):
        head, *faults = describe(case).split("; ")
        session.out.print(Text.assemble((f"{number:3}", "bold"), f"  {head}, {duration_s(case):g} s"))
        for fault in faults:
            session.out.print(f"     {fault}")
    session.out.print(f"\n{len(cases)} cases of seed {search.seed}; nothing was touched")
    return ExitCode.PASS


def _plain(case: Case) -> dict[str, object]:
    faults = [
        {
            "kind": fault.kind,
            "target": fault.target,
            "at_s": fault.at_s,
            "for_s": fault.for_s,
            "params": dict(fault.params),
        }
        for fault in case.faults
    ]
    return {"workload": {**case.workload, "duration_s": duration_s(case)}, "faults": faults}


def _show(session: Session, search: Search, folders: Sequence[Path], *, as_json: bool) -> None:
    verdicts = Counter(str(trial.outcome.verdict) for trial in search.tried)
    drawn = Counter(fault.kind for trial in search.tried for fault in trial.case.faults)
    unproven: dict[str, list[str]] = {}
    for trial in search.tried:
        for fault in trial.outcome.unproven:
            unproven.setdefault(fault.kind, []).append(f"{fault.target}: {fault.reason}")
    if as_json:
        session.json(
            {
                "seed": search.seed,
                "runs": len(search.tried),
                "seconds": round(sum(trial.seconds for trial in search.tried), 1),
                "verdicts": verdicts,
                "faults": drawn,
                "unproven": unproven,
                "found": [_as_json(failure, folder) for failure, folder in zip(search.failures, folders, strict=True)],
            }
        )
        return
    if unproven:
        session.table(
            ("not proven", "of", "first reason"),
            [(kind, f"{len(reasons)} of {drawn[kind]}", reasons[0]) for kind, reasons in sorted(unproven.items())],
            title="Faults that were not proven (no failure of the workload)",
        )
        session.out.print()
    for failure, folder in zip(search.failures, folders, strict=True):
        _show_failure(session, failure, folder)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())) or "no run"
    result = f"{len(search.failures)} found" if search.failures else "nothing found"
    style = {ExitCode.FAIL: "bold red", ExitCode.PASS: "bold green"}.get(_exit_code(search), "bold yellow")
    session.out.print(Text.assemble((result, style), f" in {len(search.tried)} runs ({counted}), seed {search.seed}"))


def _show_failure(session: Session, failure: Failure, folder: Path) -> None:
    again = {None: "not run again", True: "fails again", False: "did not fail again"}[failure.fails_again]
    whole = "" if failure.is_smallest else "; the budget ended before the shrinking did"
    session.out.print(styled(f"fails {', '.join(failure.checks)}", "bold"))
    for name in failure.checks:
        session.out.print(f"  {name}: {failure.outcome.failures.get(name, '')}", soft_wrap=True)
    session.out.print(
        f"  shrunk from {len(failure.first.faults)} faults to {len(failure.smallest.faults)} in {failure.runs} runs, "
        f"{again}{whole}",
        soft_wrap=True,
    )
    for line in describe(failure.smallest).split("; "):
        session.out.print(f"    {line}", soft_wrap=True)
    session.out.print(f"  {folder / 'experiment.toml'}; to run it again: {folder / 'repro.sh'}\n", soft_wrap=True)


def _as_json(failure: Failure, folder: Path) -> dict[str, object]:
    return {
        "checks": {name: failure.outcome.failures.get(name, "") for name in failure.checks},
        "first": _plain(failure.first),
        "smallest": _plain(failure.smallest),
        "is_smallest": failure.is_smallest,
        "fails_again": failure.fails_again,
        "runs": failure.runs,
        "run_dir": failure.outcome.run_dir,
        "folder": folder,
    }


COMMANDS = (fuzz,)
