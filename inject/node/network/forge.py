"""Forged packets: made from a live packet of a queue pair, and put on the wire of a switch port.

The fields that a receiver checks first (addresses, source port, queue pair) are copied from a packet that is passing.
The forged packet is wrong only in the requested property. Its ICRC is right (InfiniBand annex A17.3.3), and it carries
ECT(1), which the ICRC does not cover and the receiver's IP layer counts.
"""

from __future__ import annotations

import socket
import struct
import time
import zlib
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused, enter_netns
from faultbed.inject.node.child import Child

__all__ = ["KINDS", "ForgeActuator", "destination_qp", "fits", "forge", "icrc", "request_after", "with_flipped_bit"]

KINDS = ("cnp", "nak", "ack", "replay", "stray", "malformed")
_ETH_P_ALL, _PACKET_OUTGOING = 3, 4
_ETHERNET, _IP, _UDP, _BTH, _AETH, _ICRC = 14, 20, 8, 12, 4, 4
_ROCE_PORT, _ECT1 = 4791, 1
_ACK, _CNP, _DATA = 0x11, 0x81, frozenset({*range(0x0C), 0x16, 0x17})
_FIRST_NAK = 0x20
_PSN_ERROR = 0x60
_PSN_MASK = (1 << 24) - 1
# More requests than can be in flight: rxe allows 128 (rxe_param.h, RXE_MAX_UNACKED_PSNS).
_WINDOW = 1 << 12
# rxe assigns QP numbers in ascending order (drivers/infiniband/sw/rxe/rxe_param.h): no QP has this one.
_NO_QP = 0xFFFFF0
_BAD_TVER = 0x0F
_BECN = 0x40
_LEARN_S = 0.2
_PAUSE_S = 0.05
# Headers between BTH and payload: RETH, immediate (InfiniBand 9.2.1, table 38).
_EXTENDED = {0x03: 4, 0x05: 4, 0x06: 16, 0x09: 4, 0x0A: 16, 0x0B: 20}
_ELEMENT = 4
# In the third byte of a little-endian fp32: a bit of the fraction, so that the value stays a number.
_BIT = 0x40


class ForgeActuator(Actuator):
    """Sends up to `count` packets of the kind `what` out of `device` of the switch `netns` (None: this machine).

    The packets go to the queue pair `qp`; None: to the queue pair of whichever packet passes. With `syndrome`, NAKs
    have that code, and all go to one queue pair.
    """

    poll_s = 0.02

    def __init__(
        self, *, netns: str | None, device: str, what: str, qp: int | None, count: int, syndrome: int | None = None
    ) -> None:
        self._netns, self._device, self._what, self._qp, self._count = netns, device, what, qp, count
        self._syndrome = syndrome
        self._child = Child()

    def prepare(self) -> dict[str, Any]:
        """Refuse a port that does not exist."""
        enter_netns(self._netns)
        try:
            self._socket(0).close()
        except OSError as error:
            raise Refused(f"{self._device}: {error}") from None
        return self.read()

    def revert_script(self) -> str:
        return "true"

    def on(self) -> None:
        self._child.start(self._work)

    def off(self) -> None:
        self._child.stop()

    def read(self) -> dict[str, Any]:
        sent = self._child.count
        is_running = self._child.is_running()
        return {"applied": is_running, "device": self._device, "what": self._what, "sent": sent}

    def hits(self) -> int:
        return self._child.count

    def _socket(self, protocol: int) -> socket.socket:
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        # Protocol 0 until `bind`: otherwise packets of other ports arrive in between.
        wire.bind((self._device, protocol))
        wire.settimeout(_LEARN_S)
        return wire

    def _work(self) -> None:
        """Send `count` packets, each made from a packet that has just passed; then wait until the holder ends."""
        while self._child.is_wanted():
            if self._child.count >= self._count:
                time.sleep(_PAUSE_S)
                continue
            with self._socket(_ETH_P_ALL) as wire:
                source = self._passing(wire)
                if source is not None:
                    if self._syndrome is not None:
                        self._qp = destination_qp(source[0])
                    wire.send(forge(*source, syndrome=_PSN_ERROR if self._syndrome is None else self._syndrome))
                    self._child.add()
            # The pause makes each packet a separate event.
            time.sleep(_PAUSE_S)

    def _passing(self, wire: socket.socket) -> tuple[bytes, str, int | None] | None:
        """Wait for a packet to forge from; return the arguments of `forge`, or None if none passes in time.

        For a NAK they are an acknowledgement and the PSN of a request that is not acknowledged yet. The PSN after an
        acknowledgement would not do: it is mostly acknowledged by the time that the forged NAK arrives, and a NAK for
        an acknowledged PSN is ignored (rxe_comp.c, check_psn). A request that has just passed this port is still on
        its way to its receiver.
        """
        template: bytes | None = None
        source: tuple[bytes, str, int | None] | None = None
        deadline = time.monotonic() + _LEARN_S
        while time.monotonic() < deadline:
            try:
                frame, address = wire.recvfrom(65535)
            except (TimeoutError, BlockingIOError):
                return source
            if address[2] == _PACKET_OUTGOING:
                if fits(frame, self._what, self._qp):
                    template = frame
                    if self._what != "nak":
                        return template, self._what, None
            elif template is not None and (psn := request_after(template, frame)) is not None:
                # The newest request that has arrived by now.
                source = template, self._what, psn
                wire.settimeout(0)
        return source


def request_after(ack: bytes, frame: bytes) -> int | None:
    """Return the PSN of `frame`, if it is a request of the queue pair that gets `ack` and follows its PSN.

    A packet does not name its source queue pair. Addresses and the PSN identify it: PSNs begin anywhere in 2^24, and a
    request is at most a window ahead.
    """
    bth = _ETHERNET + _IP + _UDP
    if not fits(frame, "replay", None) or (frame[26:30], frame[30:34]) != (ack[30:34], ack[26:30]):
        return None
    psn, acked = (int.from_bytes(raw[bth + 9 : bth + 12], "big") for raw in (frame, ack))
    return psn if 0 < (psn - acked) & _PSN_MASK <= _WINDOW else None


def destination_qp(frame: bytes) -> int:
    """Return the number of the queue pair that a RoCEv2 frame goes to (IPv4 without options)."""
    bth = _ETHERNET + _IP + _UDP
    return int.from_bytes(frame[bth + 5 : bth + 8], "big")


def forge(frame: bytes, kind: str, psn: int | None = None, *, syndrome: int = _PSN_ERROR) -> bytes:
    """Return an Ethernet frame of the kind `kind`, made from the RoCEv2 frame `frame` (IPv4 without options).

    `psn` is the PSN that a NAK requests; default: the one after the acknowledgement from which the NAK is made.
    `syndrome` is the NAK's code (InfiniBand 9.7.5.2.8).
    """
    head = bytearray(frame[: _ETHERNET + _IP + _UDP + _BTH])
    rest = _payload(frame)
    bth = _ETHERNET + _IP + _UDP
    if kind == "cnp":
        head[bth], head[bth + 1] = _CNP, head[bth + 1] & 0x0F
        head[bth + 4] |= _BECN
        head[bth + 8 : bth + 12] = bytes(4)
        rest = bytes(16)
    elif kind == "nak":
        after = (int.from_bytes(head[bth + 9 : bth + 12], "big") + 1) & _PSN_MASK
        head[bth + 9 : bth + 12] = (after if psn is None else psn).to_bytes(3, "big")
        rest = bytes([syndrome]) + rest[1:]
    elif kind == "stray":
        head[bth + 5 : bth + 8] = _NO_QP.to_bytes(3, "big")
    elif kind == "malformed":
        head[bth + 1] |= _BAD_TVER
    return _finished(head, rest)


def with_flipped_bit(frame: bytes) -> bytes | None:
    """Return a data packet with one bit of its last element of 4 bytes flipped; None if it has no such element."""
    head, rest = bytearray(frame[: _ETHERNET + _IP + _UDP + _BTH]), bytearray(_payload(frame))
    bth = _ETHERNET + _IP + _UDP
    padding = (head[bth + 1] >> 4) & 3
    if len(rest) - padding - _EXTENDED.get(head[bth], 0) < _ELEMENT:
        return None
    rest[-padding - 2] ^= _BIT
    return _finished(head, bytes(rest))


def _payload(frame: bytes) -> bytes:
    """Return the bytes between BTH and ICRC, by the length in the IP header."""
    end = _ETHERNET + int.from_bytes(frame[16:18], "big") - _ICRC
    return frame[_ETHERNET + _IP + _UDP + _BTH : end]


def _finished(head: bytearray, rest: bytes) -> bytes:
    """Return the whole frame with ECT(1), lengths, checksums and ICRC."""
    ip, udp = _ETHERNET, _ETHERNET + _IP
    length = len(head) - _ETHERNET + len(rest) + _ICRC
    head[ip + 1] = (head[ip + 1] & ~3) | _ECT1
    struct.pack_into(">H", head, ip + 2, length)
    struct.pack_into(">H", head, ip + 10, 0)
    struct.pack_into(">H", head, ip + 10, _checksum(head[ip : ip + _IP]))
    struct.pack_into(">HH", head, udp + 4, length - _IP, 0)
    packet = bytes(head) + rest
    return packet + icrc(packet[_ETHERNET:]).to_bytes(_ICRC, "little")


def icrc(packet: bytes) -> int:
    """Return the invariant CRC of an IPv4 RoCEv2 packet without its ICRC; fields that routers change count as ones."""
    masked = bytearray(packet)
    masked[1] = masked[8] = 0xFF
    masked[10:12] = masked[_IP + 6 : _IP + 8] = b"\xff\xff"
    masked[_IP + _UDP + 4] = 0xFF
    # RoCE has no local route header: eight bytes of ones stand for it.
    return zlib.crc32(b"\xff" * 8 + masked)


def fits(frame: bytes, kind: str, qp: int | None) -> bool:
    """Return whether `kind` can be forged from this frame: RoCEv2 over IPv4, a suitable class, to `qp` (None: any)."""
    bth = _ETHERNET + _IP + _UDP
    if len(frame) < bth + _BTH + _ICRC or frame[12:15] != b"\x08\x00\x45" or frame[23] != socket.IPPROTO_UDP:
        return False
    if int.from_bytes(frame[36:38], "big") != _ROCE_PORT or frame[15] & 3 == _ECT1:
        return False
    if qp is not None and destination_qp(frame) != qp:
        return False
    opcode = frame[bth]
    if kind in ("nak", "ack"):
        return opcode == _ACK and frame[bth + _BTH] < _FIRST_NAK
    return opcode in _DATA if kind == "replay" else opcode != _CNP


def _checksum(header: bytes | bytearray) -> int:
    """Return the Internet checksum (RFC 1071)."""
    total: int = sum(struct.unpack(f">{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
