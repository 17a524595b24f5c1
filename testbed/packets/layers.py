"""Extended transport headers of RoCEv2 that `scapy.contrib.roce` lacks.

    from faultbed.testbed.packets import layers          # binds; scapy then dissects them
    Ether() / IP() / UDP(dport=4791) / BTH(opcode="RC_RDMA_WRITE_ONLY") / RETH(...) / Raw(...)

RETH, AtomicETH, AtomicAckETH, ImmDt, IETH and DETH are defined in the InfiniBand Architecture Specification, volume 1,
9.3. The module also makes scapy dissect the AETH of READ responses. The code follows scapy's own style, so that it can
be contributed to that module.
"""

from __future__ import annotations

from typing import Any

from scapy.contrib.roce import AETH, BTH, _bth_opcodes
from scapy.fields import BitField, XByteField, XIntField, XLongField
from scapy.packet import Packet, bind_layers

from faultbed.testbed.packets.bth import opcode_name

__all__ = ["AETH", "BTH", "DETH", "IETH", "RETH", "AtomicAckETH", "AtomicETH", "ImmDt"]

_WRITE_ONLY_WITH_IMMEDIATE = (0x0B, 0x2B)
_ATOMIC_ACKNOWLEDGE, _UD_SEND_ONLY_WITH_IMMEDIATE = 0x12, 0x65


def _opcode_below(packet: Any) -> int | None:
    """Return the opcode of the BTH below a header, or None."""
    below = packet.underlayer
    return int(below.opcode) if isinstance(below, BTH) else None


class ImmDt(Packet):  # type: ignore[misc]  # scapy has no types here
    """Immediate data header."""

    name = "ImmDt"
    fields_desc = [XIntField("immdt", 0)]  # noqa: RUF012 - scapy's style


class IETH(Packet):  # type: ignore[misc]
    """Invalidate header: the R_Key that the responder must invalidate."""

    name = "IETH"
    fields_desc = [XIntField("rkey", 0)]  # noqa: RUF012


class RETH(Packet):  # type: ignore[misc]
    """RDMA header: where the responder writes to or reads from."""

    name = "RETH"
    fields_desc = [XLongField("va", 0), XIntField("rkey", 0), BitField("dmalen", 0, 32)]  # noqa: RUF012

    def guess_payload_class(self, payload: bytes) -> Any:
        """Return `ImmDt` if the BTH announces immediate data."""
        if _opcode_below(self) in _WRITE_ONLY_WITH_IMMEDIATE:
            return ImmDt
        return super().guess_payload_class(payload)


class AtomicETH(Packet):  # type: ignore[misc]
    """Compare-and-swap or fetch-and-add header; `swap` holds the value to add."""

    name = "AtomicETH"
    fields_desc = [  # noqa: RUF012
        XLongField("va", 0),
        XIntField("rkey", 0),
        XLongField("swap", 0),
        XLongField("compare", 0),
    ]


class AtomicAckETH(Packet):  # type: ignore[misc]
    """Atomic acknowledge header: the value in the responder's memory before the operation."""

    name = "AtomicAckETH"
    fields_desc = [XLongField("orig", 0)]  # noqa: RUF012


class DETH(Packet):  # type: ignore[misc]
    """Datagram header: queue key and source QP."""

    name = "DETH"
    fields_desc = [XIntField("qkey", 0), XByteField("reserved", 0), BitField("sqpn", 0, 24)]  # noqa: RUF012

    def guess_payload_class(self, payload: bytes) -> Any:
        """Return `ImmDt` if the BTH announces immediate data."""
        if _opcode_below(self) == _UD_SEND_ONLY_WITH_IMMEDIATE:
            return ImmDt
        return super().guess_payload_class(payload)


def _after_aeth(self: Any, payload: bytes) -> Any:
    if _opcode_below(self) == _ATOMIC_ACKNOWLEDGE:
        return AtomicAckETH
    return Packet.guess_payload_class(self, payload)


def _bind() -> None:
    names = {opcode: opcode_name(opcode) for opcode in (0x16, 0x17)}
    # Table from which scapy's BTH names its opcodes; these two are missing there.
    _bth_opcodes.update(names)
    field = next(described for described in BTH.fields_desc if described.name == "opcode")
    field.i2s.update(names)
    field.s2i.update({name: opcode for opcode, name in names.items()})
    AETH.guess_payload_class = _after_aeth
    for upper, opcodes in {
        RETH: (0x06, 0x0A, 0x0B, 0x0C, 0x26, 0x2A, 0x2B),
        AtomicETH: (0x13, 0x14),
        AETH: (0x0D, 0x0F, 0x10, 0x12),
        ImmDt: (0x03, 0x05, 0x09, 0x23, 0x25, 0x29),
        IETH: (0x16, 0x17),
        DETH: (0x64, 0x65),
    }.items():
        for opcode in opcodes:
            bind_layers(BTH, upper, opcode=opcode)


_bind()
