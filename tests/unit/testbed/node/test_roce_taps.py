"""The kernel's filter for RoCEv2 packets agrees with the decoder of captures, on sockets that need no privilege."""

from __future__ import annotations

import os
import socket

import pytest
from scapy.contrib.mpls import MPLS
from scapy.contrib.roce import BTH
from scapy.layers.inet import GRE, ICMP, IP, TCP, UDP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether
from scapy.layers.vxlan import VXLAN

from faultbed.testbed.node.in_use.roce_taps import RoceTaps, attach_filter, seen

ROCE = UDP(sport=49152, dport=4791) / BTH(opcode=4, psn=7, dqpn=17) / bytes(64)
PLAIN = Ether() / IP(src="10.0.0.1", dst="10.0.0.2")
ROCE_FRAMES = {
    "IPv4": PLAIN / ROCE,
    "IPv4 with options": Ether() / IP(options=[b"\x07\x07\x04\0\0\0\0\0"]) / ROCE,
    "IPv6": Ether() / IPv6(src="fe80::1", dst="fe80::2") / ROCE,
    "VLAN": Ether() / Dot1Q(vlan=7) / IP() / ROCE,
    "VLAN and IPv6": Ether() / Dot1Q(vlan=7) / IPv6() / ROCE,
    "QinQ": Ether() / Dot1AD(vlan=3) / Dot1Q(vlan=7) / IP() / ROCE,
    "three tags": Ether() / Dot1AD(vlan=3) / Dot1Q(vlan=7) / Dot1Q(vlan=8) / IP() / ROCE,
    "first fragment": Ether() / IP(flags="MF") / ROCE,
}
HIDING_FRAMES = {
    "four tags": Ether() / Dot1Q() / Dot1Q() / Dot1Q() / Dot1Q() / IP() / ROCE,
    "MPLS": Ether(type=0x8847) / MPLS(label=3) / IP() / ROCE,
    "GRE": PLAIN / GRE() / IP() / ROCE,
    "IP in IP": PLAIN / IP() / ROCE,
    "VXLAN": PLAIN / UDP(dport=4789) / VXLAN() / Ether() / IP() / ROCE,
    "Geneve": PLAIN / UDP(dport=6081) / bytes(40),
    "IPsec": Ether() / IP(proto=50) / bytes(40),
    "fragment header": Ether() / IPv6() / IPv6ExtHdrFragment(nh=17, m=1) / ROCE,
}
OTHER_FRAMES = {
    "TCP": PLAIN / TCP(dport=4791),
    "TCP from that port": PLAIN / TCP(sport=4791, dport=179),
    "UDP from that port": PLAIN / UDP(sport=4791, dport=3784) / bytes(24),
    "ICMP": PLAIN / ICMP() / IP() / ROCE,
    "ARP": Ether() / ARP(),
    "LLDP": Ether(type=0x88CC) / bytes(60),
    "later fragment": Ether() / IP(frag=100, proto=17) / (b"\x12\xb7" * 40),
    "cut": bytes(PLAIN / ROCE)[:36],
    "empty": b"\0",
}


@pytest.fixture
def tap():
    """A pair of datagram sockets: what is sent to the first one is read from the second one, behind the filter."""
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.settimeout(0)
    attach_filter(receiver)
    with sender, receiver:
        yield sender, receiver


def of(tap, *frames):
    sender, receiver = tap
    for frame in frames:
        sender.send(bytes(frame), socket.MSG_DONTWAIT)
    return seen(receiver)


@pytest.mark.parametrize("name", ROCE_FRAMES)
def test_roce_packet_is_seen_behind_tags_options_and_other_frames(tap, name):
    assert of(tap, *OTHER_FRAMES.values(), ROCE_FRAMES[name], *HIDING_FRAMES.values()) is True


@pytest.mark.parametrize("name", HIDING_FRAMES)
def test_frame_that_may_hide_a_roce_packet_is_unknown(tap, name):
    assert of(tap, *OTHER_FRAMES.values(), HIDING_FRAMES[name]) is None


@pytest.mark.parametrize("name", OTHER_FRAMES)
def test_other_frames_are_none(tap, name):
    assert of(tap, OTHER_FRAMES[name]) is False


def test_roce_packet_after_many_hiding_frames_is_never_absent(tap):
    """The buffer is full of frames that may hide a packet: the packet is dropped, and nothing says that none came."""
    sender, receiver = tap
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    try:
        while True:
            sender.send(bytes(HIDING_FRAMES["GRE"]), socket.MSG_DONTWAIT)
    except BlockingIOError:
        pass
    assert seen(receiver) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="packet sockets need root")
class TestOnThePortOfThisMachine:
    def test_packet_of_another_program_is_noticed(self):
        taps = RoceTaps({"here": (None, "lo")})
        try:
            assert taps.seen() == {"here": False}
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.sendto(bytes(40), ("127.0.0.1", 4791))
            assert taps.seen() == {"here": True}
        finally:
            taps.close()

    def test_port_that_does_not_exist_is_an_error(self):
        with pytest.raises(OSError, match="No such device"):
            RoceTaps({"here": (None, "lo"), "there": (None, "no-such-port")})
