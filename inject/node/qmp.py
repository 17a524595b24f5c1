"""An RNIC's carrier, taken away by QEMU: QMP `set_link` (QEMU's qapi/net.json).

QMP has no query for a link's state; the acknowledgement is all it says, so the guest's own carrier counters are the
proof. Run as a program (`python -m inject.node.qmp SOCKET NIC`) it brings the link up: the revert.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any

from inject.node.actuator import Refused

__all__ = ["QmpActuator", "ask", "set_link"]


class QmpActuator:
    """Takes the link of QEMU's network device `nic` down, through the QMP socket of its VM."""

    poll_s = None

    def __init__(self, *, host: str, netdev: str, socket: str, nic: str, python: list[str]) -> None:
        self._netdev, self._socket, self._nic, self._python = f"{host}/{netdev}", socket, nic, python
        self._down = False

    def prepare(self) -> dict[str, Any]:
        """Refuse the management interface, and a VM whose QMP does not answer or does not know the device."""
        if self._netdev.endswith("/mgmt0"):
            raise Refused(f"{self._netdev} carries the management connection: never a target")
        # Up while it is up changes nothing in the guest (hw/net/virtio-net.c, virtio_net_set_link_status).
        set_link(self._socket, self._nic, up=True)
        return self.read()

    def revert_script(self) -> str:
        """Bring it up, by a process of its own."""
        return " ".join([*(f"'{word}'" for word in self._python), "-m", "inject.node.qmp", self._socket, self._nic])

    def on(self) -> None:
        """Down."""
        set_link(self._socket, self._nic, up=False)
        self._down = True

    def off(self) -> None:
        """Up."""
        set_link(self._socket, self._nic, up=True)
        self._down = False

    def read(self) -> dict[str, Any]:
        """What QEMU last acknowledged."""
        return {"applied": self._down, "device": self._netdev, "nic": self._nic}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Each command has its own connection: QEMU's socket serves one client at a time."""


def set_link(path: str, nic: str, *, up: bool, timeout_s: float = 3.0) -> None:
    """Set a link's state.

    Raises:
        OSError: no answer by the deadline, or QEMU refused.
    """
    ask(path, "set_link", {"name": nic, "up": up}, timeout_s=timeout_s)


def ask(
    path: str,
    command: str,
    arguments: dict[str, Any] | None = None,
    *,
    event: str | None = None,
    timeout_s: float = 3.0,
) -> dict[str, Any]:
    """What QEMU returns for a command, waiting for our turn at the socket; with `event`, that has been told too.

    Raises:
        OSError: no answer (or no such event) by the deadline, or QEMU refused.
    """
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as qmp:
        qmp.settimeout(timeout_s)
        qmp.connect(path)
        lines = qmp.makefile("rwb", buffering=0)
        json.loads(lines.readline() or b"{}")
        _said(lines, path, "qmp_capabilities", {}, None, deadline)
        return _said(lines, path, command, arguments or {}, event, deadline)


def _said(
    lines: Any, path: str, command: str, arguments: dict[str, Any], event: str | None, deadline: float
) -> dict[str, Any]:
    lines.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
    returned, waits = None, event is not None
    while returned is None or waits:
        if time.monotonic() > deadline:
            raise OSError(f"QMP at {path} did not answer {command} in time")
        answer = json.loads(lines.readline() or b'{"error":{"desc":"it closed the connection"}}')
        if "error" in answer:
            raise OSError(f"QMP at {path} refused {command}: {answer['error'].get('desc')}")
        waits = waits and answer.get("event") != event
        returned = answer.get("return", returned)
    return dict(returned)


if __name__ == "__main__":
    set_link(sys.argv[1], sys.argv[2], up=True)
