"""Manage the lab of a pytest session: reserve it, bring it up at the first test that needs it, reset it when needed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from faultbed.harness.pytest_plugin.lab_prewarm import LabPrewarm
from faultbed.testbed import shipped
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.errors import FaultbedError, UsageError
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import Lab, open_lab
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.observe import fingerprint
from faultbed.testbed.tenancy import dirty
from faultbed.testbed.tenancy.lab_lease import INHERITED, LabLease, hold

__all__ = [
    "SessionLab",
    "acquire_lease",
    "close_session",
    "closing_after_error",
    "ensure_lab_up",
    "inventory_of",
    "open_session_lab",
    "prewarm",
]


@dataclass(frozen=True, kw_only=True)
class _SessionLease:
    """The session's lease on the lab. Closing `cleanup` releases it and restores the inherited token."""

    lease: LabLease
    cleanup: contextlib.ExitStack


_INVENTORY = pytest.StashKey[Inventory]()
_LEASE = pytest.StashKey[_SessionLease]()
_STARTED_HERE = pytest.StashKey[bool]()
_PREWARM = pytest.StashKey[LabPrewarm]()
_BRING_UP_ERROR = pytest.StashKey[FaultbedError]()
_LEASE_S = 1800.0
"""Lifetime of the lease in seconds after its last renewal, at the start of a test: twice the longest test."""


def inventory_of(config: pytest.Config) -> Inventory:
    """Return the inventory that `--lab` names."""
    if _INVENTORY not in config.stash:
        named = config.getoption("--lab") or "soft"
        config.stash[_INVENTORY] = inventory_module.load(shipped.inventory_named(named))
    return config.stash[_INVENTORY]


def acquire_lease(config: pytest.Config) -> LabLease:
    """Return the session's lease on the whole lab. The first call acquires it; every later call renews it.

    Raises:
        UsageError: this process is a worker of pytest-xdist.
    """
    if hasattr(config, "workerinput"):  # pytest-xdist's mark of its workers
        raise UsageError("pytest-xdist: tests that use the lab need a single process; run without -n")
    if _LEASE not in config.stash:
        cleanup = contextlib.ExitStack()
        acquired = cleanup.enter_context(hold(inventory_of(config), why="pytest", mode="exclusive", ttl_s=_LEASE_S))
        config.stash[_LEASE] = _SessionLease(lease=acquired, cleanup=cleanup)
        # Programs that a test starts inherit this session's lease. A nested session (pytester's, in this process)
        # acquires its own lease, and restores this session's token when it ends.
        cleanup.callback(_inherit, os.environ.get(INHERITED))
        _inherit(acquired.token)
    lease = config.stash[_LEASE].lease
    lease.refresh()
    return lease


def _inherit(token: str | None) -> None:
    if token is None:
        os.environ.pop(INHERITED, None)
    else:
        os.environ[INHERITED] = token


def ensure_lab_up(config: pytest.Config) -> Inventory:
    """Reserve the lab, bring a soft lab up if it is down, and return the inventory.

    Progress goes to the terminal, because the first start of a soft lab takes minutes.

    Raises:
        FaultbedError: the lab cannot be reserved, or a soft lab does not come up, in this call or an earlier one.
    """
    inventory = inventory_of(config)
    acquire_lease(config)
    if traits_of(inventory.kind).has_snapshot:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        capture = config.pluginmanager.get_plugin("capturemanager")
        started = time.monotonic()

        def report(text: str) -> None:
            if reporter is not None and capture is not None:
                with capture.global_and_fixture_disabled():
                    reporter.write_line(f"{time.monotonic() - started:6.1f} s  {text}")

        if _BRING_UP_ERROR in config.stash:
            # A second attempt is likely to fail as well, and takes minutes for every test that needs the lab.
            raise config.stash[_BRING_UP_ERROR]
        try:
            if _PREWARM in config.stash:
                config.stash[_STARTED_HERE] = config.stash[_PREWARM].wait(report)
                del config.stash[_PREWARM]
            initial_state = backend_of(inventory.kind).make_ready(inventory, report)
        except FaultbedError as error:
            config.stash[_BRING_UP_ERROR] = error
            raise
        if initial_state != "already up":
            config.stash[_STARTED_HERE] = True
    return inventory


@dataclass(kw_only=True)
class SessionLab:
    """The open lab of a session.

    Every test ends with a comparison of the lab with `baseline`; the lab is reset only after a difference or a failure.

    Attributes:
        lab: the open lab.
        baseline: fingerprint that every test must restore, captured after the last reset; None: reset the lab before
            the next test.
        work_mark: mark on disk from the first test to the end of the session. If the session is killed, the next
            command finds the mark and compares the lab.
        end_state_verified: whether the lab's state at the end of the last test is known: compared with `baseline`,
            and on disk if it differs.
    """

    lab: Lab
    baseline: fingerprint.Fingerprint | None = None
    work_mark: dirty.Work | None = None
    end_state_verified: bool = True

    def reset_if_needed(self, *, force: bool) -> fingerprint.Fingerprint:
        """Reset the lab if it has no baseline, or with `force`; return the fingerprint that the test must restore.

        Only a soft lab is reset. A rack has no snapshot: its present state becomes the baseline.
        """
        if self.baseline is None or force:
            if traits_of(self.lab.kind).has_snapshot:
                backend_of(self.lab.kind).reset(self.lab.inventory_model, lambda _: None, lab=self.lab)
            else:
                self.lab.forget_connections()
            if self.work_mark is None:
                self.work_mark = dirty.begin(self.lab, "pytest")
                self.baseline = self.work_mark.before
            else:
                self.baseline = fingerprint.capture(self.lab)
        return self.baseline

    def remove_session_mark(self) -> None:
        """Remove the session's mark. After an interrupted test, leave it: the next command then compares the lab."""
        if self.work_mark is None:
            return
        if self.end_state_verified:
            self.work_mark.mark.remove()
        else:
            self.work_mark.mark.abandon()

    def invalidate_baseline(self) -> None:
        """Discard the baseline, to reset the lab before the next test."""
        self.baseline = None

    def mark_dirty(self, reasons: list[str], before: fingerprint.Fingerprint) -> None:
        """Mark the lab DIRTY on disk, also for later commands. A rack has no snapshot to return to."""
        self.invalidate_baseline()
        # If this DIRTY mark is not written (full disk, or another command's exists), the session's mark stays, so that
        # the next command compares the lab.
        self.end_state_verified = False
        self.end_state_verified = dirty.mark(self.lab.state_dir, reasons, before)

    def reset_or_reject_dirty(self) -> None:
        """Reset a soft lab that is marked DIRTY. A DIRTY rack is rejected, because it has no snapshot to reset to.

        Raises:
            DirtyLab: a rack is marked DIRTY; run `faultbed heal` first.
        """
        if traits_of(self.lab.kind).has_snapshot and dirty.is_marked(self.lab.state_dir):
            self.reset_if_needed(force=True)
        dirty.refuse(self.lab.state_dir, self.lab.name)


_SESSION_LAB = pytest.StashKey[SessionLab]()


def open_session_lab(config: pytest.Config) -> SessionLab:
    """Return the session's lab. The first call brings it up and opens it; every call renews the lease."""
    if _SESSION_LAB not in config.stash:
        config.stash[_SESSION_LAB] = SessionLab(lab=open_lab(ensure_lab_up(config)))
    acquire_lease(config)
    return config.stash[_SESSION_LAB]


@contextlib.contextmanager
def closing_after_error(config: pytest.Config) -> Iterator[None]:
    """Close a lab that failed with a `FaultbedError`. The next test opens it again, with a session mark of its own."""
    try:
        yield
    except FaultbedError:
        if _SESSION_LAB in config.stash:
            session_lab = config.stash[_SESSION_LAB]
            del config.stash[_SESSION_LAB]
            with contextlib.closing(session_lab.lab):
                session_lab.remove_session_mark()
        raise


def prewarm(config: pytest.Config) -> None:
    """Start a soft lab in the background while tests run that do not need it. A second call does nothing."""
    if _PREWARM not in config.stash and traits_of(inventory_of(config).kind).has_snapshot:
        acquire_lease(config)
        if process := LabPrewarm.start(inventory_of(config)):
            config.stash[_PREWARM] = process


def close_session(config: pytest.Config) -> None:
    """Release the lab and its lease, and shut the lab down if this session brought it up.

    A step that fails, or that a second Ctrl-C interrupts, does not keep the later steps from running.
    """
    with contextlib.ExitStack() as steps:  # the step that is added last runs first
        if _LEASE in config.stash:
            steps.callback(config.stash[_LEASE].cleanup.close)
        if _PREWARM in config.stash or config.stash.get(_STARTED_HERE, False):
            steps.callback(backend_of(config.stash[_INVENTORY].kind).down, config.stash[_INVENTORY])
        if _SESSION_LAB in config.stash:
            steps.callback(config.stash[_SESSION_LAB].lab.close)
            steps.callback(config.stash[_SESSION_LAB].remove_session_mark)
        if _PREWARM in config.stash:
            steps.callback(config.stash[_PREWARM].stop)
