"""Prewarming a lab while other tests run: waiting, progress, and the end with the session."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace

import pytest

from faultbed.harness.pytest_plugin import lab_prewarm
from faultbed.harness.pytest_plugin.lab_prewarm import LabPrewarm
from faultbed.testbed.backends.soft import lifecycle

INVENTORY = SimpleNamespace(path="soft.yml")


def test_lab_prewarm_wait_relays_its_output(monkeypatch):
    monkeypatch.setattr(lab_prewarm, "_FAULTBED", (sys.executable, "-c", "import sys; print(*sys.argv[1:])"))
    messages = []
    assert LabPrewarm(INVENTORY).wait(messages.append) is True
    assert messages[-1] == "--lab soft.yml up"


def test_lab_prewarm_that_fails_is_no_lab(monkeypatch):
    monkeypatch.setattr(lab_prewarm, "_FAULTBED", (sys.executable, "-c", "raise SystemExit(3)"))
    assert LabPrewarm(INVENTORY).wait(lambda _: None) is False


def test_lab_prewarm_stop_ends_its_process(monkeypatch):
    """The process is terminated, because it would never end by itself."""
    monkeypatch.setattr(lab_prewarm, "_FAULTBED", (sys.executable, "-c", "import signal; signal.pause()"))
    prewarm = LabPrewarm(INVENTORY)
    prewarm.stop()
    assert prewarm._process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("state", "starts"), [("down", True), ("down, snapshot kept", True), ("up", False), ("broken", False)]
)
def test_lab_prewarm_starts_only_a_lab_that_is_down(monkeypatch, state, starts):
    monkeypatch.setattr(lab_prewarm, "_FAULTBED", (sys.executable, "-c", ""))
    monkeypatch.setattr(lifecycle, "status", lambda _: SimpleNamespace(state=state))
    prewarm = LabPrewarm.start(INVENTORY)
    assert (prewarm is not None) is starts
    if prewarm is not None:
        prewarm.stop()
