"""The carrier of a VM's RNIC, switched off and on with QEMU's command `set_link` (QEMU's qapi/net.json).

QMP acknowledges the command but cannot query a link's state. Therefore the proof comes from the guest's own carrier
counters. As a program (`python -m faultbed.inject.node.qmp SOCKET NIC`) this module brings the link up: that is the
revert.
"""

from __future__ import annotations

import json
import shlex
import socket
import sys
import time
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.command import heartbeat

__all__ = ["DEADLINE_S", "QmpActuator", "execute", "set_link"]

DEADLINE_S = 3.0
"""Deadline for QEMU's answer to one command. The guardian of a holder waits longer (`inject/leases/channels.py`)."""


class QmpActuator(Actuator):
    """Takes the link of QEMU's network device `nic` down, through the QMP socket of its VM."""

    loss_unknown_why = "QEMU does not report a link's state"

    def __init__(self, *, host: str, netdev: str, socket: str, nic: str, python: list[str]) -> None:
        self._netdev, self._socket, self._nic, self._python = f"{host}/{netdev}", socket, nic, python
        self._down = False

    def prepare(self) -> dict[str, Any]:
        """Refuse the management interface, and a VM whose QMP does not answer or does not know the device."""
        if self._netdev.endswith("/mgmt0"):
            raise Refused(f"{self._netdev} carries the management connection and is never a target; choose another")
        # A query that fails for an unknown device. `set_link` would end another fault that holds this link down.
        execute(self._socket, "query-rx-filter", {"name": self._nic})
        return self.read()

    def revert_script(self) -> str:
        return shlex.join([*self._python, "-m", "faultbed.inject.node.qmp", self._socket, self._nic])

    def on(self) -> None:
        heartbeat()
        set_link(self._socket, self._nic, up=False)
        self._down = True

    def off(self) -> None:
        heartbeat()
        set_link(self._socket, self._nic, up=True)
        self._down = False

    def read(self) -> dict[str, Any]:
        """Return what QEMU last acknowledged."""
        return {"applied": self._down, "device": self._netdev, "nic": self._nic}


def set_link(path: str, nic: str, *, up: bool, timeout_s: float = DEADLINE_S) -> None:
    """Set a link's state.

    Raises:
        OSError: no answer by the deadline, or QEMU refused.
    """
    execute(path, "set_link", {"name": nic, "up": up}, timeout_s=timeout_s)


def execute(
    path: str,
    command: str,
    arguments: dict[str, Any] | None = None,
    *,
    event: str | None = None,
    timeout_s: float = DEADLINE_S,
) -> Any:
    """Run a command in QEMU and return its answer. With `event`, return only after QEMU has also sent that event.

    QEMU serves one client of the socket at a time, so that this call may first wait for another client to finish.

    Raises:
        OSError: no answer (or no such event) by the deadline, or QEMU refused.
    """
    connection = _Connection(path, time.monotonic() + timeout_s)
    try:
        connection.connect()
        connection.read_message()  # the greeting
        connection.run("qmp_capabilities", {}, None)
        return connection.run(command, arguments or {}, event)
    except TimeoutError:
        raise OSError(f"QMP at {path} did not answer {command} within {timeout_s:g} s") from None
    finally:
        connection.close()


class _Connection:
    """One connection to a QMP socket, with one deadline for the whole exchange."""

    def __init__(self, path: str, deadline: float) -> None:
        self._path, self._deadline, self._pending = path, deadline, b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)

    def connect(self) -> None:
        self._socket.settimeout(self._remaining_s())
        self._socket.connect(self._path)

    def close(self) -> None:
        self._socket.close()

    def run(self, command: str, arguments: dict[str, Any], event: str | None) -> Any:
        self._socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        returned, has_returned, has_event = None, False, event is None
        while not has_returned or not has_event:
            message = self.read_message()
            if "error" in message:
                raise OSError(f"QMP at {self._path} refused {command}: {message['error'].get('desc')}")
            has_event = has_event or message.get("event") == event
            if "return" in message:
                returned, has_returned = message["return"], True
        return returned

    def read_message(self) -> dict[str, Any]:
        """Return the next message of QEMU: a greeting, an answer or an event."""
        while b"\n" not in self._pending:
            self._socket.settimeout(self._remaining_s())
            chunk = self._socket.recv(65536)
            if not chunk:
                return {"error": {"desc": "QEMU closed the connection"}}
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return dict(json.loads(line))

    def _remaining_s(self) -> float:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        return remaining_s


if __name__ == "__main__":
    set_link(sys.argv[1], sys.argv[2], up=True)
