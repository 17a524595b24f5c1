"""Bytes that arrived at an RNIC, by its own counters: the progress of a program that says nothing.

A hardware RNIC counts them in `port_rcv_data`, in units of four bytes (the kernel's
Documentation/ABI/stable/sysfs-class-infiniband). Soft RoCE has no such counter. The bytes of its network device count
while its counter of RDMA packets moves, so that ARP and other packets alone are no progress. Either includes headers
and retransmissions, and every program's traffic.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["RnicBytes"]

_INFINIBAND = "/sys/class/infiniband"
_WORD = 4


class RnicBytes:
    """The counters of one RNIC, read again and again."""

    def __init__(self, rnic: str, *, infiniband: str = _INFINIBAND, netdevs: str = "/sys/class/net") -> None:
        port = f"{infiniband}/{rnic}/ports/1"
        self._hardware = f"{port}/counters/port_rcv_data"
        self._packets = f"{port}/hw_counters/rcvd_pkts"
        self._netdev = ""
        with contextlib.suppress(OSError):
            self._netdev = f"{netdevs}/{_read(f'{infiniband}/{rnic}/parent')}/statistics/rx_bytes"
        self._before: tuple[int | None, int | None] = (None, None)

    def arrived(self) -> int:
        """Return the bytes that arrived since the last call. A counter that is gone, or was reset, counts nothing."""
        packets = _number(self._packets)
        if packets is None:
            words = _number(self._hardware)
            size, packets = None if words is None else words * _WORD, words
        else:
            size = _number(self._netdev)
        (packets_before, size_before), self._before = self._before, (packets, size)
        if None in (packets, size, packets_before, size_before) or packets < packets_before or size < size_before:  # type: ignore[operator]
            return 0
        return size - size_before if packets > packets_before else 0  # type: ignore[operator]


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def _number(path: str) -> int | None:
    if not path or not os.path.exists(path):
        return None
    try:
        return int(_read(path))
    except (OSError, ValueError):
        return None
