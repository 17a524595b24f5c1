"""Dissect one frame of a capture with scapy, from Ethernet to the ICRC."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import CookedLinux, CookedLinuxV2, Ether
from scapy.packet import NoPayload, Padding, Raw

from faultbed.testbed.errors import UsageError
from faultbed.testbed.packets.bth import opcode_name, syndrome_name
from faultbed.testbed.packets.columns import decode
from faultbed.testbed.packets.encapsulation import UDP, WHOLE, locate
from faultbed.testbed.packets.icrc import icrc_of
from faultbed.testbed.packets.layers import AETH, BTH
from faultbed.testbed.packets.link_types import COOKED, COOKED_2, ETHERNET, LOOPBACK, RAW_IP

if TYPE_CHECKING:
    from faultbed.testbed.packets.frames import Frames

__all__ = ["Explained", "Layer", "explain"]

_BEYOND_FIELDS = (Raw, Padding)
_FCS_BYTES = 4
Check = Literal["right", "wrong", "not captured", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One header: its name, its fields as scapy prints them, and its bytes."""

    name: str
    fields: dict[str, str]
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A dissected frame.

    `icrc` is `right`, `wrong`, `not captured` (the frame is truncated) or `none` (not RoCEv2). `fcs` is `right` if the
    frame ends with its Ethernet checksum, which few captures have; otherwise `none`. `pad_bytes` fill the payload to
    words, `trailer_bytes` follow the IP packet: padding of short frames, and the FCS. `payload_bytes` has neither.
    """

    frame: int
    time_ns: int
    port: str
    outbound: bool | None
    captured: int
    length: int
    layers: tuple[Layer, ...]
    payload_bytes: int
    icrc: Check
    fcs: Literal["right", "none"]
    pad_bytes: int
    trailer_bytes: int


def explain(frames: Frames, number: int) -> Explained:
    """Dissect frame `number` of a capture; the first one is 1, as in Wireshark.

    Raises:
        UsageError: the capture has no such frame, or the frame ends before its first header does.
    """
    if not 1 <= number <= len(frames):
        raise UsageError(
            f"frame {number}: the capture has {len(frames):,} frames; give a number from 1 to {len(frames)}"
        )
    frame = _alone(frames, number - 1)
    start, captured, length = int(frame.start[0]), int(frame.captured[0]), int(frame.length[0])
    content = frame.data[start : start + captured].tobytes()
    found, packets = locate(frame), decode(frame)
    ip, at, size, inner = (int(column[0]) - start for column in (found.ip, found.at, found.size, found.start))
    ends_at = at + size + start if found.ip[0] else length
    try:
        layers = tuple(_layers(content, int(frame.link_types[frame.interface[0]]), inner, ip if found.ip[0] else None))
    except struct.error as error:
        raise UsageError(
            f"frame {number}: its {captured} captured bytes end within the first header; capture longer frames"
        ) from error
    is_roce = len(packets) == 1
    outbound = int(frame.outbound[0])
    return Explained(
        frame=number,
        time_ns=int(frame.time_ns[0]),
        port=frames.interfaces[int(frame.interface[0])],
        outbound=None if outbound < 0 else bool(outbound),
        captured=captured,
        length=length,
        layers=layers,
        payload_bytes=int(packets.payload[0]) if is_roce else max(0, length - sum(layer.length for layer in layers)),
        icrc=_icrc(content, ip, at, ends_at, length) if is_roce and found.part[0] == WHOLE else "none",
        fcs="right" if _has_fcs(content[inner:], ends_at - inner) and captured == length else "none",
        pad_bytes=content[at + 9] >> 4 & 3 if is_roce and found.protocol[0] == UDP else 0,
        trailer_bytes=max(0, length - ends_at),
    )


def _alone(frames: Frames, at: int) -> Frames:
    """Return a capture of one frame, which lies in the same data."""
    columns = ("start", "captured", "length", "time_ns", "interface", "outbound")
    return dataclasses.replace(frames, **{name: getattr(frames, name)[at : at + 1] for name in columns})


def _layers(content: bytes, link_type: int, inner: int, ip: int | None) -> Iterator[Layer]:
    """Yield every header: those around a mirrored or tunnelled frame, then those of the frame itself."""
    if inner:
        yield from _dissected(content[:inner], link_type)
        link_type = RAW_IP[0] if ip == inner else ETHERNET
    yield from _dissected(content[inner:], link_type)


_FIRST_LAYERS = {ETHERNET: Ether, COOKED: CookedLinux, COOKED_2: CookedLinuxV2}


def _dissected(content: bytes, link_type: int) -> Iterator[Layer]:
    if link_type in LOOPBACK:
        content = content[4:]
    first = _FIRST_LAYERS.get(link_type)
    if first is None and (link_type in RAW_IP or link_type in LOOPBACK):
        first = IPv6 if content[:1] and content[0] >> 4 == 6 else IP  # noqa: PLR2004 - the version
    if first is None:
        yield Layer(name=f"link header of type {link_type}", fields={"bytes": content.hex()}, length=len(content))
        return
    layer: Any = first(content)
    while not isinstance(layer, NoPayload):
        if not isinstance(layer, _BEYOND_FIELDS):
            yield Layer(
                name=layer.name, fields=_fields(layer), length=len(layer.original) - len(layer.payload.original)
            )
        layer = layer.payload


def _icrc(content: bytes, ip: int, udp: int, ends_at: int, length: int) -> Check:
    if ends_at > len(content):
        return "not captured" if len(content) < length else "wrong"
    packet = content[ip:ends_at]
    return "right" if icrc_of(packet[:-4], udp - ip) == int.from_bytes(packet[-4:], "little") else "wrong"


def _has_fcs(frame: bytes, packet_end: int) -> bool:
    """Return whether a frame ends with the CRC of all bytes before it (IEEE 802.3, 3.2.9), behind its IP packet."""
    if len(frame) - packet_end < _FCS_BYTES:
        return False
    return zlib.crc32(frame[:-_FCS_BYTES]) == int.from_bytes(frame[-_FCS_BYTES:], "little")


def _fields(layer: Any) -> dict[str, str]:
    # A field that the frame is too short for has a default, for which scapy may ask the network (an ARP request).
    values = {
        field.name: str(field.i2repr(layer, layer.fields[field.name]))
        for field in layer.fields_desc
        if field.name in layer.fields
    }
    if isinstance(layer, BTH):
        values["opcode"] = f"{opcode_name(int(layer.opcode))} (0x{int(layer.opcode):02x})"
        icrc = layer.icrc
        values["icrc"] = "none" if icrc is None else f"0x{icrc:08x}"
    elif isinstance(layer, AETH):
        values["syndrome"] = f"0x{int(layer.syndrome):02x}, {syndrome_name(int(layer.syndrome))}"
    return values
