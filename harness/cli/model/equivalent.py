"""`faultbed equivalent`: whether two settings are the same within a margin, from runs of each."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import click

from faultbed.harness import judge
from faultbed.harness.cli.context import Session, json_option, pass_session, styled
from faultbed.harness.cli.options.parsed import parsed
from faultbed.harness.ledger.statistics.equivalence import TAIL, Equivalence
from faultbed.harness.record.rundir import open_run
from faultbed.harness.report.comparison.equivalent_pools import JOB_TIME, PooledRun, compare_pools
from faultbed.testbed.errors import UsageError
from faultbed.testbed.units import SHARE

__all__ = ["COMMANDS"]

_RUN_DIR = click.Path(file_okay=False, path_type=Path)
_COLOURS = {"equivalent": "green", "different": "red"}


class _WithMany(click.Command):
    """A command whose option --with takes all words up to the next option, so that a shell may expand `runs/b*`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat --with before each of its words."""
        repeated: list[str] = []
        is_after = False
        for word in args:
            if word == "--with":
                is_after = True
            elif is_after and not word.startswith("--"):
                repeated += ["--with", word]
            else:
                is_after = False
                repeated.append(word)
        return super().parse_args(ctx, repeated)


@click.command(cls=_WithMany)
@click.argument("run_dirs", nargs=-1, required=True, type=_RUN_DIR)
@click.option("--with", "others", multiple=True, required=True, type=_RUN_DIR, help="Runs of the other setting.")
@click.option("--margin", default="5%", show_default=True, help="Largest difference that does not matter.")
@click.option("--metric", default=JOB_TIME, show_default=True, help="What is compared.")
@json_option
@pass_session
def equivalent(
    session: Session, *, run_dirs: tuple[Path, ...], others: tuple[Path, ...], margin: str, metric: str, as_json: bool
) -> None:
    """Decide whether two settings are equivalent, different, or not shown to be either.

    RUN_DIRS are runs of one experiment on one lab with any seeds. Those of --with have the same workload on another
    fabric, with other faults or under another routing scheme. Two one-sided tests: each wrong answer has a risk of 5 %,
    if the number of runs was chosen before they were looked at.

    \b
      faultbed equivalent runs/a-1 runs/a-2 runs/a-3 --with runs/b-1 runs/b-2 runs/b-3 --margin 5%
    """  # noqa: D301 - that is click's sign for a paragraph that keeps its lines, and must be the character itself
    largest = float(parsed("--margin", SHARE.parse, margin)) / 100
    if not largest > 0:
        raise UsageError(f"--margin {margin}: leaves no room for noise; give more than 0%")
    result = compare_pools(_pool(run_dirs), _pool(others), largest, metric)
    if as_json:
        numbers = {name: value if math.isfinite(value) else None for name, value in _numbers(result).items()}
        session.json({"metric": metric, **asdict(result), **numbers})
        return
    says = styled(result.says, _COLOURS.get(result.says, "yellow"))
    session.out.print(says, f": {_sentence(result, metric)}", sep="", soft_wrap=True)


def _pool(paths: tuple[Path, ...]) -> dict[str, PooledRun]:
    pool: dict[str, PooledRun] = {}
    for path in paths:
        directory = open_run(path)
        name = str(path.resolve())
        if name in pool:
            raise UsageError(f"{path} is named twice; a run counts once")
        pool[name] = PooledRun(
            plan=directory.read_plan(),
            run=directory.read_run(),
            sealed=directory.read_evidence(judge.KINDS),
        )
    return pool


def _numbers(result: Equivalence) -> dict[str, float]:
    return {"ratio": result.ratio, "low": result.low, "high": result.high}


def _sentence(result: Equivalence, metric: str) -> str:
    runs_a, runs_b = result.runs
    interval = "" if math.isinf(result.high) else f", from {result.low:.3f} to {result.high:.3f} at {1 - 2 * TAIL:.0%}"
    allowed = f"{1 / (1 + result.margin):.3f} to {1 + result.margin:.3f}"
    text = f"{metric} of B over A is {result.ratio:.3f}{interval} ({runs_a} and {runs_b} runs); the margin is {allowed}"
    if result.why:
        text += f"; {result.why}"
    if result.more is not None:
        text += f"; run {result.more} more a side"
    return text


COMMANDS = (equivalent,)
