"""A soft lab comes up in a process of its own, while its session has something else to do."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Self

from testbed.backends.soft import lifecycle
from testbed.inventory.lab_inventory import Inventory

__all__ = ["Ahead"]

_PATIENCE_S = 1800.0
_CLEAN_UP_S = 120.0
_COMMAND = "from harness.console import main; main()"


class Ahead:
    """`faultbed up` that runs. Made by `start`; `wait` for it, or `stop` it."""

    def __init__(self, inventory: Inventory) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `wait` or `stop`
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, "--lab", str(inventory.path), "up"],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )

    @classmethod
    def start(cls, inventory: Inventory) -> Self | None:
        """Begin; None: it is up already, or cannot be in the state that it is in."""
        return cls(inventory) if lifecycle.status(inventory).state.startswith("down") else None

    def wait(self, tell: Callable[[str], None]) -> bool:
        """Until it is over; whether the lab is up. What it said is told, for those who wonder what took so long."""
        tell("the lab has been coming up meanwhile")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_PATIENCE_S)
        if self._process.poll() is None:
            self.stop()
            return False
        self._said.seek(0)
        for line in self._said.read().decode(errors="replace").splitlines():
            tell(line)
        self._said.close()
        return self._process.returncode == 0

    def stop(self) -> None:
        """End it, as Ctrl-C does: it leaves nothing behind. By SIGTERM, for a job in the background hears no SIGINT."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=_CLEAN_UP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._said.close()
