"""A connection to the storage server (`faultbed.traffic.node.storage`), served by the selector of its process."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import zlib

from faultbed.traffic.node.storage import BLOCK_BYTES, checksum

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StorageClient"]


class StorageClient:
    """One connection to the storage server, served by a selector, with one request at a time.

    `on_error(text)` is called once if the server is gone or reports an error.
    """

    def __init__(
        self, address: str, port: int, selector: selectors.BaseSelector, on_error: Callable[[str], None]
    ) -> None:
        self.name = f"storage {address}:{port}"
        self.selector = selector
        self.on_error = on_error
        self.on_done: Callable[[], None] | None = None
        self.out: list[memoryview] = []
        self.header = b""
        self.left = self.crc = self.expected_crc = 0
        self.kept: bytearray | None = None
        try:
            self.socket = socket.create_connection((address, port), timeout=20)
        except OSError as error:
            raise OSError(f"no {self.name}: {error}") from error
        self.socket.settimeout(0)
        selector.register(self.socket, selectors.EVENT_READ, self._ready)

    @property
    def is_busy(self) -> bool:
        """Whether a request is in progress."""
        return self.on_done is not None

    def get(self, size_bytes: int, on_done: Callable[[], None]) -> None:
        """Fetch `size_bytes`. `on_done()` is called when all bytes have arrived and are correct."""
        self._request({"get": size_bytes}, [], on_done)

    def put(self, parts: list[memoryview], on_done: Callable[[], None], header: dict[str, int] | None = None) -> None:
        """Store `parts`, as a checkpoint if it has a `header`.

        `on_done()` is called when the server has all bytes and they are correct.
        """
        request = {"put": sum(len(part) for part in parts), "crc": checksum(parts), **(header or {})}
        self._request(request, parts, on_done)

    def restore(self, checkpoint: dict[str, int], on_data: Callable[[bytes], None]) -> None:
        """Fetch a checkpoint (`rank`, `generation`, `iterations`), and call `on_data` with its verified data."""
        kept = bytearray()
        request = {
            "restore": checkpoint["iterations"],
            "rank": checkpoint["rank"],
            "generation": checkpoint["generation"],
        }
        self._request(request, [], lambda: on_data(bytes(kept)))
        self.kept = kept

    def _request(self, request: dict[str, int], parts: list[memoryview], on_done: Callable[[], None]) -> None:
        self.on_done, self.kept = on_done, None
        self.out = [memoryview(json.dumps(request).encode() + b"\n"), *parts]
        self.selector.modify(self.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self._ready)

    def _ready(self) -> None:
        try:
            self._write()
            self._read()
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(f"{self.name}: {os.strerror(error.errno or 0)}")

    def _write(self) -> None:
        while self.out:
            try:
                sent = self.socket.send(self.out[0])
            except BlockingIOError:
                return
            if sent < len(self.out[0]):
                self.out[0] = self.out[0][sent:]
            else:
                self.out.pop(0)
            if not self.out:
                self.selector.modify(self.socket, selectors.EVENT_READ, self._ready)

    def _read(self) -> None:
        data = self.socket.recv(BLOCK_BYTES)
        if not data:
            self._fail(f"{self.name} is gone")
            return
        if not self.left:
            head, end, data = (self.header + data).partition(b"\n")
            self.header = b"" if end else head
            if not end:
                return
            answer = json.loads(head)
            if "error" in answer:
                self._fail(f"{self.name}: {answer['error']}")
                return
            self.left, self.expected_crc, self.crc = answer.get("bytes", 0), answer.get("crc", 0), 0
        self.crc, self.left = zlib.crc32(data, self.crc), self.left - len(data)
        if self.kept is not None:
            self.kept += data
        if not self.left:
            self._done()

    def _done(self) -> None:
        if self.crc != self.expected_crc:
            self._fail(f"{self.name}: checksum mismatch: the received bytes differ from those sent")
            return
        done, self.on_done = self.on_done, None
        if done is not None:
            done()

    def _fail(self, text: str) -> None:
        self.close()
        self.on_error(text)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self.socket)
        self.socket.close()
