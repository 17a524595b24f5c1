"""Bring up a soft lab in a child process while the pytest session runs tests that need no lab."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Self

from faultbed.testbed.backends.soft import lifecycle
from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["LabPrewarm"]

_TIMEOUT_S = 1800.0
_CLEAN_UP_S = 120.0
_FAULTBED = (sys.executable, "-m", "faultbed")


class LabPrewarm:
    """A child process that runs `faultbed up`. `start` begins it; `wait` or `stop` ends it."""

    def __init__(self, inventory: Inventory) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `wait` or `stop`
        self._process = subprocess.Popen(
            [*_FAULTBED, "--lab", str(inventory.path), "up"],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    @classmethod
    def start(cls, inventory: Inventory) -> Self | None:
        """Start the child process if the lab is down; return None if the lab is in any other state."""
        return cls(inventory) if lifecycle.status(inventory).state.startswith("down") else None

    def wait(self, report: Callable[[str], None]) -> bool:
        """Wait until `faultbed up` ends, and return whether it succeeded. After half an hour, stop it and return False.

        `report` receives its output, line by line, once it has ended.
        """
        report("waiting for the lab, which has been coming up while other tests ran")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_TIMEOUT_S)
        if self._process.poll() is None:
            self.stop()
            return False
        self._output.seek(0)
        for line in self._output.read().decode(errors="replace").splitlines():
            report(line)
        self._output.close()
        return self._process.returncode == 0

    def stop(self) -> None:
        """Terminate `faultbed up`, which then removes what it has started, as after Ctrl-C.

        The signal is SIGTERM, because a process that a shell started in the background ignores SIGINT.
        """
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=_CLEAN_UP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # a process in an uninterruptible wait
                    self._process.wait(timeout=_CLEAN_UP_S)
        self._output.close()
