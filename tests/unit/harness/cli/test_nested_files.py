"""A file that is nested too deeply is refused with its name, not with a traceback."""

from __future__ import annotations

import datetime as dt

import pytest
from click.testing import CliRunner

from faultbed.harness.cli.main import cli
from faultbed.harness.pytest_plugin import quarantine
from faultbed.harness.record import sweep_file
from faultbed.testbed.errors import FaultbedError

DEEP = 3000
LISTS, OBJECTS = "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP
TABLES = "a" + ".a" * DEEP + " = 1\n"
EXPERIMENT = "tests/experiments/demo.toml"


@pytest.mark.parametrize(
    ("content", "command"),
    [
        (f"a = {LISTS}", "run FILE --plan"),
        (TABLES, "run FILE --plan"),
        (TABLES, "sweep FILE --over seed=1,2 --plan"),
        (LISTS, f"--lab FILE run {EXPERIMENT} --plan"),
        (OBJECTS, f"--lab FILE run {EXPERIMENT} --plan"),
        (LISTS, "offenders --runs nowhere --preflight FILE"),
        (LISTS, "traffic replay FILE"),
        (LISTS, "preflight --busbw FILE"),
    ],
)
def test_command_names_an_input_file_that_is_nested_too_deep(tmp_path, content, command):
    file = tmp_path / "deep"
    file.write_text(content)
    done = CliRunner().invoke(cli, command.replace("FILE", str(file)).split(), standalone_mode=False)
    assert isinstance(done.exception, FaultbedError), done.exception
    assert str(file) in str(done.exception)


def test_summary_page_names_a_preflight_file_that_is_nested_too_deep(tmp_path):
    file = tmp_path / "deep.json"
    file.write_text(f'{{"other": {OBJECTS}, "wrong": []}}')
    done = CliRunner().invoke(cli, ["summary", "--preflight", str(file)], standalone_mode=False)
    assert done.exception is None
    assert "deep.json: not what" in done.output


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("sweep.json", sweep_file.read),
        ("q.toml", lambda folder: quarantine.read(folder / "q.toml", today=dt.date(2026, 11, 26))),
    ],
)
def test_reader_names_an_input_file_that_is_nested_too_deep(tmp_path, name, read):
    (tmp_path / name).write_text(f'{{"points": {OBJECTS}}}' if name.endswith("json") else f"quarantine = {LISTS}")
    with pytest.raises(FaultbedError, match=name):
        read(tmp_path)
