"""Commands of a holder: waiting for them sends heartbeats, and every failure is an OSError."""

from __future__ import annotations

import sys
import time

import pytest

from faultbed.inject.node import command
from faultbed.inject.node.command import call_on_heartbeat, run


@pytest.fixture(autouse=True)
def callbacks(monkeypatch):
    """Return the list of functions that a heartbeat calls, and empty it after the test."""
    monkeypatch.setattr(command, "_callbacks", [])


def test_node_command_reports_alive_while_it_waits():
    """The kernel of a busy switch takes seconds to create a device. The watchdog must not take the holder for dead."""
    messages = []
    call_on_heartbeat(lambda: messages.append(1))
    assert run(["sh", "-c", "read line; sleep 1.2; echo $line"], stdin="heard\n") == "heard\n"
    assert len(messages) >= 2


def test_node_command_returns_quickly_with_its_whole_output():
    call_on_heartbeat(lambda: None)
    assert len(run([sys.executable, "-c", "print('x' * 300_000)"])) == 300_001


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sh", "-c", "echo broken >&2; exit 3"], "ended with 3: broken"),
        (["sleep", "30"], "did not end within 1 s"),
        (["/no/such/program"], "No such file"),
    ],
)
def test_node_command_failure_is_an_oserror(argv, message):
    with pytest.raises(OSError, match=message):
        run(argv, timeout_s=1)


def test_node_command_is_ended_by_an_error_of_its_caller():
    beats = []

    def fail_at_the_second():
        beats.append(time.monotonic())
        if len(beats) > 1:
            raise ValueError("no longer")

    call_on_heartbeat(fail_at_the_second)
    with pytest.raises(ValueError, match="no longer"):
        run(["sleep", "30"])
    assert time.monotonic() - beats[-1] < 10, "it waited for the command"
