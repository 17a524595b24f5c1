"""Client of the soft GPU (`traffic.node.softgpu`): asks for work and is told when it is done, without blocking."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GpuClient"]


class GpuClient:
    """One connection to a GPU's unix socket, served by the engine's selector."""

    def __init__(self, path: str, selector: selectors.BaseSelector) -> None:
        self.path = path
        self.selector = selector
        self.buffer = b""
        self.on_done: Callable[[int | None], None] | None = None
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(5)
        try:
            self.socket.connect(path)
        except OSError as error:
            self.socket.close()
            raise OSError(f"no soft GPU at {path}: {os.strerror(error.errno or 0)}") from error
        self.socket.settimeout(0)
        selector.register(self.socket, selectors.EVENT_READ, self._readable)

    def compute(self, units: int, on_done: Callable[[int | None], None]) -> None:
        """Ask for `units`; `on_done(ns)` is called with the time it took, or `on_done(None)` when the GPU is gone."""
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
            self._answer(json.loads(line).get("ns"))

    def close(self) -> None:
        """Hang up; the GPU drops what it was doing for this client when it notices."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self.socket)
        self.socket.close()
