"""Queue pairs of processes that are not ours, from the kernel's list of RDMA resources (`rdma resource show qp`).

Attributes: rdma/rdma_netlink.h; content: drivers/infiniband/core/nldev.c, `fill_res_qp_entry`. The list has the number
of the queue pair at the other end for RC and UC only, and no address of it.
"""

from __future__ import annotations

import contextlib
import struct

from faultbed.testbed.node.netlink import Netlink, attribute, attributes

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

__all__ = ["QueuePairs"]

_NETLINK_RDMA = 20
_GET, _QP_GET = (5 << 10) | 1, (5 << 10) | 10
_INDEX, _NAME, _TABLE = 1, 2, 19
_LQPN, _RQPN, _RQ_PSN, _SQ_PSN, _TYPE, _STATE, _PID = 21, 22, 23, 24, 26, 27, 28
_TYPES = {2: "rc", 3: "uc", 4: "ud"}
_RTR, _ERR = 2, 6
_ATTR = struct.Struct("=HH")


class QueuePairs:
    """The queue pairs of some processes on one RNIC."""

    def __init__(self, rnic: str) -> None:
        self._rnic = rnic
        self._netlink: Netlink | None = None

    def of(self, pids: Collection[int]) -> list[list[int | str]] | None:
        """Return [own number, other end's number, send PSN, receive PSN, transport, state] of each; None: unknown.

        The state is as in `enum ib_qp_state`: 2 can receive, 3 can send, 6 has failed. Queue pairs that are not
        connected yet are left out.
        """
        try:
            self._netlink = self._netlink or Netlink(_NETLINK_RDMA)
            return sorted(self._listed(self._netlink, pids))
        except OSError:
            self.close()
            return None

    def _listed(self, netlink: Netlink, pids: Collection[int]) -> Iterator[list[int | str]]:
        for _, body in list(netlink.dump(_GET, b"")):
            device = attributes(body)
            if device.get(_NAME, b"").rstrip(b"\0").decode() != self._rnic:
                continue
            for _, part in list(netlink.dump(_QP_GET, attribute(_INDEX, device[_INDEX]))):
                for entry in _entries(attributes(part).get(_TABLE, b"")):
                    if (listed := _queue_pair(attributes(entry), pids)) is not None:
                        yield listed

    def close(self) -> None:
        """Close the socket."""
        if self._netlink is not None:
            with contextlib.suppress(OSError):
                self._netlink.close()
        self._netlink = None


def _queue_pair(entry: Mapping[int, bytes], pids: Collection[int]) -> list[int | str] | None:
    def number(kind: int) -> int:
        return int.from_bytes(entry.get(kind, b""), "little")

    transport, state = _TYPES.get(number(_TYPE)), number(_STATE)
    if number(_PID) not in pids or transport is None or not _RTR <= state <= _ERR:
        return None
    return [number(_LQPN), number(_RQPN), number(_SQ_PSN), number(_RQ_PSN), transport, state]


def _entries(raw: bytes) -> Iterator[bytes]:
    offset = 0
    while offset + _ATTR.size <= len(raw):
        length, _ = _ATTR.unpack_from(raw, offset)
        yield raw[offset + _ATTR.size : offset + length]
        offset += max(_ATTR.size, (length + 3) & ~3)
