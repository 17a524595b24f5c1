"""A pure model of go-back-N, and a builder of captures: the reference of the packet tests.

`Wire` collects the packets of one port, `Reads` READs with their data. `go_back_n` simulates a sender and a receiver
that obey the rules, with losses at given transmissions, and returns the packets at the receiver's (or the sender's)
port.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from faultbed.harness.packets.analysis import analyse
from faultbed.testbed.packets.frames import Frames
from faultbed.testbed.packets.link_types import ETHERNET

A, B = "10.77.1.1", "10.77.2.5"
LQPN, RQPN = 0x11, 0x2A
WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST, WRITE_ONLY, ACK = 6, 7, 8, 10, 0x11
NAK = 0x60
SPACE = 1 << 24
MTU = 1024
US = 1000
READ, FIRST, MIDDLE, LAST, ONLY, ATOMIC_ACK, FETCH_ADD = 0x0C, 0x0D, 0x0E, 0x0F, 0x10, 0x12, 0x14
SIDES = {"sender": "rtsw1:host1:rnic0", "receiver": "rtsw2:host2:rnic0", "between": ""}


def frame(src, dst, *, opcode, dqpn, psn, extended=b"", payload=0, sport=0xD081, ecn=0, becn=0):
    """Return an Ethernet frame with one RoCEv2 packet; payload and ICRC are zeros."""
    bth = struct.pack(">BBHII", opcode, 0, 0xFFFF, becn << 30 | dqpn, psn % SPACE)
    body = bth + extended + bytes(payload + 4)
    udp = struct.pack(">HHHH", sport, 4791, 8 + len(body), 0)
    ips = b"".join(bytes(int(part) for part in address.split(".")) for address in (src, dst))
    ip = struct.pack(">BBHHHBBH", 0x45, ecn, 20 + len(udp) + len(body), 0, 0x4000, 64, 17, 0) + ips
    return b"\x02" * 12 + b"\x08\x00" + ip + udp + body


@dataclass
class Wire:
    """Packets at one port, in order."""

    name: str = "rtsw2:host4:rxe0"
    packets: list = field(default_factory=list)

    def put(self, time_ns, content, *, outbound):
        self.packets.append((time_ns, content, outbound))

    def request(self, time_ns, psn, opcode=WRITE_ONLY, *, outbound=True, payload=MTU, **more):
        extended = bytes(16) if opcode in (WRITE_FIRST, WRITE_ONLY) else b""
        self.put(
            time_ns,
            frame(A, B, opcode=opcode, dqpn=RQPN, psn=psn, extended=extended, payload=payload, **more),
            outbound=outbound,
        )

    def response(self, time_ns, psn, syndrome=0, *, outbound=False, msn=0, opcode=ACK):
        aeth = struct.pack(">I", syndrome << 24 | msn)
        self.put(time_ns, frame(B, A, opcode=opcode, dqpn=LQPN, psn=psn, extended=aeth), outbound=outbound)

    def frames(self, snap=128) -> Frames:
        data, starts, captured, length = bytearray(), [], [], []
        for _, content, _ in self.packets:
            starts.append(len(data))
            captured.append(min(snap, len(content)))
            length.append(len(content))
            data += content[:snap]
        count = len(self.packets)
        return Frames(
            data=np.frombuffer(bytes(data) + bytes(128), dtype=np.uint8),
            start=np.array(starts, dtype=np.int64),
            captured=np.array(captured, dtype=np.int64),
            length=np.array(length, dtype=np.int64),
            time_ns=np.array([packet[0] for packet in self.packets], dtype=np.int64),
            interface=np.zeros(count, dtype=np.int16),
            outbound=np.array([packet[2] for packet in self.packets], dtype=np.int8),
            interfaces=(self.name,),
            link_types=np.array([ETHERNET], dtype=np.int64),
        )


class Reads(Wire):
    """READs of `size` packets each at one port, with their responses. Times advance by a microsecond a packet."""

    def __init__(self, side="sender", first=1000):
        super().__init__(name=SIDES[side])
        self.side, self.first, self.now = side, first, 0

    def _put(self, src, dst, outbound, **fields):
        self.now += US
        self.put(self.now, frame(src, dst, **fields), outbound=outbound)

    def ask(self, place, size, opcode=READ):
        """Request `size` packets of data from place `place` on."""
        reth = struct.pack(">QII", 0, 0, size * MTU)
        extended = bytes(28) if opcode & 0x1F == FETCH_ADD else reth
        if opcode >= 0xA0:
            extended = bytes(4) + extended
        self._put(A, B, self.side == "receiver", opcode=opcode, dqpn=RQPN, psn=self.first + place, extended=extended)

    def data(self, *places, begin, end, opcode=None):
        """Send the data of some places of a READ of places `begin` to `end`."""
        for place in places:
            alone = end - begin == 1
            kind = ONLY if alone else FIRST if place == begin else LAST if place == end - 1 else MIDDLE
            kind = kind if opcode is None else opcode
            aeth = b"" if kind & 0x1F == MIDDLE else bytes(4)
            aeth += bytes(8) if kind & 0x1F == ATOMIC_ACK else b""
            payload = 0 if kind & 0x1F == ATOMIC_ACK else MTU
            self._put(
                B, A, self.side == "sender",
                opcode=kind, dqpn=LQPN, psn=self.first + place, extended=aeth, payload=payload,
            )  # fmt: skip

    def read(self, begin, end):
        self.ask(begin, end - begin)
        self.data(*range(begin, end), begin=begin, end=end)


@dataclass
class Played:
    """The result of `go_back_n`: the port's packets, and the true counts to compare with."""

    wire: Wire
    lost: int
    naks: int
    timeouts: int
    ahead: int
    again: int


def opcode_of(index, message):
    """Return the opcode of packet `index` in a stream of messages of `message` packets each."""
    place = index % message
    if message == 1:
        return WRITE_ONLY
    return WRITE_FIRST if place == 0 else WRITE_LAST if place == message - 1 else WRITE_MIDDLE


def go_back_n(*, count, losses, first_psn=0, message=4, window=8, at="receiver", timeout_ns=67_108_864) -> Played:
    """Send `count` packets; the transmissions (numbered over all, from 0) in `losses` are lost in the fabric.

    The two take turns: a window is sent, the receiver answers, the sender processes the answers. `at` is the observed
    port: `receiver` (after the losses) or `sender` (before them).
    """
    played = Played(wire=Wire(), lost=0, naks=0, timeouts=0, ahead=0, again=0)
    at_receiver = at == "receiver"
    receiver = _Receiver(count=count, message=message)
    now, sent, base, position, transmitted = 1_000_000, 0, 0, 0, set()
    while base < count:
        answers = []
        end = min(base + window, count)
        for index in range(position, end):
            now += 2 * US
            is_lost = sent in losses
            sent += 1
            played.lost += is_lost
            if not (at_receiver and is_lost):
                played.again += index in transmitted
                transmitted.add(index)
                played.wire.request(now, first_psn + index, opcode_of(index, message), outbound=at_receiver)
            if not is_lost:
                answers += receiver.take(index)
        position = end
        for syndrome, index in answers:
            now += US
            played.wire.response(now, first_psn + index, syndrome, outbound=not at_receiver)
            base = index if syndrome == NAK else max(base, index + 1)
        if any(syndrome == NAK for syndrome, _ in answers):
            position = base
        elif base < end == position == min(base + window, count):
            # Nothing new to send, and something without an answer: only the timer finds that.
            now += timeout_ns
            played.timeouts += 1
            position = base
        now += 5 * US
    played.naks, played.ahead = receiver.naks, receiver.ahead
    return played


@dataclass
class _Receiver:
    """A receiver that accepts packets in order and answers them."""

    count: int
    message: int
    expected: int = 0
    is_nak_sent: bool = False
    naks: int = 0
    ahead: int = 0

    def take(self, index):
        if index < self.expected:
            return [(0, self.expected - 1)]
        if index > self.expected:
            self.ahead += 1
            if self.is_nak_sent:
                return []
            self.is_nak_sent = True
            self.naks += 1
            return [(NAK, self.expected)]
        self.expected, self.is_nak_sent = index + 1, False
        is_last = index % self.message == self.message - 1 or index == self.count - 1
        return [(0, index)] if is_last else []


def only_flow(wire):
    """Return the only flow of a capture."""
    (flow,) = analyse(wire.frames()).flows
    return flow


plays = st.builds(
    dict,
    count=st.integers(1, 120),
    losses=st.sets(st.integers(0, 140), max_size=12),
    first_psn=st.sampled_from([0, 5, SPACE // 2 - 30, SPACE - 40, SPACE - 1]),
    message=st.sampled_from([1, 2, 4]),
    window=st.integers(1, 16),
)
