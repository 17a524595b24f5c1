"""A host that reboots: QEMU resets its VM (QMP `system_reset`, qapi/machine.json), like a reset button.

Nothing restores the programs that ran there. The fault is over when `inject.reprovision`, which this actuator starts on
the controller, has provisioned the host again. That may take minutes, with a heartbeat meanwhile.
"""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import tempfile
from typing import Any

from inject.node.actuator import Actuator, Refused
from inject.node.command import heartbeat
from inject.node.qmp import DEADLINE_S, execute

__all__ = ["VmResetActuator"]

_HEARTBEAT_S = 0.5


class VmResetActuator(Actuator):
    """Resets the VM `host` through its QMP socket; `rejoin` is the program that brings it back into its lab."""

    def __init__(self, *, host: str, socket: str, rejoin: list[str]) -> None:
        self._host, self._socket, self._rejoin = host, socket, rejoin
        self._boot = "unknown"
        self._resets = 0
        self._away = False

    def prepare(self) -> dict[str, Any]:
        """Refuse a VM that does not run or answer; store the id of its boot."""
        status = execute(self._socket, "query-status").get("status")
        if status != "running":
            raise Refused(f"{self._host} is {status}, not running; run `faultbed heal`")
        self._boot = self._run([*self._rejoin, "--look"]).strip()
        return self.read()

    def revert_script(self) -> str:
        """Return a script that brings the host back into its lab, unless it is still in the stored boot."""
        return shlex.join(self._back())

    def on(self) -> None:
        """Reset the VM, and wait for QEMU's confirmation."""
        self._away = True
        heartbeat()
        execute(self._socket, "system_reset", event="RESET", timeout_s=DEADLINE_S)
        self._resets += 1

    def off(self) -> None:
        """Wait until the host is back in its lab."""
        self._run(self._back())
        self._away = False

    def read(self) -> dict[str, Any]:
        """Report whether the host was reset and is not back yet; `boot` is the boot before the reset."""
        return {"applied": self._away, "host": self._host, "resets": self._resets, "boot": self._boot}

    def _back(self) -> list[str]:
        return [*self._rejoin, "--unless", self._boot]

    def _run(self, argv: list[str]) -> str:
        """Run a program and return its output, however long it takes: it has deadlines of its own.

        Raises:
            OSError: it failed; the message has its output.
        """
        # Into a file: a descendant of the program may keep a pipe open for longer than the program runs.
        with tempfile.TemporaryFile() as output:
            run = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            ended = os.pidfd_open(run.pid)
            try:
                while not select.select([ended], [], [], _HEARTBEAT_S)[0]:
                    heartbeat()
            finally:
                os.close(ended)
            code = run.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        if code:
            raise OSError(f"`{shlex.join(argv)[-120:]}` ended with {code}: {' '.join(text.split())[-300:]}")
        return text
