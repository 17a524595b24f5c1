"""Client of a GPU: request work and get a callback when it is done, without blocking.

A soft GPU (`faultbed.traffic.node.softgpu`) has a socket. For a real GPU the client starts a process
(`faultbed.traffic.node.cudagpu`) that ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["GpuClient"]

MODULE = "faultbed.traffic.node.cudagpu"
PATIENCE_S = 5.0


class GpuClient:
    """One connection to a GPU, served by the engine's selector.

    `gpu` is `{"socket": path}` for a soft GPU and `{"pcie": address or None, "number": n}` for a real one. `error` is
    the error message of the GPU if its last request failed.
    """

    def __init__(self, gpu: dict[str, Any], selector: selectors.BaseSelector) -> None:
        self.selector = selector
        self.buffer = b""
        self.error = ""
        self.on_done: Callable[[int | None], None] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        if "socket" in gpu:
            self.name = f"the soft GPU at {gpu['socket']}"
            self.socket = _connected(gpu["socket"])
        else:
            self.name = f"GPU {gpu['pcie'] or gpu['number']}"
            self.socket, theirs = socket.socketpair()
            with theirs:
                words = [str(theirs.fileno()), str(gpu["number"]), *([gpu["pcie"]] if gpu["pcie"] else [])]
                self.process = subprocess.Popen([sys.executable, "-m", MODULE, *words], pass_fds=(theirs.fileno(),))
        self.socket.settimeout(0)
        selector.register(self.socket, selectors.EVENT_READ, self._readable)

    def compute(self, units: int, on_done: Callable[[int | None], None]) -> None:
        """Request `units` of work. `on_done(ns)` gets the time it took, or None if the GPU is gone."""
        self.on_done = on_done
        try:
            self.socket.sendall(json.dumps({"units": units}).encode() + b"\n")
        except OSError:
            self._answer(None)

    def _answer(self, nanoseconds: int | None) -> None:
        done, self.on_done = self.on_done, None
        if done is not None:
            done(nanoseconds)

    def _readable(self) -> None:
        try:
            data = self.socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(self.socket)
            self._answer(None)
            return
        self.buffer += data
        while b"\n" in self.buffer:
            line, self.buffer = self.buffer.split(b"\n", 1)
            reply = json.loads(line)
            self.error = reply.get("error", "")
            self._answer(reply.get("ns"))

    def close(self) -> None:
        """Close the connection. The GPU drops this client's work when it notices."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self.socket)
        self.socket.close()
        if self.process is not None:
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:  # a kernel that never ends
                self.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(PATIENCE_S)


def _connected(path: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(PATIENCE_S)
    try:
        client.connect(path)
    except OSError as error:
        client.close()
        raise OSError(f"no soft GPU at {path}: {os.strerror(error.errno or 0)}") from error
    return client
