"""The invariant CRC of a RoCEv2 packet, which its sender computes and no switch changes.

Source: InfiniBand Architecture Specification, volume 1, annex A17.3.3. Fields that change on the way count as ones.
"""

from __future__ import annotations

import zlib

__all__ = ["icrc_of"]

_BEFORE = b"\xff" * 8
"""Stands for the local route header of native InfiniBand."""


def icrc_of(packet: bytes, udp: int) -> int:
    """Return the ICRC of an IP packet without its last four bytes; its UDP header is at offset `udp`."""
    masked = bytearray(packet)
    if packet[0] >> 4 == 6:  # noqa: PLR2004 - the version of IP
        masked[0:4] = bytes([packet[0] | 0x0F, 0xFF, 0xFF, 0xFF])  # traffic class and flow label
        masked[7] = 0xFF  # hop limit
    else:
        masked[1] = masked[8] = 0xFF  # type of service, time to live
        masked[10:12] = b"\xff\xff"  # checksum
    masked[udp + 6 : udp + 8] = b"\xff\xff"  # checksum
    masked[udp + 12] = 0xFF  # resv8a of the BTH, with FECN and BECN
    return zlib.crc32(_BEFORE + masked)
