"""A host that reboots: QEMU resets its VM (QMP `system_reset`, qapi/machine.json), as a reset button would.

Nothing brings back what ran there. The fault is over when the host has been provisioned again, which a program of the
controller's side does (`inject.reprovision`), started by us; it may take minutes, in which we say that we live.
"""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

from inject.node.actuator import Refused
from inject.node.qmp import DEADLINE_S, ask

__all__ = ["VmResetActuator"]

_SAY_EVERY_S = 0.5


class VmResetActuator:
    """Resets the VM `host` through its QMP socket; `rejoin` is the program that brings it back into its lab."""

    poll_s = None

    def __init__(self, *, host: str, socket: str, rejoin: list[str]) -> None:
        self._host, self._socket, self._rejoin = host, socket, rejoin
        self._boot = "unknown"
        self._resets = 0
        self._away = False
        self._alive: Callable[[], None] = lambda: None

    def wait_with(self, alive: Callable[[], None]) -> None:
        """Call `alive` now and then while something takes long."""
        self._alive = alive

    def prepare(self) -> dict[str, Any]:
        """Refuse a VM that does not run or does not answer; remember which boot it is in."""
        status = ask(self._socket, "query-status").get("status")
        if status != "running":
            raise Refused(f"{self._host} is {status}, not running: run `faultbed heal`")
        self._boot = self._run([*self._rejoin, "--look"]).strip()
        return self.read()

    def revert_script(self) -> str:
        """Bring it back into its lab, unless it is still in the boot that it was in."""
        return shlex.join(self._back())

    def on(self) -> None:
        """Reset; QEMU tells when it is done."""
        self._away = True
        self._alive()
        ask(self._socket, "system_reset", event="RESET", timeout_s=DEADLINE_S)
        self._resets += 1

    def off(self) -> None:
        """Wait until it is back in its lab."""
        self._run(self._back())
        self._away = False

    def read(self) -> dict[str, Any]:
        """Whether it has been reset and is not back; `boot` is the one before."""
        return {"applied": self._away, "host": self._host, "resets": self._resets, "boot": self._boot}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Each command has its own connection."""

    def _back(self) -> list[str]:
        return [*self._rejoin, "--unless", self._boot]

    def _run(self, argv: list[str]) -> str:
        """What a program printed, however long it takes: it has deadlines of its own.

        Raises:
            OSError: it failed; the message is what it said.
        """
        # Into a file: a program that it started may hold a pipe for longer than it lives.
        with tempfile.TemporaryFile() as said:
            run = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
            ended = os.pidfd_open(run.pid)
            try:
                while not select.select([ended], [], [], _SAY_EVERY_S)[0]:
                    self._alive()
            finally:
                os.close(ended)
            code = run.wait()
            said.seek(0)
            told = said.read().decode(errors="replace")
        if code:
            raise OSError(f"`{shlex.join(argv)[-120:]}` ended with {code}: {' '.join(told.split())[-300:]}")
        return told
