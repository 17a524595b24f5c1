"""Headers and capture files: scapy's layers completed, and the bulk decoder against scapy."""

import struct

import numpy as np
import pytest
from gbn_model import go_back_n
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.contrib.roce import _bth_opcodes
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Raw
from scapy.utils import PcapNgWriter, PcapWriter, RawPcapNgReader

from harness.packets.analysis import analyse
from testbed.errors import UsageError
from testbed.packets.bth import opcode_name
from testbed.packets.capture_file import read, write_pcapng
from testbed.packets.columns import decode
from testbed.packets.layers import AETH, BTH, DETH, IETH, RETH, AtomicAckETH, AtomicETH, ImmDt

# Without addresses, scapy would ask the network for them.
ETHER = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
u32, u64, u24, u8 = (st.integers(0, 2**bits - 1) for bits in (32, 64, 24, 8))
payloads = st.binary(min_size=1, max_size=64)
reth = st.builds(RETH, va=u64, rkey=u32, dmalen=u32)
aeth = st.builds(AETH, syndrome=u8, msn=u24)
immdt = st.builds(ImmDt, immdt=u32)
atomic = st.builds(AtomicETH, va=u64, rkey=u32, swap=u64, compare=u64)
original = st.builds(AtomicAckETH, orig=u64)
deth = st.builds(DETH, qkey=u32, sqpn=u24)
ieth = st.builds(IETH, rkey=u32)

STACKS = {
    0x03: (immdt,),
    0x04: (),
    0x05: (immdt,),
    0x06: (reth,),
    0x07: (),
    0x09: (immdt,),
    0x0A: (reth,),
    0x0B: (reth, immdt),
    0x0C: (reth,),
    0x0D: (aeth,),
    0x0E: (),
    0x0F: (aeth,),
    0x10: (aeth,),
    0x11: (aeth,),
    0x12: (aeth, original),
    0x13: (atomic,),
    0x14: (atomic,),
    0x16: (ieth,),
    0x17: (ieth,),
    0x26: (reth,),
    0x2B: (reth, immdt),
    0x64: (deth,),
    0x65: (deth, immdt),
}


@st.composite
def packets(draw):
    opcode = draw(st.sampled_from(sorted(STACKS)))
    bth = BTH(
        opcode=opcode, dqpn=draw(u24), psn=draw(u24), ackreq=draw(st.integers(0, 1)), padcount=draw(st.integers(0, 3))
    )
    network = draw(
        st.sampled_from([IP(src="10.1.2.3", dst="10.3.2.1", tos=3), IPv6(src="2001:db8::1", dst="2001:db8::2", tc=1)])
    )
    tag = draw(st.sampled_from([None, Dot1Q(vlan=7)]))
    stack = ETHER / tag / network if tag else ETHER / network
    stack = stack / UDP(sport=draw(st.integers(0xC000, 0xFFFF)), dport=4791) / bth
    for header in STACKS[opcode]:
        stack /= draw(header)
    return stack / Raw(draw(payloads))


@settings(max_examples=200, deadline=None)
@given(packet=packets())
def test_every_header_comes_back_as_it_was_sent(packet):
    """Built, dissected, the same layers with the same fields; and built again, the same bytes."""
    wire = bytes(packet)
    again = Ether(wire)
    want, got = packet[BTH], again[BTH]
    while want:
        assert type(got) is type(want)
        for name in want.fields:
            assert getattr(got, name) == getattr(want, name), name
        want, got = want.payload, got.payload
    assert again[BTH].icrc is not None
    assert bytes(again) == wire


def test_opcodes_have_the_names_that_scapy_gives_them():
    """One vocabulary, so that a filter written for one works with the other."""
    # scapy has no name for reliable datagrams' bare headers that would differ, so all of its table is compared.
    assert {code: opcode_name(code) for code in _bth_opcodes} == dict(_bth_opcodes)


@settings(max_examples=60, deadline=None)
@given(sent=st.lists(packets(), min_size=1, max_size=8), kind=st.sampled_from(["pcap", "pcapng"]))
def test_the_bulk_decoder_reads_what_scapy_reads(sent, kind, tmp_path_factory):
    """Column by column against scapy, out of a file that scapy wrote."""
    path = tmp_path_factory.mktemp("capture") / f"some.{kind}"
    writer = PcapWriter(str(path), nano=True) if kind == "pcap" else PcapNgWriter(str(path))
    for index, packet in enumerate(sent):
        packet.time = 1_700_000_000 + index / 4
        writer.write(packet)
    writer.close()
    columns = decode(read(path))
    assert len(columns) == len(sent)
    for index, packet in enumerate(sent):
        seen = Ether(bytes(packet))
        bth = seen[BTH]
        network = seen[IP] if IP in seen else seen[IPv6]
        assert columns.time_ns[index] == 1_700_000_000_000_000_000 + index * 250_000_000
        assert columns.addresses[columns.src[index]] == network.src
        assert columns.addresses[columns.dst[index]] == network.dst
        assert columns.ecn[index] == ((network.tos if IP in seen else network.tc) & 3)
        assert columns.sport[index] == seen[UDP].sport
        assert (columns.opcode[index], columns.dqpn[index]) == (bth.opcode, bth.dqpn)
        assert (columns.psn[index], columns.ack_req[index]) == (bth.psn, bth.ackreq)
        # A READ response's AETH is read, a UD packet's headers are not.
        is_rc = bth.opcode < 0x20
        assert columns.syndrome[index] == (seen[AETH].syndrome if is_rc and AETH in seen else -1)
        assert columns.msn[index] == (seen[AETH].msn if is_rc and AETH in seen else -1)
        assert columns.dma_bytes[index] == (seen[RETH].dmalen if is_rc and RETH in seen else -1)
        assert columns.payload[index] == max(0, len(seen[Raw].load) - bth.padcount)
        assert columns.wire[index] == len(bytes(packet))


def test_our_own_file_comes_back_and_scapy_reads_it(tmp_path):
    """Times, directions, interface name and lengths of pcapng as we write it."""
    frames = go_back_n(count=40, losses={7}).wire.frames()
    path = tmp_path / "a.pcapng"
    write_pcapng(path, frames, comment="rtsw2 says hello")
    back = read(path)
    assert back.interfaces == frames.interfaces
    for name in ("time_ns", "length", "captured", "outbound", "interface"):
        assert np.array_equal(getattr(back, name), getattr(frames, name)), name
    assert analyse(back) == analyse(frames)
    with RawPcapNgReader(str(path)) as reader:
        raw = list(reader)
    assert len(raw) == len(frames)
    assert [len(data) for data, _ in raw] == frames.captured.tolist()
    assert [meta.wirelen for _, meta in raw] == frames.length.tolist()


def test_a_slice_keeps_what_was_chosen(tmp_path):
    """`order` picks frames."""
    frames = go_back_n(count=40, losses=set()).wire.frames()
    write_pcapng(tmp_path / "a.pcapng", frames, order=np.array([3, 4, 9]))
    assert read(tmp_path / "a.pcapng").time_ns.tolist() == frames.time_ns[[3, 4, 9]].tolist()


@pytest.mark.parametrize("cut", [1, 9, 30])
def test_a_file_that_was_cut_gives_what_is_whole(tmp_path, cut):
    """A capture whose writer was killed: all frames but the last."""
    frames = go_back_n(count=20, losses=set()).wire.frames()
    path = tmp_path / "a.pcapng"
    write_pcapng(path, frames)
    path.write_bytes(path.read_bytes()[:-cut])
    assert len(read(path)) == len(frames) - 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "neither pcap nor pcapng"),
        (b"hello, this is no capture at all", "neither pcap nor pcapng"),
        (struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 96, 105), "link type 105"),
    ],
)
def test_what_is_no_capture_is_refused_in_a_sentence(tmp_path, content, complaint):
    """With the file's name."""
    path = tmp_path / "x.pcap"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=complaint):
        read(path)


def test_what_is_no_roce_is_left_out(tmp_path):
    """ARP, TCP, other UDP, fragments and cut frames."""
    path = tmp_path / "x.pcap"
    writer = PcapWriter(str(path))
    roce = ETHER / IP() / UDP(sport=50000, dport=4791) / BTH(opcode=4, dqpn=1, psn=1) / Raw(b"12345678")
    for packet in (
        ETHER / IP() / UDP(dport=53) / Raw(b"x" * 40),
        ETHER / IP(frag=100) / UDP(dport=4791) / Raw(b"x" * 40),
        Ether(bytes(roce)[:50]),
        Ether(b"\x00" * 14),
        roce,
    ):
        writer.write(packet)
    writer.close()
    assert decode(read(path)).number.tolist() == [5]
