"""Captures that obey the transport's rules, and changes of one packet: those that the standard forbids, and legal ones.

A change is a function of a `Capture` and a random generator. It changes the packets and returns True, or it returns
False if the capture has no place for it. Whether a change is forbidden depends on the port: a sender that leaves a PSN
out breaks a rule, a network that loses it does not, but then no responder may acknowledge it.

    python tests/support/packet_mutations.py 10000

prints what the analysis says of so many forbidden changes, and of as many legal ones. Changes that the standard forbids
and no rule finds:

    MSN of an ACK               it counts messages; how RNICs count READs and shared receive queues differs
    address or key of a RETH    which memory is registered is in no packet; the responder's NAK is in the verdict
    payload                     its bytes are not kept; the ICRC covers them (`packets FILE --frame N` checks it)
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gbn_model import MIDDLE, NAK, SPACE, Reads, Wire, go_back_n

from faultbed.harness.packets.analysis import analyse

__all__ = ["FORBIDDEN", "LEGAL", "Capture", "answers_to", "good_capture"]

ACK = 0x11
WRITES, DATA = (6, 7, 8, 10), (0x0D, 0x0E, 0x0F, 0x10)


@dataclass
class Capture:
    """The packets of one port, (time, content, outbound) each; `side` is whose port it is."""

    wire: Wire
    side: str

    @property
    def packets(self):
        return self.wire.packets

    def opcode(self, at):
        return self.packets[at][1][42]

    def psn(self, at):
        return int.from_bytes(self.packets[at][1][51:54], "big")

    def syndrome(self, at):
        return self.packets[at][1][54]

    def rewrite(self, at, offset, content):
        time_ns, old, outbound = self.packets[at]
        self.packets[at] = time_ns, old[:offset] + content + old[offset + len(content) :], outbound

    def set_psn(self, at, psn):
        self.rewrite(at, 51, (psn % SPACE).to_bytes(3, "big"))

    def places(self, *opcodes):
        return [at for at in range(len(self.packets)) if self.opcode(at) in opcodes]

    def swap(self, at, other):
        """Exchange two packets; the times stay where they are."""
        first, second = self.packets[at], self.packets[other]
        self.packets[at], self.packets[other] = (first[0], *second[1:]), (second[0], *first[1:])

    def repeat(self, at):
        time_ns, *rest = self.packets[at]
        self.packets.insert(at + 1, (time_ns + 1, *rest))

    def ahead(self, at, psn=None):
        """Return how far a packet is ahead of the first one of the capture, or how far another PSN is."""
        base = self.psn(0)
        return (self.psn(at) if psn is None else psn) - base + SPACE // 2 & SPACE - 1

    def sent_once(self):
        """Return the requests between the first and last one whose PSN passes once and is acknowledged afterwards."""
        requests = self.places(*WRITES)
        psns = [self.psn(at) for at in requests]
        acks = [at for at in self.places(ACK) if self.syndrome(at) == 0]
        top = max((self.ahead(at) for at in acks), default=-1)
        between = zip(requests[1:-1], psns[1:-1], strict=True)
        return [at for at, psn in between if psns.count(psn) == 1 and self.ahead(at) <= top]


Change = Callable[[Capture, np.random.Generator], bool]


def good_capture(rng) -> Capture:
    """Return a capture without a broken rule: WRITEs with losses and go-back-N, or READs."""
    side = str(rng.choice(["sender", "receiver"]))
    first = int(rng.choice([0, 1000, SPACE - 20, int(rng.integers(SPACE))]))
    if rng.random() < 0.3:
        wire = Reads(side, first)
        size, begin = int(rng.integers(2, 9)), 0
        for _ in range(int(rng.integers(3, 7))):
            wire.read(begin, begin + size)
            begin += size
        return Capture(wire, side)
    played = go_back_n(
        count=int(rng.integers(24, 80)),
        losses=set(rng.integers(0, 60, size=int(rng.integers(0, 4))).tolist()),
        first_psn=first,
        message=int(rng.choice([1, 2, 4])),
        window=int(rng.integers(4, 16)),
        at=side,
    )
    return Capture(played.wire, side)


def _pick(rng, places):
    return int(rng.choice(places))


def _neighbours(capture, *opcodes):
    """Return the places of packets of these opcodes that a later PSN of the same kind follows at once."""
    return [
        at
        for at in range(len(capture.packets) - 1)
        if capture.opcode(at) in opcodes
        and capture.opcode(at + 1) in opcodes
        and (capture.psn(at) + 1) % SPACE == capture.psn(at + 1)
    ]


def drop_request(capture, rng):
    """A PSN never passes, and is acknowledged."""
    places = capture.sent_once()
    if places:
        del capture.packets[_pick(rng, places)]
    return bool(places)


def drop_data(capture, rng):
    """A packet of READ data never passes at its responder's port, and later data does."""
    places = capture.places(*DATA)[:-1]
    if places and capture.side == "receiver":
        del capture.packets[_pick(rng, places)]
        return True
    return False


def repeat_nak(capture, rng):
    """A responder sends a NAK twice before the PSN came again."""
    places = [at for at in capture.places(ACK) if capture.syndrome(at) == NAK]
    if places:
        capture.repeat(_pick(rng, places))
    return bool(places)


def repeat_data(capture, rng):
    """A responder sends data twice."""
    places = capture.places(*DATA)
    if places and capture.side == "receiver":
        capture.repeat(_pick(rng, places))
        return True
    return False


def swap_requests(capture, rng):
    """A sender leaves the order of PSNs; or the network does, and the responder acknowledges all the same."""
    once = set(capture.sent_once())
    places = [at for at in _neighbours(capture, *WRITES) if {at, at + 1} <= once]
    if places:
        at = _pick(rng, places)
        capture.swap(at, at + 1)
    return bool(places)


def swap_data(capture, rng):
    """A responder leaves the order of PSNs."""
    places = _neighbours(capture, *DATA)
    if places and capture.side == "receiver":
        at = _pick(rng, places)
        capture.swap(at, at + 1)
        return True
    return False


def answer_too_early(capture, rng):
    """An acknowledgement comes before its request."""
    places = [
        at
        for at in range(1, len(capture.packets) - 1)
        if capture.opcode(at) in WRITES
        and capture.opcode(at + 1) == ACK
        and capture.psn(at) == capture.psn(at + 1)
        and at in set(capture.sent_once())
        and capture.syndrome(at + 1) == 0
    ]
    if places:
        at = _pick(rng, places)
        capture.swap(at, at + 1)
    return bool(places)


def request_psn(capture, rng):
    """A request has another PSN."""
    places = capture.sent_once()
    if places:
        at = _pick(rng, places)
        capture.set_psn(at, capture.psn(at) + int(rng.choice([-1, 1])) * int(rng.integers(1, 1000)))
    return bool(places)


def request_opcode(capture, rng):
    """A request has an opcode that continues or begins another message than its neighbours do."""
    places = [at for at in capture.sent_once() if capture.opcode(at + 1) in WRITES and capture.opcode(at - 1) in WRITES]
    places = [
        at
        for at in places
        if capture.psn(at + 1) == (capture.psn(at) + 1) % SPACE and capture.psn(at - 1) == (capture.psn(at) - 1) % SPACE
    ]
    if places:
        at = _pick(rng, places)
        capture.rewrite(at, 42, bytes([int(rng.choice([code for code in WRITES if code != capture.opcode(at)]))]))
    return bool(places)


def request_queue_pair(capture, rng):
    """A request goes to another queue pair, and its PSN is acknowledged."""
    places = capture.sent_once()
    if places:
        capture.rewrite(_pick(rng, places), 47, int(rng.integers(1 << 12, 1 << 24)).to_bytes(3, "big"))
    return bool(places)


def request_length(capture, rng):
    """A FIRST or MIDDLE packet is not as long as the path MTU."""
    places = capture.places(6, 7)
    if len(places) < 3:
        return False
    _resize(capture, _pick(rng, places), int(rng.choice([-512, -4, 4, 1024])))
    return True


def data_length(capture, rng):
    """A FIRST or MIDDLE packet of data is not as long as the path MTU."""
    places = capture.places(0x0D, 0x0E)
    if len(places) < 3:
        return False
    _resize(capture, _pick(rng, places), int(rng.choice([-512, -4, 4, 1024])))
    return True


def _resize(capture, at, more):
    for offset in (16, 38):
        length = int.from_bytes(capture.packets[at][1][offset : offset + 2], "big")
        capture.rewrite(at, offset, (length + more).to_bytes(2, "big"))
    time_ns, content, outbound = capture.packets[at]
    capture.packets[at] = time_ns, content + bytes(more) if more > 0 else content[:more], outbound


def ack_beyond(capture, rng):
    """An acknowledgement is for a PSN that had not passed."""
    places = [at for at in capture.places(ACK) if capture.syndrome(at) == 0]
    if places:
        at = _pick(rng, places)
        capture.set_psn(at, capture.psn(at) + int(rng.integers(100, 5000)))
    return bool(places)


def ack_back(capture, rng):
    """An acknowledgement is for less than an earlier one."""
    acks = [at for at in capture.places(ACK) if capture.syndrome(at) == 0]
    acks = [at for at, before in zip(acks[1:], acks, strict=False) if capture.ahead(at) >= capture.ahead(before)]
    if acks:
        at = _pick(rng, acks)
        earlier = [before for before in capture.places(ACK) if before < at and capture.syndrome(before) == 0]
        highest = max(capture.ahead(before) for before in earlier)
        capture.set_psn(at, capture.psn(at) - (capture.ahead(at) - highest) - int(rng.integers(1, 500)))
    return bool(acks)


def nak_psn(capture, rng):
    """A NAK requests a PSN that the responder cannot expect."""
    places = [at for at in capture.places(ACK) if capture.syndrome(at) == NAK]
    if places:
        at = _pick(rng, places)
        capture.set_psn(at, capture.psn(at) + int(rng.integers(100, 5000)))
    return bool(places)


def data_psn(capture, rng):
    """A packet of data has another PSN."""
    places = capture.places(*DATA)
    if places and capture.side == "receiver":
        at = _pick(rng, places)
        capture.set_psn(at, capture.psn(at) + int(rng.choice([-1, 1])) * int(rng.integers(1, 1000)))
        return True
    return False


def data_opcode(capture, rng):
    """A packet of data has another place in its message than its PSN."""
    places = capture.places(*DATA)
    if places:
        at = _pick(rng, places)
        capture.rewrite(at, 42, bytes([int(rng.choice([code for code in DATA if code != capture.opcode(at)]))]))
    return bool(places)


def read_length(capture, rng):
    """A READ asks for another number of packets than its data has."""
    places = capture.places(0x0C)
    if places:
        at = _pick(rng, places)
        size = int.from_bytes(capture.packets[at][1][66:70], "big")
        capture.rewrite(at, 66, (size + int(rng.choice([-1024, 1024]))).to_bytes(4, "big"))
    return bool(places)


def ack_becomes(*syndromes):
    """Return the change of an ACK to another syndrome, while the flow goes on as if it had been positive."""

    def change(capture, rng):
        acks = [at for at in capture.places(ACK) if capture.syndrome(at) == 0][:-1]
        requests = capture.places(*WRITES)
        acks = [at for at in acks if any(later > at for later in requests)]
        if acks:
            capture.rewrite(_pick(rng, acks), 54, bytes([int(rng.choice(syndromes))]))
        return bool(acks)

    return change


def response_queue_pair(capture, rng):
    """A response goes to a queue pair that no request came from."""
    places = capture.places(ACK, *DATA)
    if places:
        capture.rewrite(_pick(rng, places), 47, int(rng.integers(1 << 12, 1 << 24)).to_bytes(3, "big"))
    return bool(places)


FORBIDDEN: dict[str, Change] = {
    "request dropped, and acknowledged": drop_request,
    "data dropped by its responder": drop_data,
    "NAK twice": repeat_nak,
    "data twice": repeat_data,
    "requests swapped": swap_requests,
    "data swapped": swap_data,
    "ACK before its request": answer_too_early,
    "PSN of a request": request_psn,
    "opcode of a request": request_opcode,
    "queue pair of a request": request_queue_pair,
    "length of a request": request_length,
    "length of data": data_length,
    "PSN of an ACK, beyond": ack_beyond,
    "PSN of an ACK, back": ack_back,
    "PSN of a NAK": nak_psn,
    "PSN of data": data_psn,
    "opcode of data": data_opcode,
    "length of a READ": read_length,
    "ACK becomes a sequence NAK": ack_becomes(NAK),
    "ACK becomes a fatal NAK": ack_becomes(0x61, 0x62, 0x63),
    "ACK becomes an RNR NAK": ack_becomes(0x2A, 0x2C),
    "ACK becomes reserved": ack_becomes(0x40, 0x65, 0x7F, 0x80, 0xE0),
    "queue pair of a response": response_queue_pair,
}


def drop_ack(capture, rng):
    """An acknowledgement is lost, or joined with a later one that covers it."""
    acks = [at for at in capture.places(ACK) if capture.syndrome(at) == 0]
    covered = [at for at in acks[:-1] if capture.ahead(at) <= max(capture.ahead(later) for later in acks if later > at)]
    if covered:
        del capture.packets[_pick(rng, covered)]
    return bool(covered)


def repeat_ack(capture, rng):
    """An acknowledgement comes twice."""
    acks = [at for at in capture.places(ACK) if capture.syndrome(at) == 0]
    if acks:
        capture.repeat(_pick(rng, acks))
    return bool(acks)


def other_field(offset, size, *opcodes):
    """Return the change of a field that no rule is about."""

    def change(capture, rng):
        places = capture.places(*opcodes) if opcodes else range(len(capture.packets))
        if len(places):
            capture.rewrite(_pick(rng, places), offset, rng.integers(0, 256, size=size).astype(np.uint8).tobytes())
        return bool(len(places))

    return change


def credits_of_ack(capture, rng):
    """An acknowledgement has other credits."""
    acks = [at for at in capture.places(ACK) if capture.syndrome(at) == 0]
    if acks:
        capture.rewrite(_pick(rng, acks), 54, bytes([int(rng.integers(1, 32))]))
    return bool(acks)


def mark(capture, rng):
    """A packet is marked by a congested switch."""
    at = int(rng.integers(len(capture.packets)))
    capture.rewrite(at, 15, bytes([capture.packets[at][1][15] | 3]))
    return True


def ack_request(capture, rng):
    """A request asks for an acknowledgement."""
    places = capture.places(*WRITES, 0x0C)
    capture.rewrite(_pick(rng, places), 50, b"\x80")
    return True


def times(capture, rng):
    """All times are later, and no two are the same distance apart as before."""
    shift = np.cumsum(rng.integers(0, 400, size=len(capture.packets)))
    capture.wire.packets = [
        (time_ns + int(more), *rest) for (time_ns, *rest), more in zip(capture.packets, shift, strict=True)
    ]
    return True


def all_psns(capture, rng):
    """The connection began with another PSN."""
    by = int(rng.integers(SPACE))
    for at in range(len(capture.packets)):
        capture.set_psn(at, capture.psn(at) + by)
    return True


def stranger(capture, rng):
    """A packet that is no RoCEv2 passes."""
    at = int(rng.integers(len(capture.packets)))
    time_ns, content, outbound = capture.packets[at]
    capture.packets.insert(at, (time_ns, content[:36] + b"\x00\x35" + content[38:], outbound))
    return True


def shorter_last(capture, rng):
    """A message is shorter."""
    places = [at for at in capture.sent_once() if capture.opcode(at) in (8, 10)]
    if places:
        _resize(capture, _pick(rng, places), -4 * int(rng.integers(1, 200)))
    return bool(places)


def lost_data(capture, rng):
    """Data is lost on its way to the requester, who reads it again at once."""
    if not capture.places(MIDDLE) or capture.side != "sender" or not isinstance(capture.wire, Reads):
        return False
    wire, begin = capture.wire, capture.ahead(capture.places(*DATA)[-1]) - SPACE // 2 + 1
    wire.ask(begin, 4)
    wire.data(0 + begin, 2 + begin, 3 + begin, begin=begin, end=begin + 4)
    wire.read(begin + 1, begin + 4)
    return True


def other_source_port(capture, rng):
    """All packets of one direction have another UDP source port."""
    direction, port = capture.packets[0][2], rng.integers(0, 256, size=2).astype(np.uint8).tobytes()
    for at, (_, _, outbound) in enumerate(capture.packets):
        if outbound == direction:
            capture.rewrite(at, 34, port)
    return True


LEGAL: dict[str, Change] = {
    "ACK dropped": drop_ack,
    "ACK twice": repeat_ack,
    "credits of an ACK": credits_of_ack,
    "mark of congestion": mark,
    "request for an ACK": ack_request,
    "time to live": other_field(22, 1),
    "flow label (source port of UDP)": other_source_port,
    "key and address of the RETH": other_field(54, 12, 10, 0x0C),
    "MAC addresses": other_field(0, 12),
    "partition key": other_field(44, 2),
    "other times": times,
    "other PSNs": all_psns,
    "another protocol": stranger,
    "shorter message": shorter_last,
    "data lost and read again": lost_data,
}


def verdict(capture) -> str:
    """Return what the analysis says: a broken rule, a fatal NAK, a doubt, a count of what is unusual, or nothing."""
    analysis = analyse(capture.wire.frames())
    counted = any(
        flow.data_missing or flow.data_repeated or flow.data_reordered or flow.duplicates for flow in analysis.flows
    )
    says = {
        "broken": analysis.violations,
        "fatal NAK": analysis.fatal_naks,
        "doubt": analysis.doubts,
        "counted": counted,
        "nothing": True,
    }
    return next(word for word, is_so in says.items() if is_so)


def answers_to(change, count, rng) -> Counter[str]:
    """Return how often the analysis says what, of one change in each of `count` good captures."""
    answers, tried = Counter[str](), 0
    while answers.total() < count:
        tried += 1
        assert tried < 100 * (count + 1), "no capture has a place for this change"
        capture = good_capture(rng)
        original = list(capture.packets)
        if not change(capture, rng):
            continue
        answer = verdict(capture)
        capture.wire.packets = original
        before = verdict(capture)
        answers[f"unchanged: {before}" if before in ("broken", "doubt", "fatal NAK") else answer] += 1
    return answers


def main() -> None:
    """Print the table of all changes."""
    count = int(sys.argv[1])
    for title, table in (("forbidden", FORBIDDEN), ("legal", LEGAL)):
        total = Counter[str]()
        for number, (name, change) in enumerate(table.items()):
            answers = answers_to(change, -(-count // len(table)), np.random.default_rng(number))
            total += answers
            print(f"{name:36}", dict(answers), flush=True)
        print(f"{title}: {total.total():,} changes:", dict(total))


if __name__ == "__main__":
    main()
