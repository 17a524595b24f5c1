"""A client of QEMU's machine protocol (QMP), with what a lab needs: commands and human-monitor commands.

Protocol: QEMU docs/interop/qmp-spec.rst. Each socket serves one client at a time; events are skipped.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from faultbed.testbed.errors import LabError

__all__ = ["Qmp"]


class Qmp:
    """One connection to one VM's QMP socket, for use as a context manager.

    Raises:
        LabError: QEMU does not answer, refuses a command, or misses the deadline.
    """

    def __init__(self, path: Path, *, timeout_s: float = 10.0) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise LabError(
                f"no QEMU answers on {path} ({error}); check with `faultbed status` whether the VM runs"
            ) from error
        self._lines = self._socket.makefile("rb")
        try:
            self._read(timeout_s)
            self.command("qmp_capabilities")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the VM continues."""
        with contextlib.suppress(OSError):
            self._lines.close()
        self._socket.close()

    def command(self, name: str, *, timeout_s: float = 30.0, **arguments: Any) -> Any:
        """Run a QMP command and return its result."""
        request = {"execute": name, **({"arguments": arguments} if arguments else {})}
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise LabError(f"the VM behind {self._path} is gone ({error}) before {name}") from error
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._read(max(0.01, deadline - time.monotonic()))
            if "error" in answer:
                raise LabError(f"QEMU refused {name}: {answer['error'].get('desc', answer['error'])}")
            if "return" in answer:
                return answer["return"]

    def hmp(self, line: str, *, timeout_s: float = 60.0) -> str:
        """Run a human-monitor command, for what QMP has no command for, and return its output."""
        return str(self.command("human-monitor-command", timeout_s=timeout_s, **{"command-line": line}))

    def _read(self, timeout_s: float) -> dict[str, Any]:
        self._socket.settimeout(timeout_s)
        try:
            line = self._lines.readline()
        except TimeoutError as error:
            raise LabError(
                f"QEMU did not answer on {self._path} in {timeout_s:.0f} s: the VM may be hung; `faultbed reset` "
                "starts it again"
            ) from error
        except OSError as error:
            raise LabError(f"the VM behind {self._path} is gone ({error})") from error
        if not line:
            raise LabError(f"the VM behind {self._path} has ended; `faultbed reset` starts it again")
        message: dict[str, Any] = json.loads(line)
        return message
