"""Counters of RDMA devices over netlink, with one request per port; sysfs needs one file per counter.

Formats: rdma/rdma_netlink.h; content: drivers/infiniband/core/nldev.c, stat_get_doit_default_counter. The names are
those of the files below ports/1/hw_counters.
"""

from __future__ import annotations

from faultbed.testbed.node.in_use.rnics_in_use import CONNECTED, QPN, RC, STATE, TYPE, queue_pairs
from faultbed.testbed.node.netlink import Netlink, attribute, attributes

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Rdma", "places"]

_NETLINK_RDMA, _NLDEV = 20, 5 << 10
_GET, _STAT_GET = _NLDEV | 1, _NLDEV | 17
_INDEX, _NAME, _PORT = 1, 2, 3
_COUNTERS, _ENTRY, _ENTRY_NAME, _ENTRY_VALUE = 80, 81, 82, 83
_ATTRIBUTE = 4
"""Length of an attribute's header."""


class Rdma:
    """Reader of the counters of every RDMA device's first port."""

    def __init__(self) -> None:
        self._netlink: Netlink | None = None
        self._names: dict[int, str] = {}
        self._last: dict[int, bytes] = {}
        self._places: dict[int, list[tuple[str, int]]] = {}
        self._connected: dict[str, set[int]] = {}
        self._ended: dict[str, int] = {}

    def refresh(self) -> None:
        """Find the devices that exist now; the next `moved` returns all counters.

        Raises:
            TimeoutError: the kernel did not answer in time, so that it is unknown which devices there are.
        """
        self._names, self._last, self._places = {}, {}, {}
        try:
            self._netlink = self._netlink or Netlink(_NETLINK_RDMA)
            devices = [attributes(body) for _, body in self._netlink.dump(_GET, b"")]
        except TimeoutError:
            raise
        except OSError:  # a kernel without RDMA
            return
        self._names = {
            int.from_bytes(device[_INDEX], "little"): device[_NAME].rstrip(b"\0").decode() for device in devices
        }

    def counts(self) -> Iterator[tuple[str, int]]:
        """Yield every counter, as `device.counter`, and its value.

        Raises:
            TimeoutError: the kernel did not answer in time. A device that is gone has no counters instead.
        """
        for index, name in self._names.items():
            body = self._read(index)
            yield from ((f"{name}.{counter}", _value(body, at)) for counter, at in places(body))

    def ended(self) -> Iterator[tuple[str, int]]:
        """Yield `device.qps_ended`: the reliable connections seen so far that are in error or gone by now.

        Only the readings by this object count. QP numbers of rxe and mlx5 are not used again at once.

        Raises:
            TimeoutError: the kernel did not answer in time. A kernel that lists no queue pairs has no such counter.
        """
        for index, name in self._names.items():
            try:
                connected = self._connected_qps(index)
            except TimeoutError:
                raise
            except OSError:
                continue
            self._ended[name] = self._ended.get(name, 0) + len(self._connected.get(name, set()) - connected)
            self._connected[name] = connected
            yield f"{name}.qps_ended", self._ended[name]

    def _connected_qps(self, index: int) -> set[int]:
        if self._netlink is None:
            return set()
        return {
            int.from_bytes(qp[QPN], "little")
            for qp in queue_pairs(self._netlink, index.to_bytes(4, "little"))
            if qp.get(TYPE, b"\0")[0] == RC and qp.get(STATE, b"\0")[0] in CONNECTED
        }

    def moved(self) -> Iterator[tuple[str, int]]:
        """Yield the counters that have moved since the last call, and their values."""
        for index, name in self._names.items():
            try:
                body, before = self._read(index), self._last.get(index, b"")
            except TimeoutError:  # the next call returns what has moved meanwhile
                continue
            if body == before:
                continue
            if len(body) != len(before):
                self._places[index], before = places(body), b""
            self._last[index] = body
            for counter, at in self._places[index]:
                if body[at : at + 8] != before[at : at + 8]:
                    yield f"{name}.{counter}", _value(body, at)

    def close(self) -> None:
        """Close the socket."""
        if self._netlink is not None:
            self._netlink.close()

    def _read(self, index: int) -> bytes:
        request = attribute(_INDEX, index.to_bytes(4, "little")) + attribute(_PORT, (1).to_bytes(4, "little"))
        try:
            return self._netlink.request(_STAT_GET, request) if self._netlink is not None else b""
        except TimeoutError:
            raise
        except OSError:  # the device is gone by now, or its driver has no counters
            return b""


def _value(body: bytes, at: int) -> int:
    return int.from_bytes(body[at : at + 8], "little")


def places(body: bytes) -> list[tuple[str, int]]:
    """Return each counter's name and the offset of its 8-byte value, the same in all answers of that length."""
    offsets = []
    for kind, at, end in _parts(body, 0, len(body)):
        if kind == _COUNTERS:
            for _, first, last in (part for part in _parts(body, at, end) if part[0] == _ENTRY):
                inside = {inner: (begin, stop) for inner, begin, stop in _parts(body, first, last)}
                begin, stop = inside[_ENTRY_NAME]
                offsets.append((body[begin:stop].rstrip(b"\0").decode(), inside[_ENTRY_VALUE][0]))
    return offsets


def _parts(body: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield kind, begin and end of each attribute between two offsets, nested or not."""
    while at + _ATTRIBUTE <= end:
        length = int.from_bytes(body[at : at + 2], "little")
        yield int.from_bytes(body[at + 2 : at + 4], "little") & 0x3FFF, at + _ATTRIBUTE, at + length
        at += max(_ATTRIBUTE, (length + 3) & ~3)
