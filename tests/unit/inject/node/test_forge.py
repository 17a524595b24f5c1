"""Forged packets, decoded by scapy: the forged field differs, and all other fields and the ICRC are valid."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.node.network import forge as forge_module
from faultbed.inject.node.network.forge import KINDS, fits, forge, request_after, with_flipped_bit
from faultbed.testbed.packets.layers import AETH, BTH

ETHER = Ether(src="02:fb:02:01:01:00", dst="02:fb:01:01:01:00")
NETWORK = ETHER / IP(src="10.77.2.1", dst="10.77.1.1", ttl=62) / UDP(sport=0xD081, dport=4791, chksum=0)
ACK = bytes(NETWORK / BTH(opcode="RC_ACKNOWLEDGE", dqpn=17, psn=0xFFFFFF, ackreq=0) / AETH(syndrome=0x1F, msn=9))
DATA = bytes(NETWORK / BTH(opcode="RC_RDMA_WRITE_MIDDLE", dqpn=17, psn=291) / Raw(bytes(range(64))))


def forged(kind, template):
    return Ether(forge(template, kind))


def icrc_is_right(frame):
    """Check the ICRC against the one scapy computes for the packet."""
    output = frame[BTH].icrc
    again = frame.copy()
    again[BTH].icrc = None
    return Ether(bytes(again))[BTH].icrc == output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [ACK, DATA], ids=["ack", "data"])
def test_forge_recomputes_lengths_checksums_and_the_icrc(kind, template):
    """A receiver must not drop forged packets for a bad checksum; each one carries the fault's mark."""
    frame = forged(kind, template)
    assert frame[IP].len == len(bytes(frame)) - 14
    assert frame[UDP].len == frame[IP].len - 20
    assert frame[IP].tos & 3 == 1
    checked = frame[IP].copy()
    del checked.chksum
    assert IP(bytes(checked)).chksum == frame[IP].chksum
    assert (frame[IP].src, frame[IP].dst, frame[UDP].sport) == ("10.77.2.1", "10.77.1.1", 0xD081)
    assert icrc_is_right(frame)


def test_forge_changes_only_the_requested_field():
    """Each forgery has its one changed field; all others are those of the template."""
    nak = forged("nak", ACK)
    assert (nak[AETH].syndrome, nak[BTH].psn, nak[BTH].dqpn, nak[AETH].msn) == (0x60, 0, 17, 9)
    assert forged("cnp", ACK)[BTH].opcode == 0x81
    assert forged("cnp", ACK)[BTH].becn == 1
    assert len(forged("cnp", DATA)) == 14 + 20 + 8 + 12 + 16 + 4
    assert forged("stray", DATA)[BTH].dqpn not in (0, 1, 17)
    assert forged("malformed", DATA)[BTH].version == 15
    for kind, template in (("ack", ACK), ("replay", DATA)):
        frame = Ether(forge(template, kind))
        assert bytes(frame[BTH]) == bytes(Ether(template)[BTH])


def test_forge_accepts_only_templates_that_fit():
    """An ACK becomes a NAK, data is replayed, and no packet is forged from a forged one."""
    assert fits(ACK, "nak", None)
    assert fits(ACK, "ack", 17)
    assert not fits(ACK, "ack", 18)
    assert not fits(DATA, "nak", None)
    assert fits(DATA, "replay", 17)
    assert not fits(ACK, "replay", 17)
    assert not fits(forge(ACK, "ack"), "ack", 17)
    assert not fits(forge(ACK, "nak"), "nak", 17)
    assert not fits(bytes(ETHER / IP() / UDP(dport=9) / Raw(bytes(60))), "stray", None)
    assert not fits(b"", "stray", None)


def request(psn, *, src="10.77.1.1", dst="10.77.2.1", opcode="RC_RDMA_WRITE_MIDDLE"):
    network = ETHER / IP(src=src, dst=dst, ttl=63) / UDP(sport=0xD0FF, dport=4791, chksum=0)
    return bytes(network / BTH(opcode=opcode, dqpn=99, psn=psn) / Raw(bytes(64)))


def test_forged_nak_names_a_request_still_in_flight():
    """The NAK names a request of the opposite direction after the acknowledged one; PSNs wrap at 2^24."""
    assert request_after(ACK, request(5)) == 5
    assert Ether(forge(ACK, "nak", 5))[BTH].psn == 5
    assert request_after(ACK, request(0xFFFFFF)) is None, "acknowledged"
    assert request_after(ACK, request(0xFFFF00)) is None, "acknowledged, and sent again"
    assert request_after(ACK, request(1 << 20)) is None, "of another queue pair"
    assert request_after(ACK, request(5, src="10.77.1.3")) is None, "of another sender"
    assert request_after(ACK, DATA) is None, "of the same direction"
    assert request_after(ACK, ACK) is None


@pytest.mark.parametrize("code", [0x61, 0x62, 0x63])
def test_forged_fatal_nak_has_its_code_and_answers_a_request_in_flight(code):
    frame = Ether(forge(ACK, "nak", 5, syndrome=code))
    assert (frame[AETH].syndrome, frame[BTH].psn, frame[BTH].dqpn) == (code, 5, 17)
    assert icrc_is_right(frame)


def test_fatal_naks_all_go_to_the_queue_pair_of_the_first(monkeypatch):
    """The second NAK of `qp = any` would end a second connection."""
    sent, passing = [], iter([(ACK, "nak", 5), (ACK, "nak", 6)])
    actuator = forge_module.ForgeActuator(netns=None, device="lo", what="nak", qp=None, count=2, syndrome=0x63)
    requested = []
    wire = SimpleNamespace(send=sent.append)
    monkeypatch.setattr(actuator, "_socket", lambda _: contextlib.nullcontext(wire))
    monkeypatch.setattr(actuator, "_passing", lambda _: requested.append(actuator._qp) or next(passing))
    monkeypatch.setattr(forge_module.time, "sleep", lambda _: None)
    monkeypatch.setattr(actuator._child, "is_wanted", lambda: len(sent) < 2)
    actuator._work()
    assert requested == [None, 17]
    assert [Ether(frame)[AETH].syndrome for frame in sent] == [0x63, 0x63]


def test_forge_choices_match_the_catalogue():
    assert CATALOGUE["packet.forge"].param("what").choices == KINDS


def test_payload_change_flips_one_bit_under_a_valid_icrc():
    """An fp32 at the end of the packet becomes another number, and the ICRC is recomputed."""
    before, after = Ether(DATA), Ether(with_flipped_bit(DATA))
    assert icrc_is_right(after)
    assert after[IP].tos & 3 == 1
    ours, theirs = (bytes(frame[BTH].payload)[:64] for frame in (before, after))
    wrong = [index for index in range(64) if ours[index] != theirs[index]]
    assert wrong == [62]
    assert (ours[62] ^ theirs[62]).bit_count() == 1


def test_payload_change_spares_headers_and_padding():
    """An empty write with immediate has no data to change, and padding is not changed."""
    empty = NETWORK / BTH(opcode="RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE", dqpn=17, psn=3) / Raw(bytes(20))
    assert with_flipped_bit(bytes(empty)) is None
    assert with_flipped_bit(ACK) is not None  # never happens: the rules match data packets only
    padded = bytes(NETWORK / BTH(opcode="RC_SEND_ONLY", dqpn=17, psn=3, padcount=2) / Raw(bytes(8)))
    after = Ether(with_flipped_bit(padded))
    assert bytes(after[BTH].payload)[:8] == bytes([0, 0, 0, 0, 0x40, 0, 0, 0])
