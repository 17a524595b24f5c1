"""Extended transport headers of RoCEv2 that `scapy.contrib.roce` lacks.

    from faultbed.testbed.packets import layers          # binds; scapy then dissects them
    Ether() / IP() / UDP(dport=4791) / BTH(opcode="RC_RDMA_WRITE_ONLY") / RETH(...) / Raw(...)

RETH, AtomicETH, AtomicAckETH, ImmDt, IETH and DETH are defined in the InfiniBand Architecture Specification, volume 1,
9.3, XRCETH in its annex A14, FETH (flush) in annex A19. The module also makes scapy dissect the AETH of READ responses.
The code follows scapy's own style, so that it can be contributed to that module.
"""

from __future__ import annotations

from typing import Any

from scapy.contrib.roce import AETH, BTH, _bth_opcodes
from scapy.fields import BitField, XByteField, XIntField, XLongField
from scapy.packet import Packet, bind_layers

from faultbed.testbed.packets.bth import ATOMIC_ACKNOWLEDGE, OPCODES

__all__ = ["AETH", "BTH", "DETH", "FETH", "IETH", "RETH", "XRCETH", "AtomicAckETH", "AtomicETH", "ImmDt"]

_WRITE_ONLY_WITH_IMMEDIATE, _UD_SEND_ONLY_WITH_IMMEDIATE = (0x0B, 0x2B, 0xAB), 0x65


def _opcode_below(packet: Any) -> int | None:
    """Return the opcode of the BTH below a header, or None."""
    below = packet.underlayer
    while below is not None and not isinstance(below, BTH):
        below = below.underlayer
    return None if below is None else int(below.opcode)


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


class FETH(Packet):  # type: ignore[misc]
    """Flush header: what of the memory is flushed, and how durably (in Linux: struct rxe_feth)."""

    name = "FETH"
    fields_desc = [BitField("reserved", 0, 26), BitField("selectivity", 0, 2), BitField("placement", 0, 4)]  # noqa: RUF012

    def guess_payload_class(self, payload: bytes) -> Any:  # noqa: ARG002 - scapy's signature
        """Return `RETH`, which names the memory."""
        return RETH


class XRCETH(Packet):  # type: ignore[misc]
    """Header of XRC requests: the shared receive queue at the responder."""

    name = "XRCETH"
    fields_desc = [XByteField("reserved", 0), BitField("xrcsrq", 0, 24)]  # noqa: RUF012

    def guess_payload_class(self, payload: bytes) -> Any:
        """Return the header that the same operation of RC begins with."""
        opcode = _opcode_below(self)
        following = None if opcode is None else _AFTER_BTH.get(opcode & 0x1F)
        return super().guess_payload_class(payload) if following is None else following


def _after_aeth(self: Any, payload: bytes) -> Any:
    if (_opcode_below(self) or 0) & 0x1F == ATOMIC_ACKNOWLEDGE:
        return AtomicAckETH
    return Packet.guess_payload_class(self, payload)


_AFTER_BTH = {
    **dict.fromkeys((0x06, 0x0A, 0x0B, 0x0C, 0x1D), RETH),
    **dict.fromkeys((0x13, 0x14), AtomicETH),
    **dict.fromkeys((0x03, 0x05, 0x09), ImmDt),
    **dict.fromkeys((0x16, 0x17), IETH),
    **dict.fromkeys((0x0D, 0x0F, 0x10, 0x11, 0x12), AETH),
    0x1C: FETH,
}
"""By operation of RC: the header that follows the BTH."""


def _bind() -> None:
    # Table from which scapy's BTH names its opcodes; those of invalidation, XRC, FLUSH and others are missing there.
    names = {opcode: row.name for opcode, row in OPCODES.items() if opcode not in _bth_opcodes}
    _bth_opcodes.update(names)
    field = next(described for described in BTH.fields_desc if described.name == "opcode")
    field.i2s.update(names)
    field.s2i.update({name: opcode for opcode, name in names.items()})
    AETH.guess_payload_class = _after_aeth
    for opcode, row in OPCODES.items():
        if row.transport == "UD":
            bind_layers(BTH, DETH, opcode=opcode)
        elif row.transport == "XRC" and row.role == "request":
            bind_layers(BTH, XRCETH, opcode=opcode)
        elif row.transport in ("RC", "UC", "XRC") and (opcode & 0x1F) in _AFTER_BTH:
            bind_layers(BTH, _AFTER_BTH[opcode & 0x1F], opcode=opcode)


_bind()
