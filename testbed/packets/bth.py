"""Constants of RoCEv2 headers: opcodes, syndromes, timers.

Source: InfiniBand Architecture Specification, volume 1, release 1.4, chapter 9 (transport headers, table "OpCode
field") and annex A17 (RoCEv2). A PSN has 24 bits, and PSNs are ordered within half of that space.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ACKNOWLEDGE",
    "ATOMIC_ACKNOWLEDGE",
    "CNP",
    "COMPARE_SWAP",
    "FETCH_ADD",
    "HAS_AETH",
    "HAS_RETH",
    "IS_REQUEST",
    "IS_RESPONSE",
    "NAK_SEQUENCE",
    "PSN_SPACE",
    "READ_REQUEST",
    "ROCE_PORT",
    "distance",
    "is_nak",
    "is_rnr",
    "opcode_name",
    "timeout_ns",
]

ROCE_PORT = 4791
PSN_SPACE = 1 << 24
CNP = 0x81
ACKNOWLEDGE, ATOMIC_ACKNOWLEDGE, READ_REQUEST = 0x11, 0x12, 0x0C
COMPARE_SWAP, FETCH_ADD = 0x13, 0x14
NAK_SEQUENCE = 0x60
"""AETH syndrome of a NAK for a PSN sequence error."""

_KINDS = (
    "SEND_FIRST",
    "SEND_MIDDLE",
    "SEND_LAST",
    "SEND_LAST_WITH_IMMEDIATE",
    "SEND_ONLY",
    "SEND_ONLY_WITH_IMMEDIATE",
    "RDMA_WRITE_FIRST",
    "RDMA_WRITE_MIDDLE",
    "RDMA_WRITE_LAST",
    "RDMA_WRITE_LAST_WITH_IMMEDIATE",
    "RDMA_WRITE_ONLY",
    "RDMA_WRITE_ONLY_WITH_IMMEDIATE",
    "RDMA_READ_REQUEST",
    "RDMA_READ_RESPONSE_FIRST",
    "RDMA_READ_RESPONSE_MIDDLE",
    "RDMA_READ_RESPONSE_LAST",
    "RDMA_READ_RESPONSE_ONLY",
    "ACKNOWLEDGE",
    "ATOMIC_ACKNOWLEDGE",
    "COMPARE_SWAP",
    "FETCH_ADD",
    "-",
    "SEND_LAST_WITH_INVALIDATE",
    "SEND_ONLY_WITH_INVALIDATE",
)
_TRANSPORTS = {0x00: "RC", 0x20: "UC", 0x40: "RD", 0x60: "UD"}


def opcode_name(opcode: int) -> str:
    """Return names such as `RC_RDMA_WRITE_FIRST` or `CNP`, or `0x1f` for an opcode without a name."""
    if opcode == CNP:
        return "CNP"
    kind = opcode & 0x1F
    transport = _TRANSPORTS.get(opcode & 0xE0)
    if transport is None or kind >= len(_KINDS) or _KINDS[kind] == "-":
        return f"0x{opcode:02x}"
    return f"{transport}_{_KINDS[kind]}"


def _table(kinds: set[int]) -> NDArray[np.bool_]:
    """Return an array by opcode: True for the RC opcodes in `kinds`."""
    table = np.zeros(256, dtype=np.bool_)
    table[sorted(kinds)] = True
    return table


_RESPONSES = {0x0D, 0x0E, 0x0F, 0x10, 0x11, 0x12}
IS_REQUEST = _table({*range(0x18)} - _RESPONSES - {0x15})
"""By opcode: whether it is an RC request, with a PSN of its sender's own."""
IS_RESPONSE = _table(_RESPONSES)
"""By opcode: whether it is an RC response, with a PSN of the requester's."""
HAS_AETH = _table(_RESPONSES - {0x0E})
HAS_RETH = _table({0x06, 0x0A, 0x0B, 0x0C})


def is_nak(syndrome: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return which syndromes are NAKs of any code (bits 6:5 are 11)."""
    matches: NDArray[np.bool_] = (syndrome >= 0) & ((syndrome & 0x60) == 0x60)  # noqa: PLR2004 - the specification's
    return matches


def is_rnr(syndrome: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return which syndromes are receiver not ready (bits 6:5 are 01)."""
    matches: NDArray[np.bool_] = (syndrome >= 0) & ((syndrome & 0x60) == 0x20)  # noqa: PLR2004 - the specification's
    return matches


def distance(psn: NDArray[np.int64], base: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Return the signed distance of `psn` from `base` in the circle of PSNs: -2**23 to 2**23 - 1."""
    half = PSN_SPACE // 2
    far: NDArray[np.int64] = (psn - base + half) % PSN_SPACE - half
    return far


def timeout_ns(exponent: int) -> float:
    """Return the nominal ACK timeout of a QP's `timeout` attribute: 4.096 us * 2**exponent.

    The specification allows a requester up to four times that (9.7.6.1.3).
    """
    return 4096.0 * float(2**exponent)
