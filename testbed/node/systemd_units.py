"""The state of systemd's units, read from PID 1 over its private socket.

`systemctl list-units` sends the same request (ListUnitsByPatterns) over the same socket; starting that program costs an
emulated machine a tenth of a second of CPU time. The socket accepts root only.

Formats: D-Bus specification ("Authentication Protocol", "Message Protocol"), org.freedesktop.systemd1(5).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["SOCKET", "Unit", "list_units"]

SOCKET = "/run/systemd/private"
Unit = tuple[str, str, str]
"""A unit's name, active state and sub-state, such as `("faultbed-gpu0.service", "active", "running")`."""

_MANAGER = (
    (1, "o", "/org/freedesktop/systemd1"),
    (2, "s", "org.freedesktop.systemd1.Manager"),
    (3, "s", "ListUnitsByPatterns"),
    (6, "s", "org.freedesktop.systemd1"),
    (8, "g", "asas"),
)
"""Header fields of the request: path, interface, member, destination, signature of the arguments."""
_CALL, _RETURN, _ERROR = 1, 2, 3
_ERROR_NAME, _REPLY_SERIAL = 4, 5
_SERIAL = 1
_ORDERS = {b"l": "<", b"B": ">"}
"""struct's character for the byte order of a message, by the message's first byte."""
_UNIT = "ssssssouso"  # name, description, load state, active state, sub-state, ...


def list_units(pattern: str, *, within_s: float) -> list[Unit]:
    """Return all loaded units with a name of this pattern (fnmatch), inactive and failed ones too.

    Raises:
        OSError: systemd did not answer within `within_s` seconds, or refused, or its answer cannot be read.
    """
    try:
        with contextlib.closing(_Connection(SOCKET, within_s)) as systemd:
            systemd.authenticate()
            systemd.send(_request(pattern))
            return list(_units(systemd.reply()))
    except (OSError, struct.error, ValueError, IndexError) as error:
        raise OSError(f"systemd at {SOCKET}: {error}") from error


class _Connection:
    """A D-Bus connection without a bus daemon."""

    def __init__(self, path: str, within_s: float) -> None:
        self._deadline = time.monotonic() + within_s
        self._buffer = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(within_s)
            self._socket.connect(path)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def authenticate(self) -> None:
        """Authenticate as this process's user, whom the kernel attests.

        BEGIN is sent together with the user, and the request only after systemd's answer. If BEGIN and the request
        arrived in one piece, sd-bus would read both, leave the request unanswered, and wait for more.
        """
        self.send(b"\0AUTH EXTERNAL " + str(os.geteuid()).encode().hex().encode() + b"\r\nBEGIN\r\n")
        answer = self._line()
        if not answer.startswith(b"OK "):
            raise OSError(f"it rejected user {os.geteuid()}: {answer.decode(errors='replace')}")

    def reply(self) -> _Values:
        """Wait for the reply, and return its values. systemd's signals, which come on the same socket, are skipped."""
        while True:
            kind, fields, values = self._message()
            if fields.get(_REPLY_SERIAL) == _SERIAL and kind == _ERROR:
                raise OSError(f"it refused: {fields.get(_ERROR_NAME)}")
            if fields.get(_REPLY_SERIAL) == _SERIAL and kind == _RETURN:
                return values

    def _message(self) -> tuple[int, dict[int, Any], _Values]:
        """Receive a message: its type, its header fields and its values."""
        fixed = self._peek(16)
        if fixed[:1] not in _ORDERS:
            raise ValueError(f"a message begins with {fixed[:1]!r}")
        order = _ORDERS[fixed[:1]]
        size, _serial, fields_size = struct.unpack_from(f"{order}III", fixed, 4)
        head = 16 + (fields_size + 7 & ~7)
        whole = self._peek(head + size)
        self._buffer = self._buffer[head + size :]
        return fixed[1], dict(_fields(_Values(whole[: 16 + fields_size], 16, order))), _Values(whole[head:], 0, order)

    def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            self._receive()
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    def _peek(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._receive()
        return self._buffer[:size]

    def _receive(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise OSError("timed out")
        self._socket.settimeout(left_s)
        part = self._socket.recv(65536)
        if not part:
            raise OSError("it closed the connection")
        self._buffer += part


class _Values:
    """Marshalled values, which are read one after the other from the offset `at`."""

    def __init__(self, raw: bytes, at: int, order: str) -> None:
        self._raw, self._at, self._order = raw, at, order

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._raw)

    def align(self, size: int) -> None:
        self._at += -self._at % size

    def byte(self) -> int:
        self._at += 1
        return self._raw[self._at - 1]

    def number(self) -> int:
        self.align(4)
        self._at += 4
        return int(struct.unpack_from(f"{self._order}I", self._raw, self._at - 4)[0])

    def text(self, size: int) -> str:
        self._at += size + 1  # a zero follows
        if self._at > len(self._raw):
            raise ValueError("a text is longer than its message")
        return self._raw[self._at - 1 - size : self._at - 1].decode()

    def value(self, kind: str) -> Any:
        if kind == "u":
            return self.number()
        if kind in "so":
            return self.text(self.number())
        if kind == "g":
            return self.text(self.byte())
        raise ValueError(f"a value of the type {kind!r}")


def _fields(head: _Values) -> Iterator[tuple[int, Any]]:
    while not head.is_at_end:
        head.align(8)
        yield head.byte(), head.value(head.text(head.byte()))


def _units(body: _Values) -> Iterator[Unit]:
    size = body.number()  # the array is all that the message has
    while size and not body.is_at_end:
        body.align(8)
        name, _description, _load, active, sub, *_ = [body.value(kind) for kind in _UNIT]
        yield name, active, sub


def _request(pattern: str) -> bytes:
    """Return the call ListUnitsByPatterns(states=[], patterns=[pattern])."""
    fields = b""
    for code, kind, text in _MANAGER:
        fields += bytes(-len(fields) % 8) + bytes([code, 1]) + kind.encode() + b"\0"
        fields += bytes([len(text)]) if kind == "g" else struct.pack("<I", len(text))
        fields += text.encode() + b"\0"
    name = struct.pack("<I", len(pattern.encode())) + pattern.encode() + b"\0"
    body = struct.pack("<II", 0, len(name)) + name
    head = struct.pack("<cBBBIII", b"l", _CALL, 0, 1, len(body), _SERIAL, len(fields)) + fields
    return head + bytes(-len(head) % 8) + body
