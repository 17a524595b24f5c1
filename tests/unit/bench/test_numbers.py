"""docs/numbers.md: one table, each row with its command and a mark if it is older than its code."""

from __future__ import annotations

import subprocess

import pytest
from click.testing import CliRunner
from house import HOUSE

from bench.results import numbers as module
from bench.results.numbers import MARK, MOST_ROWS, Number, history, is_older, numbers, page
from faultbed.testbed.errors import UsageError

ROWS = numbers()


def number(**changes):
    made = {
        "what": "a", "value": "1", "spread": "n = 1", "date": "2026-11-27", "command": "make x", "code": ("inject",),
    }  # fmt: skip
    return Number(**(made | changes))


@pytest.fixture
def git(tmp_path):
    def run(*words):
        argv = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org", *words]
        return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    def change(path):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        with (tmp_path / path).open("a") as file:
            file.write("x\n")
        run("add", ".")
        run("commit", "-qm", path)
        return run("rev-parse", "--short", "HEAD")

    run("init", "-q")
    return tmp_path, change


def test_rows_are_few_complete_and_about_code_that_exists():
    assert 0 < len(ROWS) <= MOST_ROWS
    assert len({row.what for row in ROWS}) == len(ROWS) or len({(row.what, row.value) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert all((row.what, row.value, row.spread, row.command, row.code)), row
        assert "|" not in f"{row.what}{row.value}{row.spread}{row.date}{row.command}{row.commit}", row
        assert all((HOUSE / path).exists() for path in row.code), row


def test_page_is_printed_from_the_rows():
    try:
        older = [is_older(row) for row in ROWS]
    except UsageError as error:
        pytest.skip(str(error))
    printed = (HOUSE / "docs/numbers.md").read_text()
    assert printed == page(ROWS, older), "run: python -m bench.results.numbers > docs/numbers.md"


def test_row_is_older_once_its_own_code_has_changed(git):
    house, change = git
    commit = change("inject/a.py")
    row = number(commit=commit)
    assert not is_older(row, root=house)
    change("traffic/b.py")
    assert not is_older(row, root=house)
    (house / "inject" / "a.py").write_text("not committed")
    assert not is_older(row, root=house)
    change("inject/c.py")
    assert is_older(row, root=house)
    assert not is_older(number(commit=commit, code=("docs",)), root=house)


def test_row_without_a_commit_is_older(git):
    assert is_older(number(), root=git[0])


def test_unknown_commit_and_missing_git_are_one_sentence_and_no_answer(git, monkeypatch, tmp_path):
    house, change = git
    change("inject/a.py")
    with pytest.raises(
        UsageError, match=r"commit 1234567 of 'a' is not in this git history .*; make the page in a checkout"
    ):
        is_older(number(commit="1234567"), root=house)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="install git"):
        is_older(number(commit="1234567"), root=house)


def test_page_marks_older_rows_only():
    text = page([number(commit="abc1234"), number(commit="def5678", date="")], [False, True])
    assert "| a | 1 | n = 1 | 2026-11-27 | `make x` | `abc1234` |\n" in text
    assert f"| a | 1 | n = 1 | not recorded | `make x` | `def5678` {MARK} |\n" in text


def test_history_is_printed_and_searched():
    everything = CliRunner().invoke(module.main, ["--history"]).output
    assert everything.count("\n\n") == len(history())
    found = CliRunner().invoke(module.main, ["--history", "MINDER"]).output
    assert 0 < found.count("\n\n") < 3
    assert "Minder" in found
    with pytest.raises(UsageError, match="no earlier measurement contains 'nonesuch'"):
        CliRunner().invoke(module.main, ["--history", "nonesuch"], catch_exceptions=False)
    with pytest.raises(UsageError, match="add --history"):
        CliRunner().invoke(module.main, ["demo"], catch_exceptions=False)
