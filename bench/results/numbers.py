"""The page docs/numbers.md: one table of numbers, each with its spread, date, command and commit.

python -m bench.results.numbers > docs/numbers.md     print the page
python -m bench.results.numbers --history [WORD]      print earlier measurements, those with WORD in a column

The rows are in `numbers.toml`, earlier measurements in `history.json`. A row is marked if the code that it describes
has changed since the commit at which it was measured, or if that commit was not recorded. This needs the git history,
so the page can be made in a checkout only.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from faultbed.harness.cli.ending import end_with
from faultbed.testbed.errors import UsageError

__all__ = ["MOST_ROWS", "Earlier", "Number", "history", "is_older", "numbers", "page"]

ROOT = Path(__file__).resolve().parents[2]
MOST_ROWS = 40
MARK = "older"
_TOP = f"""# Numbers

Measured on 2 cores without KVM (TCG), five VMs, unless a row says otherwise. Ratios are within one run; seconds are
that machine's. A row that measures several things separates their values by semicolons or slashes, in the same order. A
range goes from the lowest to the highest of n values, unless it is called an interval.

"{MARK}" marks a row whose code has changed since its commit, or whose commit was not recorded. The page is printed by
`python -m bench.results.numbers` from `bench/results/numbers.toml`; with `--history`, that command prints earlier
measurements and everything that is not in the table.

"""


class Number(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured number. `code` lists the files and folders measured; `date` and `commit` are empty if unknown."""

    what: str
    value: str
    spread: str
    date: str
    command: str
    code: tuple[str, ...]
    commit: str = ""


class Earlier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measurement from an earlier page; `by` is the command, or how it was measured."""

    section: str
    what: str
    measured: str
    by: str


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    row: tuple[Number, ...]


def numbers() -> tuple[Number, ...]:
    """Return the rows of the page."""
    return msgspec.toml.decode((ROOT / "bench/results/numbers.toml").read_bytes(), type=_File).row


def history() -> tuple[Earlier, ...]:
    """Return the earlier measurements."""
    return msgspec.json.decode((ROOT / "bench/results/history.json").read_bytes(), type=tuple[Earlier, ...])


def is_older(number: Number, *, root: Path = ROOT) -> bool:
    """Return whether the code that a number describes has changed since it was measured.

    Only commits count, and a number without a commit counts as older.

    Raises:
        UsageError: git or its history is missing, so that it is unknown.
    """
    if not number.commit:
        return True
    argv = ["git", "-C", str(root), "rev-list", "--max-count=1", f"{number.commit}..HEAD", "--", *number.code]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        raise UsageError(f"git: {error}; install git: its history tells which numbers are out of date") from error
    if done.returncode:
        raise UsageError(
            f"commit {number.commit} of {number.what!r} is not in this git history ({done.stderr.strip()[:120]}); make "
            "the page in a checkout with all of it (git fetch --unshallow)"
        )
    return bool(done.stdout)


def page(rows: Sequence[Number], older: Sequence[bool]) -> str:
    """Return the page. `older` has one value per row: whether the row is marked as older than its code."""
    lines = ["| what | value | spread | date | command | commit |", "|---|---|---|---|---|---|"]
    for row, is_marked in zip(rows, older, strict=True):
        commit = " ".join([*([f"`{row.commit}`"] if row.commit else []), *([MARK] if is_marked else [])])
        cells = (row.what, row.value, row.spread, row.date or "not recorded", f"`{row.command}`", commit)
        lines.append(f"| {' | '.join(cells)} |")
    return _TOP + "\n".join(lines) + "\n"


@click.command()
@click.option("--history", "show_history", is_flag=True, help="Print earlier measurements instead of the page.")
@click.argument("word", required=False)
def main(*, show_history: bool, word: str | None) -> None:
    """Print docs/numbers.md, or earlier measurements (those that contain WORD)."""
    if word is not None and not show_history:
        raise UsageError(f"{word}: only the history is searched; add --history")
    if not show_history:
        rows = numbers()
        click.echo(page(rows, [is_older(row) for row in rows]), nl=False)
        return
    matching = [
        row for row in history() if word is None or word.lower() in " ".join(msgspec.structs.astuple(row)).lower()
    ]
    if not matching:
        raise UsageError(f"no earlier measurement contains {word!r}; leave it out to see all {len(history())}")
    for row in matching:
        click.echo(f"{row.section}: {row.what}\n  {row.measured}\n  {row.by}\n")


if __name__ == "__main__":
    end_with(main, "numbers")
