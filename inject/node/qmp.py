"""An RNIC's carrier, taken away by QEMU: QMP `set_link` (QEMU's qapi/net.json).

QMP has no query for a link's state; the acknowledgement is all it says, so the guest's own carrier counters are the
proof. Run as a program (`python -m inject.node.qmp SOCKET NIC`) it brings the link up: the revert.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from inject.node.actuator import Refused

__all__ = ["DEADLINE_S", "QmpActuator", "ask", "set_link"]

DEADLINE_S = 3.0
"""How long QEMU may take to answer one command. Who watches a holder is more patient (`inject.channels`)."""


class QmpActuator:
    """Takes the link of QEMU's network device `nic` down, through the QMP socket of its VM."""

    poll_s = None

    def __init__(self, *, host: str, netdev: str, socket: str, nic: str, python: list[str]) -> None:
        self._netdev, self._socket, self._nic, self._python = f"{host}/{netdev}", socket, nic, python
        self._down = False
        self._alive: Callable[[], None] = lambda: None

    def wait_with(self, alive: Callable[[], None]) -> None:
        """Call `alive` before each command: only one may take its whole deadline while the holder is silent."""
        self._alive = alive

    def prepare(self) -> dict[str, Any]:
        """Refuse the management interface, and a VM whose QMP does not answer or does not know the device."""
        if self._netdev.endswith("/mgmt0"):
            raise Refused(f"{self._netdev} carries the management connection: never a target")
        # Only a question: another fault may hold this link down.
        ask(self._socket, "query-rx-filter", {"name": self._nic})
        return self.read()

    def revert_script(self) -> str:
        """Bring it up, by a process of its own."""
        return " ".join([*(f"'{word}'" for word in self._python), "-m", "inject.node.qmp", self._socket, self._nic])

    def on(self) -> None:
        """Take the carrier away."""
        self._alive()
        set_link(self._socket, self._nic, up=False)
        self._down = True

    def off(self) -> None:
        """Give the carrier back."""
        self._alive()
        set_link(self._socket, self._nic, up=True)
        self._down = False

    def read(self) -> dict[str, Any]:
        """What QEMU last acknowledged."""
        return {"applied": self._down, "device": self._netdev, "nic": self._nic}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Each command has its own connection: QEMU's socket serves one client at a time."""


def set_link(path: str, nic: str, *, up: bool, timeout_s: float = DEADLINE_S) -> None:
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
    timeout_s: float = DEADLINE_S,
) -> Any:
    """Return QEMU's answer to a command, waiting for our turn at the socket; with `event`, after that event.

    Raises:
        OSError: no answer (or no such event) by the deadline, or QEMU refused.
    """
    talk = _Talk(path, time.monotonic() + timeout_s)
    try:
        talk.connect()
        talk.line()
        talk.run("qmp_capabilities", {}, None)
        return talk.run(command, arguments or {}, event)
    except TimeoutError:
        raise OSError(f"QMP at {path} did not answer {command} within {timeout_s:g} s") from None
    finally:
        talk.close()


class _Talk:
    """One connection to a QMP socket that has one deadline for all that is said on it."""

    def __init__(self, path: str, deadline: float) -> None:
        self._path, self._deadline, self._pending = path, deadline, b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)

    def connect(self) -> None:
        self._socket.settimeout(self._left_s())
        self._socket.connect(self._path)

    def close(self) -> None:
        self._socket.close()

    def run(self, command: str, arguments: dict[str, Any], event: str | None) -> Any:
        self._socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        returned, is_done, waits = None, False, event is not None
        while not is_done or waits:
            answer = self.line()
            if "error" in answer:
                raise OSError(f"QMP at {self._path} refused {command}: {answer['error'].get('desc')}")
            waits = waits and answer.get("event") != event
            if "return" in answer:
                returned, is_done = answer["return"], True
        return returned

    def line(self) -> dict[str, Any]:
        """Return the next message."""
        while b"\n" not in self._pending:
            self._socket.settimeout(self._left_s())
            chunk = self._socket.recv(65536)
            if not chunk:
                return {"error": {"desc": "it closed the connection"}}
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return dict(json.loads(line))

    def _left_s(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


if __name__ == "__main__":
    set_link(sys.argv[1], sys.argv[2], up=True)
