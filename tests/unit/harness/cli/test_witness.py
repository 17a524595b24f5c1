"""`faultbed witness`: a command runs once between two looks at the lab, and the exit code says what they show."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner

from faultbed.harness.cli.lab import witnessing
from faultbed.harness.cli.main import cli
from faultbed.inject.evidence.outside_fault import OutsideFault

FAULT = OutsideFault(
    changed={("rtsw1", "ctsw1"): "rtsw1: link ctsw1 was UP, is DOWN"},
    left=(),
    before={"rtsw1/ctsw1.tx_packets": 9000},
    during={"rtsw1/ctsw1.tx_packets": 100, "host1/rxe0.completer_retry_err": 4},
    before_s=5.0,
    during_s=5.0,
    looks=3,
    reach={("rtsw1", "ctsw1"): frozenset({"rtsw1/ctsw1", "host1/rxe0"})},
)


@pytest.fixture
def witness(monkeypatch):
    def run(fault, *words):
        def watch_lab(_lab, act, **_options):
            act()
            return fault

        monkeypatch.setattr(witnessing, "open_lab", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(witnessing, "watch_lab", watch_lab)
        return CliRunner().invoke(cli, ["witness", *words], standalone_mode=False)

    return run


def test_confirmed_command_is_printed_with_changes_and_counters(witness, tmp_path):
    made = tmp_path / "made"
    result = witness(FAULT, "--", sys.executable, "-c", f"open({str(made)!r}, 'w')")
    assert made.exists()
    assert result.return_value == 0
    assert "confirmed" in result.output
    assert "host1/rxe0.completer_retry_err by 4" in result.output


def test_mismatch_and_json(witness):
    nothing = OutsideFault(changed={}, left=(), before={}, during={}, before_s=5.0, during_s=5.0, looks=3)
    result = witness(nothing, "--json", "--", sys.executable, "-c", "raise SystemExit(3)")
    assert result.return_value == 1
    shown = json.loads(result.output)
    assert (shown["result"], shown["exit_code"], shown["undone"]) == ("mismatch", 3, True)


def test_watch_needs_no_command(witness):
    assert witness(FAULT, "--watch", "1").return_value == 0


@pytest.mark.parametrize("words", [(), ("--watch", "1", "--", "true")])
def test_command_and_watch_exclude_each_other(witness, words):
    assert "either a command after -- or --watch SECONDS" in str(witness(FAULT, *words).exception)


INJECTOR = """
import os, pathlib, signal, sys, time
made, undone, number = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
def undo(*_):
    time.sleep(0.6)
    undone.touch()
    os._exit(0)
signal.signal(number, undo)
made.write_text(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_injector_has_time_to_undo_its_fault_when_witness_is_interrupted(tmp_path, number):
    """Ctrl-C in a terminal reaches both; SIGTERM to `witness` is passed on."""
    made, undone = tmp_path / "made", tmp_path / "undone"

    def interrupt():
        while not (made.exists() and made.read_text()):
            time.sleep(0.02)
        if number == signal.SIGINT:
            os.kill(int(made.read_text()), number)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        witnessing._run([sys.executable, "-c", INJECTOR, str(made), str(undone), str(int(number))])
    assert undone.exists()


def test_injector_that_does_not_end_is_killed_when_witness_is_interrupted(monkeypatch):
    monkeypatch.setattr(witnessing, "_UNDO_S", 0.1)
    process = subprocess.Popen(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"], stdout=-1)
    assert process.stdout.readline() == b"ready\n"
    witnessing._end(process)
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()


def test_program_that_does_not_exist_is_one_sentence(witness):
    error = witness(FAULT, "--", "./no-such-injector").exception
    assert str(error) == "./no-such-injector: No such file or directory; name a program of this machine"
