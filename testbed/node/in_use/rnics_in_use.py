"""List the queue pairs of a machine over netlink, as `rdma resource show qp` does, without starting a program.

Formats: rdma/rdma_netlink.h; values: `enum ib_qp_type` and `enum ib_qp_state` of rdma/ib_verbs.h.
"""

from __future__ import annotations

import contextlib

from faultbed.testbed.node.netlink import Netlink, attribute, attributes

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["CONNECTED", "QPN", "RC", "STATE", "TYPE", "carries_data", "queue_pairs", "rnics_in_use"]

_NETLINK_RDMA, _NLDEV = 20, 5 << 10
_DEVICES, _QUEUE_PAIRS = _NLDEV | 1, _NLDEV | 10
_INDEX, _NAME, _TABLE, _PID = 1, 2, 19, 28
QPN, TYPE, STATE = 21, 26, 27
"""Attributes of a queue pair: its number, `enum ib_qp_type` and `enum ib_qp_state` (a byte each)."""
_ATTRIBUTE = 4
"""Length of an attribute's header."""
RC, _UC, _UD, _XRC_INI, _XRC_TGT, _DRIVER = 2, 3, 4, 9, 10, 255
_CARRYING = (RC, _UC, _UD, _XRC_INI, _XRC_TGT, _DRIVER)
"""All types but SMI, GSI and raw ones, which every port has for management."""
CONNECTED = (2, 3)
"""RTR (ready to receive) and RTS (ready to send)."""


def rnics_in_use() -> list[str]:
    """Return the RDMA devices with a queue pair that can carry data now, by name.

    Raises:
        OSError: the kernel or a device does not list queue pairs, so that it is unknown which there are.
        ValueError: a queue pair has no type, or no state.
    """
    with contextlib.closing(Netlink(_NETLINK_RDMA)) as rdma:
        devices = [attributes(body) for _, body in rdma.dump(_DEVICES, b"")]
        return sorted(
            device[_NAME].rstrip(b"\0").decode()
            for device in devices
            if any(map(carries_data, queue_pairs(rdma, device[_INDEX])))
        )


def queue_pairs(rdma: Netlink, device: bytes) -> Iterator[Mapping[int, bytes]]:
    """Yield the attributes of each queue pair of a device, which is given by its index (four bytes).

    Raises:
        OSError: the kernel or the device does not list queue pairs, or did not answer in time (TimeoutError).
    """
    for _, body in rdma.dump(_QUEUE_PAIRS, attribute(_INDEX, device)):
        yield from _entries(attributes(body).get(_TABLE, b""))


def carries_data(entry: Mapping[int, bytes]) -> bool:
    """Return whether a queue pair, given by its attributes, is connected and can carry the data of a workload.

    A datagram queue pair of the kernel does not count: every mlx5 port has one that is always ready. Pure.

    Raises:
        ValueError: it has no type, or no state.
    """
    if TYPE not in entry or STATE not in entry:
        raise ValueError(f"the kernel lists a queue pair without type or state: attributes {sorted(entry)}")
    kind, state = entry[TYPE][0], entry[STATE][0]
    is_of_kernel = kind == _UD and _PID not in entry
    return kind in _CARRYING and state in CONNECTED and not is_of_kernel


def _entries(table: bytes) -> Iterable[Mapping[int, bytes]]:
    """Yield the attributes of each entry of a table: entries have equal types, so that a mapping would keep one."""
    at = 0
    while at + _ATTRIBUTE <= len(table):
        length = int.from_bytes(table[at : at + 2], "little")
        yield attributes(table[at + _ATTRIBUTE : at + length])
        at += max(_ATTRIBUTE, (length + 3) & ~3)
