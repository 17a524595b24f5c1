"""A host that reboots: QEMU resets its VM (QMP `system_reset`, qapi/machine.json), like a reset button.

Nothing restores the programs that ran on the host. After the reset this actuator runs `faultbed.inject.reprovision` on
the controller's machine; the fault is over when that program has provisioned the host again. This may take minutes,
during which the actuator sends heartbeats.
"""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import tempfile
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.command import heartbeat
from faultbed.inject.node.qmp import DEADLINE_S, execute

__all__ = ["REPROVISION_DEADLINE_S", "VmResetActuator"]

REPROVISION_DEADLINE_S = 900.0
"""How long a host may take to boot and be provisioned again, both under emulation.

Each of the two has a shorter deadline of its own (`faultbed.testbed.backends.soft.fleet`,
`faultbed.testbed.provision`).
"""

_HEARTBEAT_S = 0.5


class VmResetActuator(Actuator):
    """Resets the VM `host` through its QMP socket. `reprovision` is the command that provisions it after its boot."""

    def __init__(self, *, host: str, socket: str, reprovision: list[str]) -> None:
        self._host, self._socket, self._reprovision = host, socket, reprovision
        self._boot = "unknown"
        self._resets = 0
        self._is_away = False

    def prepare(self) -> dict[str, Any]:
        """Refuse a VM that does not run or answer; store the id of its boot."""
        status = execute(self._socket, "query-status").get("status")
        if status != "running":
            raise Refused(f"{self._host} is {status}, not running; run `faultbed heal`")
        self._boot = self._run([*self._reprovision, "--print-boot"]).strip()
        return self.read()

    def revert_script(self) -> str:
        """Return a script that provisions the host again, unless it is still in the stored boot."""
        return shlex.join(self._reprovision_command())

    def on(self) -> None:
        """Reset the VM, and wait for QEMU's confirmation."""
        self._is_away = True
        heartbeat()
        execute(self._socket, "system_reset", event="RESET", timeout_s=DEADLINE_S)
        self._resets += 1

    def off(self) -> None:
        """Wait until the host is provisioned again."""
        self._run(self._reprovision_command())
        self._is_away = False

    def read(self) -> dict[str, Any]:
        """Return whether the host was reset and is not provisioned yet. `boot` is the boot before the reset."""
        return {"applied": self._is_away, "host": self._host, "resets": self._resets, "boot": self._boot}

    def _reprovision_command(self) -> list[str]:
        return [*self._reprovision, "--unless", self._boot]

    def _run(self, argv: list[str]) -> str:
        """Run a program and return its output. There is no timeout, because the program has its own deadlines.

        Raises:
            OSError: it failed; the message has its output.
        """
        # A file instead of a pipe: a descendant of the program may keep a pipe open after the program has ended.
        with tempfile.TemporaryFile() as output:
            run = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            exit_fd = os.pidfd_open(run.pid)
            try:
                while not select.select([exit_fd], [], [], _HEARTBEAT_S)[0]:
                    heartbeat()
            finally:
                os.close(exit_fd)
            code = run.wait(timeout=_HEARTBEAT_S)  # its pidfd is readable: it has ended
            output.seek(0)
            text = output.read().decode(errors="replace")
        if code:
            raise OSError(f"`{shlex.join(argv)[-120:]}` ended with {code}: {' '.join(text.split())[-300:]}")
        return text
