"""Netlink without a library: for programs on nodes, which take longer to import a library than to do their work.

Formats: linux/netlink.h, linux/rtnetlink.h, linux/netfilter/nfnetlink.h. Attributes are type-length-value, padded to
four bytes.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

__all__ = [
    "ACK",
    "DUMP",
    "ECHO",
    "REQUEST",
    "RTA_MULTIPATH",
    "Netlink",
    "attribute",
    "attributes",
    "messages",
    "next_hops",
    "notifications",
]

REQUEST, ACK, ECHO, DUMP = 1, 4, 8, 0x300
RTA_MULTIPATH = 9
_ERROR, _DONE = 2, 3
_HEADER, _ATTR, _NEXT_HOP = struct.Struct("=IHHII"), struct.Struct("=HH"), struct.Struct("=HBBi")
_MOST = 1 << 17
"""The longest part of a dump (af_netlink.c, netlink_dump). The buffer is reused: under emulation, allocating a megabyte
for each part made a dump take five times as long."""
_CODE = struct.Struct("=i")
_NESTED_OR_ORDER = 0xC000


class Netlink:
    """One netlink socket, in the network namespace in which it was created. One request at a time."""

    def __init__(self, family: int) -> None:
        self._seq = 0
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family)
        self._socket.settimeout(2)
        self._buffer = bytearray(_MOST)

    @property
    def port_id(self) -> int:
        """Number by which the kernel names this socket as the origin of a change; 0 before the first request."""
        port_id: int = self._socket.getsockname()[0]
        return port_id

    def request(self, kind: int, body: bytes, *, flags: int = REQUEST) -> bytes:
        """Send a request and return the body of its answer.

        Raises:
            OSError: the kernel refused, with its error number.
        """
        self._seq += 1
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, self._seq, 0) + body)
        while True:
            answer = self._socket.recv(65536)
            length, answered, _flags, seq, _pid = _HEADER.unpack_from(answer)
            if seq != self._seq:
                continue
            if answered == _ERROR:
                code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
                if code:
                    raise OSError(code, os.strerror(code))
            return answer[_HEADER.size : length]

    def dump(self, kind: int, body: bytes) -> Iterator[tuple[int, bytes]]:
        """Request all objects of a kind, and yield the type and body of each message.

        Raises:
            OSError: the kernel refused, with its error number.
        """
        self._seq += 1
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, REQUEST | DUMP, self._seq, 0) + body)
        while True:
            length = self._socket.recv_into(self._buffer)
            for answered, seq, content in messages(memoryview(self._buffer)[:length]):
                if seq != self._seq:
                    continue
                if answered == _DONE:
                    # netlink_dump_done (af_netlink.c): an error that ended the dump in its middle is in the last part.
                    if len(content) >= _CODE.size and (code := -_CODE.unpack_from(content)[0]) > 0:
                        raise OSError(code, os.strerror(code))
                    return
                if answered == _ERROR:
                    code = -struct.unpack_from("=i", content)[0]
                    raise OSError(code, os.strerror(code))
                yield answered, content

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def messages(raw: bytes | memoryview) -> Iterator[tuple[int, int, bytes]]:
    """Yield type, sequence number and body of each message in the output of a netlink socket."""
    for kind, seq, _, body in _split(raw):
        yield kind, seq, body


def notifications(raw: bytes | memoryview) -> Iterator[tuple[int, int, bytes]]:
    """Yield type, origin and body of each notification of a change.

    The origin is the port id of the socket that requested the change; 0: the kernel made it by itself.
    """
    for kind, _, port_id, body in _split(raw):
        yield kind, port_id, body


def _split(raw: bytes | memoryview) -> Iterator[tuple[int, int, int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(raw):
        length, kind, _flags, seq, port_id = _HEADER.unpack_from(raw, at)
        yield kind, seq, port_id, bytes(raw[at + _HEADER.size : at + length])
        at += (length + 3) & ~3


def attribute(kind: int, value: bytes) -> bytes:
    """Return one attribute, padded."""
    return _ATTR.pack(_ATTR.size + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(raw: bytes) -> dict[int, bytes]:
    """Return attributes by type."""
    values, at = {}, 0
    while at + _ATTR.size <= len(raw):
        length, kind = _ATTR.unpack_from(raw, at)
        if length < _ATTR.size:
            break
        values[kind & ~_NESTED_OR_ORDER] = raw[at + _ATTR.size : at + length]
        at += (length + 3) & ~3
    return values


def next_hops(raw: bytes) -> Iterator[tuple[int, int, int, dict[int, bytes]]]:
    """Yield flags (RTNH_F_*), interface index, weight and attributes of each next hop in a route's RTA_MULTIPATH."""
    at = 0
    while at + _NEXT_HOP.size <= len(raw):
        length, flags, more, index = _NEXT_HOP.unpack_from(raw, at)
        yield flags, index, more + 1, attributes(raw[at + _NEXT_HOP.size : at + length])
        at += max(_NEXT_HOP.size, (length + 3) & ~3)
