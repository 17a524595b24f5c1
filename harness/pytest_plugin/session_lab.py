"""The lab of a pytest session: reserved and up from the first test that needs it, in a known state for every test."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from harness.pytest_plugin.lab_prewarm import LabPrewarm
from testbed import shipped
from testbed.backends.soft import lifecycle
from testbed.errors import FaultbedError, UsageError
from testbed.inventory import lab_inventory as inventory_module
from testbed.inventory.lab_inventory import Inventory
from testbed.lab import Lab, open_lab
from testbed.observe import fingerprint
from testbed.tenancy import dirty
from testbed.tenancy.lab_lease import INHERITED, LabLease, hold

__all__ = [
    "SessionLab",
    "bring_up",
    "close_session",
    "closing_after_error",
    "inventory_of",
    "lease_of",
    "prewarm",
    "session_lab_of",
]

_INVENTORY = pytest.StashKey[Inventory]()
_LEASE = pytest.StashKey[tuple[contextlib.ExitStack, LabLease]]()
_STARTED_HERE = pytest.StashKey[bool]()
_PREWARM = pytest.StashKey[LabPrewarm]()
_UP_FAILED = pytest.StashKey[FaultbedError]()
_LEASE_S = 1800.0
"""Time after the start of a test at which the reservation of the session expires: twice the longest test."""


def inventory_of(config: pytest.Config) -> Inventory:
    """Return the inventory that `--lab` names."""
    if _INVENTORY not in config.stash:
        named = config.getoption("--lab") or "soft"
        config.stash[_INVENTORY] = inventory_module.load(shipped.inventory_named(named))
    return config.stash[_INVENTORY]


def lease_of(config: pytest.Config) -> LabLease:
    """Return the lease on the whole lab, from the first test that needs it to the end of the session; refresh it.

    Raises:
        UsageError: this process is a worker of pytest-xdist.
    """
    if hasattr(config, "workerinput"):  # pytest-xdist's mark of its workers
        raise UsageError("there is one lab: tests that use it cannot run in several processes; leave out -n")
    if _LEASE not in config.stash:
        stack = contextlib.ExitStack()
        lease = hold(inventory_of(config), why="pytest", mode="exclusive", ttl_s=_LEASE_S)
        config.stash[_LEASE] = (stack, stack.enter_context(lease))
        # A program that a test starts works under the lease of this session. A session inside this one (pytester's,
        # in this process) has a lease of its own, and restores this one's at its end.
        stack.callback(_inherit, os.environ.get(INHERITED))
        _inherit(config.stash[_LEASE][1].token)
    lease_now = config.stash[_LEASE][1]
    lease_now.refresh()
    return lease_now


def _inherit(token: str | None) -> None:
    if token is None:
        os.environ.pop(INHERITED, None)
    else:
        os.environ[INHERITED] = token


def bring_up(config: pytest.Config) -> Inventory:
    """Reserve the lab and bring it up; report progress on the terminal, because the first time takes minutes."""
    inventory = inventory_of(config)
    lease_of(config)
    if inventory.kind == "soft":
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        capture = config.pluginmanager.get_plugin("capturemanager")
        started = time.monotonic()

        def report(text: str) -> None:
            if reporter is not None and capture is not None:
                with capture.global_and_fixture_disabled():
                    reporter.write_line(f"{time.monotonic() - started:6.1f} s  {text}")

        if _UP_FAILED in config.stash:
            # It would fail again for every test, and take minutes each time.
            raise config.stash[_UP_FAILED]
        try:
            if _PREWARM in config.stash:
                config.stash[_STARTED_HERE] = config.stash[_PREWARM].wait(report)
                del config.stash[_PREWARM]
            how = lifecycle.up(inventory, report)
        except FaultbedError as error:
            config.stash[_UP_FAILED] = error
            raise
        if how != "already up":
            config.stash[_STARTED_HERE] = True
    return inventory


@dataclass(kw_only=True)
class SessionLab:
    """The open lab of a session.

    Every test ends with a comparison of the lab with `baseline`; the lab is reset only after a difference or a failure.

    Attributes:
        lab: the lab.
        baseline: fingerprint after the last reset; None: the next test begins with a reset.
        work: mark on disk from the first test to the end of the session, so that changes of a killed session are found.
        is_compared: whether the lab was compared after the last test.
    """

    lab: Lab
    baseline: fingerprint.Fingerprint | None = None
    work: dirty.Work | None = None
    is_compared: bool = True

    def into_known_state(self, *, always: bool) -> fingerprint.Fingerprint:
        """Reset the lab for the first test, after a failure, or `always`; return the fingerprint to compare with."""
        if self.baseline is None or always:
            if self.lab.kind == "soft":
                lifecycle.reset(self.lab.inventory_model, lambda _: None)
            self.lab.forget_connections()
            if self.work is None:
                self.work = dirty.begin(self.lab, "pytest")
                self.baseline = self.work.before
            else:
                self.baseline = fingerprint.capture(self.lab)
        return self.baseline

    def end_work(self) -> None:
        """Remove the mark of the session; after an interrupted test leave it, so that the next command compares."""
        if self.work is None:
            return
        if self.is_compared:
            self.work.mark.remove()
        else:
            self.work.mark.abandon()

    def distrust(self) -> None:
        """Let the next test begin with a reset."""
        self.baseline = None

    def mark(self, reasons: list[str], before: fingerprint.Fingerprint) -> None:
        """Mark the lab as DIRTY on disk, for later commands, too: a rack has no snapshot to return to."""
        self.distrust()
        # If the mark cannot be written, that of the session stays, so that the next command compares the lab.
        self.is_compared = False
        self.is_compared = dirty.mark(self.lab.state_dir, reasons, before)

    def refuse_dirty(self) -> None:
        """Reset a soft lab that is marked as DIRTY; refuse a rack that is.

        Raises:
            DirtyLab: a rack is DIRTY; `faultbed heal` is needed first.
        """
        if self.lab.kind == "soft" and dirty.is_marked(self.lab.state_dir):
            self.into_known_state(always=True)
        dirty.refuse(self.lab.state_dir, self.lab.name)


_SESSION_LAB = pytest.StashKey[SessionLab]()


def session_lab_of(config: pytest.Config) -> SessionLab:
    """Return the lab of the session, up and open."""
    if _SESSION_LAB not in config.stash:
        config.stash[_SESSION_LAB] = SessionLab(lab=open_lab(bring_up(config)))
    lease_of(config)
    return config.stash[_SESSION_LAB]


@contextlib.contextmanager
def closing_after_error(config: pytest.Config) -> Iterator[None]:
    """Close a lab that does not answer or cannot be reset; the next test opens it anew and brings it up."""
    try:
        yield
    except FaultbedError:
        if _SESSION_LAB in config.stash:
            config.stash[_SESSION_LAB].lab.close()
            del config.stash[_SESSION_LAB]
        raise


def prewarm(config: pytest.Config) -> None:
    """Start to bring up a soft lab that is down, while tests run that do not need it."""
    if inventory_of(config).kind == "soft":
        lease_of(config)
        if process := LabPrewarm.start(inventory_of(config)):
            config.stash[_PREWARM] = process


def close_session(config: pytest.Config) -> None:
    """Close the lab and end its lease; a lab that this session brought up goes down again."""
    if _PREWARM in config.stash:
        config.stash[_PREWARM].stop()
        config.stash[_STARTED_HERE] = True
    if _SESSION_LAB in config.stash:
        config.stash[_SESSION_LAB].end_work()
        config.stash[_SESSION_LAB].lab.close()
    if config.stash.get(_STARTED_HERE, False):
        lifecycle.down(config.stash[_INVENTORY])
    if _LEASE in config.stash:
        config.stash[_LEASE][0].close()
