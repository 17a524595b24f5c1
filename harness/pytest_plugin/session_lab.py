"""The lab of a pytest session: ours from the first test that needs it, up, and in its known state for every test."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from harness.pytest_plugin.lab_prewarm import Ahead
from testbed import shipped
from testbed.backends.soft import lifecycle
from testbed.errors import FaultbedError, UsageError
from testbed.inventory import lab_inventory as inventory_module
from testbed.inventory.lab_inventory import Inventory
from testbed.lab import Lab, open_lab
from testbed.observe import fingerprint
from testbed.tenancy import dirty
from testbed.tenancy.lab_lease import INHERITED, Holding, hold

__all__ = ["Keeper", "begin_ahead", "bring_up", "held", "inventory_of", "keeper_of", "leave", "or_give_up"]

_INVENTORY = pytest.StashKey[Inventory]()
_HOLDING = pytest.StashKey[tuple[contextlib.ExitStack, Holding]]()
_STARTED_HERE = pytest.StashKey[bool]()
_AHEAD = pytest.StashKey[Ahead]()
_UP_FAILED = pytest.StashKey[FaultbedError]()
_HOLD_S = 1800.0
"""How long the session's reservation outlives its last test's start: two of the longest tests."""


def inventory_of(config: pytest.Config) -> Inventory:
    """What `--lab` names."""
    if _INVENTORY not in config.stash:
        named = config.getoption("--lab") or "soft"
        config.stash[_INVENTORY] = inventory_module.load(shipped.inventory_named(named))
    return config.stash[_INVENTORY]


def held(config: pytest.Config) -> Holding:
    """The whole lab, ours from the first test that needs it to the end of the session; refreshed by each test."""
    if hasattr(config, "workerinput"):  # pytest-xdist's mark of its workers
        raise UsageError("there is one lab: tests that take it do not run in several processes; leave out -n")
    if _HOLDING not in config.stash:
        stack = contextlib.ExitStack()
        wanted = hold(inventory_of(config), why="pytest", mode="exclusive", ttl_s=_HOLD_S)
        config.stash[_HOLDING] = (stack, stack.enter_context(wanted))
        # What a test starts as a program of its own works under this session's holding. A session inside this one
        # (pytester's, in this process) has one of its own, and leaves this one's as it was.
        stack.callback(_inherit, os.environ.get(INHERITED))
        _inherit(config.stash[_HOLDING][1].token)
    holding = config.stash[_HOLDING][1]
    holding.refresh()
    return holding


def _inherit(token: str | None) -> None:
    if token is None:
        os.environ.pop(INHERITED, None)
    else:
        os.environ[INHERITED] = token


def bring_up(config: pytest.Config) -> Inventory:
    """The lab, ours and up; told on the terminal, because the first time takes minutes."""
    inventory = inventory_of(config)
    held(config)
    if inventory.kind == "soft":
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        capture = config.pluginmanager.get_plugin("capturemanager")
        started = time.monotonic()

        def tell(text: str) -> None:
            if reporter is not None and capture is not None:
                with capture.global_and_fixture_disabled():
                    reporter.write_line(f"{time.monotonic() - started:6.1f} s  {text}")

        if _UP_FAILED in config.stash:
            # What failed once would fail again for every test, minutes each.
            raise config.stash[_UP_FAILED]
        try:
            if _AHEAD in config.stash:
                config.stash[_STARTED_HERE] = config.stash[_AHEAD].wait(tell)
                del config.stash[_AHEAD]
            how = lifecycle.up(inventory, tell)
        except FaultbedError as error:
            config.stash[_UP_FAILED] = error
            raise
        if how != "already up":
            config.stash[_STARTED_HERE] = True
    return inventory


@dataclass(kw_only=True)
class Keeper:
    """The session's lab between tests: open, with what it looked like when it was last put back into its snapshot.

    Every test ends with a look at the lab, against the same baseline: while nothing is found, nothing is put back.
    `work` marks the session on disk from its first test to its end, so that what a killed session leaves is found;
    `is_compared` is whether the last test's end has looked at the lab.
    """

    lab: Lab
    baseline: fingerprint.Fingerprint | None = None
    work: dirty.Work | None = None
    is_compared: bool = True

    def into_known_state(self, *, always: bool) -> fingerprint.Fingerprint:
        """Reset where that is due: for the first test, after a test that failed, or always when asked to."""
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
        """Remove the mark of the session, or, after a test that was cut off, leave it to the next command."""
        if self.work is None:
            return
        if self.is_compared:
            self.work.mark.remove()
        else:
            self.work.mark.abandon()

    def distrust(self) -> None:
        """The next test begins with a reset."""
        self.baseline = None

    def mark(self, reasons: list[str], before: fingerprint.Fingerprint) -> None:
        """The lab is DIRTY, for whoever works with it next, too: a rack has no snapshot to go back to."""
        self.distrust()
        # On a full disk, or beside the mark of another command, that of the session stays: the next command compares.
        self.is_compared = False
        self.is_compared = dirty.mark(self.lab.state_dir, reasons, before)

    def refuse_dirty(self) -> None:
        """A soft lab that is marked goes back to its snapshot; a rack takes no work until it is healed.

        Raises:
            DirtyLab: it is such a rack.
        """
        if self.lab.kind == "soft" and dirty.is_marked(self.lab.state_dir):
            self.into_known_state(always=True)
        dirty.refuse(self.lab.state_dir, self.lab.name)


_KEEPER = pytest.StashKey[Keeper]()


def keeper_of(config: pytest.Config) -> Keeper:
    """The session's lab, up and open."""
    if _KEEPER not in config.stash:
        config.stash[_KEEPER] = Keeper(lab=open_lab(bring_up(config)))
    held(config)
    return config.stash[_KEEPER]


@contextlib.contextmanager
def or_give_up(config: pytest.Config) -> Iterator[None]:
    """A lab that does not answer, or cannot be put back, is opened anew (and brought up) by the next test."""
    try:
        yield
    except FaultbedError:
        if _KEEPER in config.stash:
            config.stash[_KEEPER].lab.close()
            del config.stash[_KEEPER]
        raise


def begin_ahead(config: pytest.Config) -> None:
    """A soft lab that is down comes up from now on, while tests run that do not need it."""
    if inventory_of(config).kind == "soft":
        held(config)
        if ahead := Ahead.start(inventory_of(config)):
            config.stash[_AHEAD] = ahead


def leave(config: pytest.Config) -> None:
    """Leave the lab as it was found: a lab that this session brought up goes down again."""
    if _AHEAD in config.stash:
        config.stash[_AHEAD].stop()
        config.stash[_STARTED_HERE] = True
    if _KEEPER in config.stash:
        config.stash[_KEEPER].end_work()
        config.stash[_KEEPER].lab.close()
    if config.stash.get(_STARTED_HERE, False):
        lifecycle.down(config.stash[_INVENTORY])
    if _HOLDING in config.stash:
        config.stash[_HOLDING][0].close()
