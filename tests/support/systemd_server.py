"""A server in place of systemd's private socket: it sends given answers, one for each request."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self


class Systemd:
    """Answers every client with `answers`: to its name, and to its request; b"" closes, None keeps it waiting."""

    def __init__(self, path: Path, answers: Sequence[bytes | None]) -> None:
        self._answers = answers
        self.requests: list[bytes] = []
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                for end, answer in zip(_ENDS, self._answers, strict=False):
                    self.requests.append(_until(client, end))
                    if answer is None:
                        _until(client, b"no end")
                    client.sendall(answer or b"")


_ENDS = (b"BEGIN\r\n", b"faultbed-*\0")
"""The end of a client's name, and of its request."""


def _until(client: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        part = client.recv(65536)
        if not part:
            raise OSError("the client has gone")
        data += part
    return data
