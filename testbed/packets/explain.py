"""Dissect one frame of a capture with scapy, from Ethernet to the ICRC."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import NoPayload, Padding, Raw

from faultbed.testbed.errors import UsageError
from faultbed.testbed.packets.bth import NAK_SEQUENCE, opcode_name
from faultbed.testbed.packets.capture_file import ETHERNET
from faultbed.testbed.packets.layers import AETH, BTH

if TYPE_CHECKING:
    from faultbed.testbed.packets.capture_file import Frames

__all__ = ["Explained", "Layer", "explain"]

_NAK_CODES = {
    0: "PSN sequence error",
    1: "invalid request",
    2: "remote access error",
    3: "remote operational error",
    4: "invalid RD request",
}
_BEYOND_FIELDS = (Raw, Padding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One header: its name, and its fields as scapy prints them."""

    name: str
    fields: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A dissected frame. `icrc` is `right`, `wrong`, `not captured` (the frame is truncated) or `none` (not RoCEv2)."""

    frame: int
    time_ns: int
    port: str
    outbound: bool | None
    captured: int
    length: int
    layers: tuple[Layer, ...]
    payload_bytes: int
    icrc: Literal["right", "wrong", "not captured", "none"]


def explain(frames: Frames, number: int) -> Explained:
    """Dissect frame `number` of a capture; the first one is 1, as in Wireshark.

    Raises:
        UsageError: the capture has no such frame, or the frame ends before its first header does.
    """
    if not 1 <= number <= len(frames):
        raise UsageError(
            f"frame {number}: the capture has {len(frames):,} frames; give a number from 1 to {len(frames)}"
        )
    at = number - 1
    start, captured, length = int(frames.start[at]), int(frames.captured[at]), int(frames.length[at])
    interface, outbound = int(frames.interface[at]), int(frames.outbound[at])
    try:
        packet = _dissect(frames.data[start : start + captured].tobytes(), int(frames.link_types[interface]))
    except struct.error as error:
        raise UsageError(
            f"frame {number}: its {captured} captured bytes end within the first header; capture longer frames"
        ) from error
    layers, payload_bytes, layer = [], 0, packet
    while not isinstance(layer, NoPayload):
        if isinstance(layer, Raw):
            payload_bytes += len(layer.load)
        elif not isinstance(layer, _BEYOND_FIELDS):
            layers.append(Layer(name=layer.name, fields=_fields(layer)))
        layer = layer.payload
    return Explained(
        frame=number,
        time_ns=int(frames.time_ns[at]),
        port=frames.interfaces[interface],
        outbound=None if outbound < 0 else bool(outbound),
        captured=captured,
        length=length,
        layers=tuple(layers),
        # The truncated part counts as payload. In a whole frame the ICRC is a field of the BTH already.
        payload_bytes=payload_bytes + length - captured,
        icrc=_icrc(packet, is_whole=captured == length),
    )


def _dissect(content: bytes, link_type: int) -> Any:
    if link_type == ETHERNET:
        return Ether(content)
    return IPv6(content) if content[:1] and content[0] >> 4 == 6 else IP(content)  # noqa: PLR2004 - the version


def _fields(layer: Any) -> dict[str, str]:
    values = {field.name: str(field.i2repr(layer, layer.getfieldval(field.name))) for field in layer.fields_desc}
    if isinstance(layer, BTH):
        values["opcode"] = f"{opcode_name(int(layer.opcode))} (0x{int(layer.opcode):02x})"
        icrc = layer.icrc
        values["icrc"] = "none" if icrc is None else f"0x{icrc:08x}"
    elif isinstance(layer, AETH):
        values["syndrome"] = f"0x{int(layer.syndrome):02x}, {_syndrome(int(layer.syndrome))}"
    return values


def _syndrome(value: int) -> str:
    """Return the meaning of an AETH's syndrome (InfiniBand Architecture Specification, volume 1, 9.7.5.2.1)."""
    code = value & 0x1F
    kind = value & NAK_SEQUENCE
    if kind == 0:
        return f"ACK, credit code {code}"
    if kind == 0x20:  # noqa: PLR2004 - bits 6:5 are 01
        return f"RNR NAK, timer code {code}"
    return f"NAK, {_NAK_CODES.get(code, f'code {code}')}" if kind == NAK_SEQUENCE else "reserved"


def _icrc(packet: Any, *, is_whole: bool) -> Literal["right", "wrong", "not captured", "none"]:
    if BTH not in packet:
        return "none"
    if not is_whole:
        return "not captured"
    again = packet.copy()
    again[BTH].icrc = None
    built = type(packet)(bytes(again))
    return "right" if BTH in built and built[BTH].icrc == packet[BTH].icrc else "wrong"
