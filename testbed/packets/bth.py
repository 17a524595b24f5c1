"""Constants of RoCEv2 headers: opcodes, syndromes, timers.

Source: InfiniBand Architecture Specification, volume 1, release 1.4, chapter 9 (transport headers, table "OpCode
field"), annex A14 (XRC), annex A17 (RoCEv2), and release 1.5, annex A19 (FLUSH and ATOMIC WRITE). Linux has the same
numbers in include/rdma/ib_pack.h, and their headers in drivers/infiniband/sw/rxe/rxe_opcode.c. A PSN has 24 bits, and
PSNs are ordered within half of that space.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ACKNOWLEDGE",
    "ATOMIC_ACKNOWLEDGE",
    "ATOMIC_WRITE",
    "CNP",
    "COMPARE_SWAP",
    "EXTENDED_BYTES",
    "FETCH_ADD",
    "FLUSH",
    "HAS_AETH",
    "IS_ANSWERED_BY_DATA",
    "IS_CHECKED",
    "IS_READ",
    "IS_REQUEST",
    "IS_RESPONSE",
    "IS_UNRELIABLE",
    "MTUS",
    "NAK_SEQUENCE",
    "OPCODES",
    "OPERATION",
    "PSN_SPACE",
    "READ_REQUEST",
    "RETH_AT",
    "ROCE_PORT",
    "Opcode",
    "distance",
    "is_ack",
    "is_fatal",
    "is_nak",
    "is_rnr",
    "is_syndrome_known",
    "opcode_name",
    "rnr_timer_ns",
    "syndrome_name",
    "timeout_ns",
]

ROCE_PORT = 4791
MTUS = (256, 512, 1024, 2048, 4096)
"""Path MTUs in bytes (enum ib_mtu of include/rdma/ib_verbs.h). No packet has more payload."""
PSN_SPACE = 1 << 24
CNP = 0x81
ACKNOWLEDGE, ATOMIC_ACKNOWLEDGE, READ_REQUEST = 0x11, 0x12, 0x0C
COMPARE_SWAP, FETCH_ADD, FLUSH, ATOMIC_WRITE = 0x13, 0x14, 0x1C, 0x1D
NAK_SEQUENCE = 0x60
"""AETH syndrome of a NAK for a PSN sequence error."""

Role = Literal["request", "response"]


class _Operation(NamedTuple):
    """An operation of the reliable transports: its five bits, and the bytes of its headers between BTH and payload.

    `transports` are those that have it, besides RC and XRC. `aeth` and `reth` say whether it has those headers.
    `after_reth` are the bytes of all other headers: ImmDt and IETH 4, AtomicETH 28, AtomicAckETH 8.
    """

    code: int
    name: str
    role: Role
    transports: str = ""
    aeth: bool = False
    feth: bool = False
    reth: bool = False
    others: int = 0


_OPERATIONS = (
    # FLUSH and ATOMIC WRITE are answered by a READ response of one packet without payload (annex A19; rxe_resp.c,
    # send_read_response_ack).
    _Operation(0x00, "SEND_FIRST", "request", "UC RD"),
    _Operation(0x01, "SEND_MIDDLE", "request", "UC RD"),
    _Operation(0x02, "SEND_LAST", "request", "UC RD"),
    _Operation(0x03, "SEND_LAST_WITH_IMMEDIATE", "request", "UC RD", others=4),
    _Operation(0x04, "SEND_ONLY", "request", "UC RD"),
    _Operation(0x05, "SEND_ONLY_WITH_IMMEDIATE", "request", "UC RD", others=4),
    _Operation(0x06, "RDMA_WRITE_FIRST", "request", "UC RD", reth=True),
    _Operation(0x07, "RDMA_WRITE_MIDDLE", "request", "UC RD"),
    _Operation(0x08, "RDMA_WRITE_LAST", "request", "UC RD"),
    _Operation(0x09, "RDMA_WRITE_LAST_WITH_IMMEDIATE", "request", "UC RD", others=4),
    _Operation(0x0A, "RDMA_WRITE_ONLY", "request", "UC RD", reth=True),
    _Operation(0x0B, "RDMA_WRITE_ONLY_WITH_IMMEDIATE", "request", "UC RD", reth=True, others=4),
    _Operation(0x0C, "RDMA_READ_REQUEST", "request", "RD", reth=True),
    _Operation(0x0D, "RDMA_READ_RESPONSE_FIRST", "response", "RD", aeth=True),
    _Operation(0x0E, "RDMA_READ_RESPONSE_MIDDLE", "response", "RD"),
    _Operation(0x0F, "RDMA_READ_RESPONSE_LAST", "response", "RD", aeth=True),
    _Operation(0x10, "RDMA_READ_RESPONSE_ONLY", "response", "RD", aeth=True),
    _Operation(0x11, "ACKNOWLEDGE", "response", "RD", aeth=True),
    _Operation(0x12, "ATOMIC_ACKNOWLEDGE", "response", "RD", aeth=True, others=8),
    _Operation(0x13, "COMPARE_SWAP", "request", "RD", others=28),
    _Operation(0x14, "FETCH_ADD", "request", "RD", others=28),
    _Operation(0x16, "SEND_LAST_WITH_INVALIDATE", "request", others=4),
    _Operation(0x17, "SEND_ONLY_WITH_INVALIDATE", "request", others=4),
    _Operation(0x1C, "FLUSH", "request", "RD", feth=True, reth=True),
    _Operation(0x1D, "ATOMIC_WRITE", "request", reth=True),
)
_PREFIX = {"RC": 0x00, "UC": 0x20, "RD": 0x40, "UD": 0x60, "XRC": 0xA0}


class Opcode(NamedTuple):
    """A row of the table of opcodes: its transport, role, and the bytes of its extended headers.

    `psns` are the PSNs that it takes: 1; 0 for a packet without a PSN of a connection (responses carry those of their
    request); None for a READ request, which takes one for each packet of its response. `aeth_at` and `reth_at` are
    offsets after the BTH; -1: it has no such header, or it is not read.
    """

    name: str
    transport: str
    role: Role | Literal["datagram", "notification"]
    psns: int | None
    extended: int
    aeth_at: int = -1
    reth_at: int = -1


def _rows() -> dict[int, Opcode]:
    rows = {
        0x64: Opcode("UD_SEND_ONLY", "UD", "datagram", 0, 8),
        0x65: Opcode("UD_SEND_ONLY_WITH_IMMEDIATE", "UD", "datagram", 0, 12),
        # Annex A17: 16 reserved bytes follow the BTH of a CNP.
        CNP: Opcode("CNP", "CNP", "notification", 0, 16),
    }
    for transport in ("RC", "UC", "RD", "XRC"):
        for one in _OPERATIONS:
            if transport in ("UC", "RD") and transport not in one.transports.split():
                continue
            is_request = one.role == "request"
            # XRCETH has 4 bytes, in requests alone (annex A14); RDETH 4, and DETH 8 in requests (9.3).
            before = {"XRC": 4 * is_request, "RD": 4 + 8 * is_request}.get(transport, 0) + 4 * one.feth
            extended = before + 16 * one.reth + 4 * one.aeth + one.others
            psns = None if one.code == READ_REQUEST else int(is_request)
            is_read_here = transport != "RD"
            rows[_PREFIX[transport] | one.code] = Opcode(
                f"{transport}_{one.name}",
                transport,
                one.role,
                psns,
                extended,
                aeth_at=before if one.aeth and is_read_here else -1,
                reth_at=before if one.reth and is_read_here else -1,
            )
    return rows


OPCODES = _rows()
"""Every opcode of the transports, by number. How many PSNs another one takes is not known."""


def opcode_name(opcode: int) -> str:
    """Return names such as `RC_RDMA_WRITE_FIRST` or `CNP`, or `0x1f` for an opcode without a name."""
    row = OPCODES.get(opcode)
    return f"0x{opcode:02x}" if row is None else row.name


def _where(chosen: set[int]) -> NDArray[np.bool_]:
    """Return an array by opcode: True for those in `chosen`."""
    table = np.zeros(256, dtype=np.bool_)
    table[sorted(chosen)] = True
    return table


_ACKNOWLEDGED = ("RC", "XRC")
IS_REQUEST = _where({n for n, row in OPCODES.items() if row.role == "request" and row.transport in _ACKNOWLEDGED})
"""By opcode: whether it is an RC or XRC request, with a PSN of its sender's own."""
IS_RESPONSE = _where({n for n, row in OPCODES.items() if row.role == "response" and row.transport in _ACKNOWLEDGED})
"""By opcode: whether it is an RC or XRC response, with a PSN of the requester's."""
IS_UNRELIABLE = _where({n for n, row in OPCODES.items() if row.transport == "UC"})
"""By opcode: whether it is a request of an unreliable connection, which nothing acknowledges or repeats."""
IS_CHECKED = _where({n for n, row in OPCODES.items() if row.transport != "RD"})
"""By opcode: whether its rules are known here. Those of RD, which no RoCE device has, are not."""
OPERATION = np.where(IS_REQUEST | IS_RESPONSE, np.arange(256) & 0x1F, 0xFF).astype(np.uint8)
"""By opcode: the operation of an RC or XRC packet as the RC opcode; 255 for all others."""
IS_READ = OPERATION == READ_REQUEST
IS_ANSWERED_BY_DATA = np.isin(OPERATION, (READ_REQUEST, COMPARE_SWAP, FETCH_ADD, FLUSH, ATOMIC_WRITE))
"""By opcode: whether a request is answered by READ responses or an atomic's, which no later response replaces."""
HAS_AETH = _where({n for n, row in OPCODES.items() if row.aeth_at >= 0})
RETH_AT = np.array([OPCODES[n].reth_at if n in OPCODES else -1 for n in range(256)], dtype=np.int64)
"""By opcode: the offset of the RETH after the BTH; -1 without one."""
EXTENDED_BYTES = np.array([OPCODES[n].extended if n in OPCODES else 0 for n in range(256)], dtype=np.int64)
"""By opcode: the bytes of all headers between the BTH and the payload."""

_NAKS = {
    0: "PSN sequence error",
    1: "invalid request",
    2: "remote access error",
    3: "remote operational error",
    4: "invalid RD request",
}
"""NAK codes (9.7.5.2.1, table "NAK codes"). All but the first end a connection; the last one exists on RD alone."""
_FATAL = (0x61, 0x62, 0x63)
# Table "RNR NAK timer field encoding" of 9.7.5.2.8, in 10 us.
_RNR_TIMERS = (
    *(65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192),
    *(256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152),
)


def is_ack(syndrome: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return which syndromes are positive acknowledgements (bits 7:5 are 000)."""
    matches: NDArray[np.bool_] = (syndrome >= 0) & ((syndrome & 0xE0) == 0)
    return matches


def is_nak(syndrome: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return which syndromes are NAKs of any code (bits 7:5 are 011)."""
    matches: NDArray[np.bool_] = (syndrome >= 0) & ((syndrome & 0xE0) == 0x60)  # noqa: PLR2004 - the specification's
    return matches


def is_fatal(syndrome: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return which syndromes are NAKs that end an RC or XRC connection."""
    return np.isin(syndrome, _FATAL)


def is_rnr(syndrome: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return which syndromes are receiver not ready (bits 7:5 are 001)."""
    matches: NDArray[np.bool_] = (syndrome >= 0) & ((syndrome & 0xE0) == 0x20)  # noqa: PLR2004 - the specification's
    return matches


def is_syndrome_known(syndrome: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return which syndromes have a meaning on RC and XRC; others are reserved. Packets without an AETH have one."""
    named = is_ack(syndrome) | is_rnr(syndrome) | is_fatal(syndrome)
    known: NDArray[np.bool_] = (syndrome < 0) | (syndrome == NAK_SEQUENCE) | named
    return known


def syndrome_name(value: int) -> str:
    """Return the meaning of an AETH's syndrome (9.7.5.2.1)."""
    kind, code = value & 0xE0, value & 0x1F
    if kind == 0:
        return f"ACK, credit code {code}"
    if kind == 0x20:  # noqa: PLR2004 - bits 7:5 are 001
        return f"RNR NAK, timer {rnr_timer_ns(value) / 1e6:g} ms"
    if kind == NAK_SEQUENCE and code in _NAKS:
        return f"NAK, {_NAKS[code]}"
    return "reserved"


def rnr_timer_ns(syndrome: int) -> int:
    """Return the least time in ns that an RNR NAK requests a requester to wait before it sends again."""
    return _RNR_TIMERS[syndrome & 0x1F] * 10_000


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
