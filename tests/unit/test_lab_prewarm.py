"""A lab that comes up while other tests run: it is waited for, told of, and ended with its session."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from harness.pytest_plugin import lab_prewarm
from harness.pytest_plugin.lab_prewarm import LabPrewarm
from testbed.backends.soft import lifecycle

INVENTORY = SimpleNamespace(path="soft.yml")


def test_it_is_waited_for_and_what_it_said_is_told(monkeypatch):
    monkeypatch.setattr(lab_prewarm, "_COMMAND", "import sys; print(*sys.argv[1:])")
    told = []
    assert LabPrewarm(INVENTORY).wait(told.append) is True
    assert told[-1] == "--lab soft.yml up"


def test_one_that_fails_is_no_lab(monkeypatch):
    monkeypatch.setattr(lab_prewarm, "_COMMAND", "raise SystemExit(3)")
    assert LabPrewarm(INVENTORY).wait(lambda _: None) is False


def test_it_ends_with_its_session(monkeypatch):
    """Ended, not waited for: it has no end of its own."""
    monkeypatch.setattr(lab_prewarm, "_COMMAND", "import signal; signal.pause()")
    one = LabPrewarm(INVENTORY)
    one.stop()
    assert one._process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("state", "starts"), [("down", True), ("down, snapshot kept", True), ("up", False), ("broken", False)]
)
def test_only_a_lab_that_is_down_is_brought_up(monkeypatch, state, starts):
    monkeypatch.setattr(lab_prewarm, "_COMMAND", "")
    monkeypatch.setattr(lifecycle, "status", lambda _: SimpleNamespace(state=state))
    one = LabPrewarm.start(INVENTORY)
    assert (one is not None) is starts
    if one is not None:
        one.stop()
