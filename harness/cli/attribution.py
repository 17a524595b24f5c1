"""The command about causes: attribute."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from harness import confusion
from harness.attribution import attribute as attribute_run
from harness.cli.context import Session, json_option, pass_session
from harness.rundir import open_run
from harness.statistics import Interval

__all__ = ["COMMANDS"]


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(file_okay=False, path_type=Path))
@json_option
@pass_session
def attribute(session: Session, *, run_dirs: tuple[Path, ...], as_json: bool) -> None:
    """Say where the trouble of each run came from, without looking at its faults; then hold it against them.

    RUN_DIRS with faults that provably fired are the truth: precision, recall and the confusion matrix are over them.
    """
    runs = [(run.path, run.read_measurements(), run.read_flights()) for run in map(open_run, run_dirs)]
    found = {path: attribute_run(measured, flights) for path, measured, flights in runs}
    total = confusion.score((measured, flights) for _, measured, flights in runs)
    if as_json:
        session.json(
            {
                "runs": {str(path): msgspec.to_builtins(each) for path, each in found.items()},
                "judged": total.runs,
                "precision": _parts(total.precision, total.found, total.found + total.false),
                "recall": _parts(total.recall, total.found, total.found + total.missed),
                "single": {"runs": total.single, "right": total.right, "network_right": total.network_right},
                "matrix": [{"true": true, "said": said, "runs": n} for (true, said), n in sorted(total.matrix.items())],
            }
        )
        return
    rows = [
        (
            path.resolve().name,
            one.cause,
            f"{one.place} {one.name}",
            f"{one.confidence:.2f}",
            "; ".join(one.evidence[:3]),
        )
        for path, each in found.items()
        for one in each
    ]
    session.table(("run", "cause", "place", "confidence", "evidence"), rows)
    if total.precision and total.recall:
        session.out.print(
            f"\nagainst the faults of {total.runs} runs: precision {total.found}/{total.found + total.false} "
            f"({_range(total.precision)}), recall {total.found}/{total.found + total.missed} ({_range(total.recall)})"
        )
    if total.single:
        session.out.print(
            f"{total.single} runs of at most one fault: culprit right in {total.right}, "
            f"network or not right in {total.network_right}"
        )


def _parts(interval: Interval | None, count: int, of: int) -> dict[str, float] | None:
    return None if interval is None else {"count": count, "of": of, "low": interval.low, "high": interval.high}


def _range(interval: Interval) -> str:
    return f"{interval.low:.2f}..{interval.high:.2f}, {100 * interval.level:g} %"


COMMANDS = (attribute,)
