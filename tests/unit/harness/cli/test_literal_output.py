"""Text from files, nodes and users is printed literally: brackets are never interpreted as markup."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

import click
import pytest
from click.testing import CliRunner
from house import HOUSE

from faultbed.harness.cli.context import Session, styled
from faultbed.harness.cli.lab import labs
from faultbed.harness.cli.main import cli
from faultbed.harness.cli.traffic import flows_and_collectives
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.tenancy import audit_log

DATA = ("[red]x[/red]", "[/x]", "[a-z]*", "[/path]", "[#1]", "[@here]", "[bold", ":warning:")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(params=["pipe", "terminal"])
def place(request, monkeypatch):
    """Direct output into a pipe, or to what rich treats as a terminal."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    if request.param == "terminal":
        monkeypatch.setenv("FORCE_COLOR", "1")
    return request.param


@pytest.fixture
def session(place):
    one = Session(None)
    assert one.out.is_terminal == one.err.is_terminal == (place == "terminal")
    return one


@pytest.mark.parametrize(
    "columns",
    [flows_and_collectives.FLOW_COLUMNS, flows_and_collectives.COLUMNS, ("TTFT P50/P99[ms]", "dense[ms]"), DATA],
    ids=["flow", "collective", "times", "data"],
)
def test_table_prints_title_headers_and_cells_literally(session, capsys, columns):
    cells = [DATA[at % len(DATA)] for at in range(len(columns))]
    session.table(columns, [cells], title="[/t]")
    title, header, row = ANSI.sub("", capsys.readouterr().out).splitlines()
    assert title.strip() == "[/t]"
    assert header.split() == " ".join(columns).split()
    assert row.split() == cells


@pytest.mark.parametrize("data", DATA)
def test_output_prints_a_line_literally(session, place, capsys, data):
    session.out.print(data)
    labs._show_dirty(session, (data,))
    flows_and_collectives.exit_code(session, "failed", data)
    output = capsys.readouterr()
    assert ANSI.sub("", output.out).splitlines() == [
        data,
        "DIRTY: it refuses work until `faultbed heal` has reverted this:",
        f"  {data}",
    ]
    assert ANSI.sub("", output.err) == f"failed: {data}\n"
    assert ("\x1b[31mfailed\x1b[0m: " in output.err) == (place == "terminal"), "red where there are colours"


@pytest.mark.parametrize("data", DATA)
def test_progress_and_its_spinner_print_text_literally(session, place, capsys, data):
    with session.progress() as progress:
        progress(data)
    line, *frames = [text for text in ANSI.sub("", capsys.readouterr().err).splitlines() if data in text]
    assert re.fullmatch(rf" *\d+\.\d s  {re.escape(data)}", line)
    assert all(frame.endswith(f" {data}") for frame in frames)
    assert bool(frames) == (place == "terminal"), "the spinner's last frame"


def test_json_with_nan_or_infinity_is_standard_json(capsys):
    """Traffic that failed before its first iteration has NaN percentiles."""
    Session(None).json({"p50": float("nan"), "all": [float("inf"), 1.5], 3: (None, "NaN")})

    def refuse(word):
        raise AssertionError(word)

    read = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert read == {"p50": None, "all": [None, 1.5], "3": [None, "NaN"]}


def test_style_applies_to_the_cell_and_not_to_its_text(session, place, capsys):
    session.table(("", ""), [(styled("[/x]", "red"), "[red]x[/red]")])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.rstrip() == ("\x1b[31m[/x]\x1b[0m  [red]x[/red]" if place == "terminal" else "[/x]  [red]x[/red]")


@pytest.mark.usefixtures("place")
def test_audit_command_prints_data_literally(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    for one in DATA:
        audit_log.append(lab_dir("soft"), "armed", kind="rdma", target=one, detail=f"rm {one}")
    done = CliRunner().invoke(cli, ["--lab", "soft", "audit"], standalone_mode=False)
    assert done.exception is None
    assert [line.rpartition("armed")[2].split() for line in ANSI.sub("", done.output).splitlines()[1:]] == [
        ["rdma", one, "rm", one] for one in DATA
    ]


def test_command_line_code_contains_no_markup():
    """A markup tag would enable markup for data too, or would be shown to users."""
    markup = re.compile(r"\[/[a-z ]*\]|rich\.markup|from_markup|markup=True")
    files = sorted((HOUSE / "harness" / "cli").rglob("*.py"))
    assert files
    assert [f"{path.name}: {tag}" for path in files for tag in markup.findall(path.read_text())] == []


@pytest.mark.parametrize("options", [[], ["--timestamps"]])
def test_progress_lines_begin_with_the_time_in_utc_if_timestamps_are_requested(monkeypatch, options):
    @click.pass_obj
    def show(session):
        with session.progress() as progress:
            progress("the first line")

    probing = click.Command("probing", callback=show)
    monkeypatch.setattr(cli, "get_command", lambda _context, name: probing if name == "probing" else None)
    before = datetime.now(UTC).replace(microsecond=0)
    result = CliRunner().invoke(cli, [*options, "probing"], standalone_mode=False)
    assert result.exception is None, result.output
    (line,) = [text for text in ANSI.sub("", result.stderr).splitlines() if "the first line" in text]
    if not options:
        assert re.fullmatch(r" *\d+\.\d s  the first line", line)
        return
    stamp = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)  +\d+\.\d s  the first line", line)
    assert before <= datetime.fromisoformat(stamp[1]) <= datetime.now(UTC)
