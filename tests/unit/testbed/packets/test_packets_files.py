"""Headers and capture files: our scapy layers, and the bulk decoder compared with scapy."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from gbn_model import go_back_n
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from samples import samples
from scapy.contrib.roce import _bth_opcodes
from scapy.layers.inet import ICMP, IP, UDP
from scapy.layers.inet6 import (
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrSegmentRouting,
    PadN,
)
from scapy.layers.ipsec import AH, ESP
from scapy.layers.l2 import ARP, GRE, Dot1Q, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Raw
from scapy.utils import PcapNgWriter, PcapWriter, RawPcapNgReader, RawPcapWriter

from faultbed.harness.packets.analysis import analyse
from faultbed.testbed.errors import UsageError
from faultbed.testbed.packets.bth import opcode_name
from faultbed.testbed.packets.capture_file import read
from faultbed.testbed.packets.columns import decode
from faultbed.testbed.packets.frames import Frames
from faultbed.testbed.packets.layers import AETH, BTH, DETH, FETH, IETH, RETH, XRCETH, AtomicAckETH, AtomicETH, ImmDt
from faultbed.testbed.packets.pcapng_writer import write_pcapng

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
feth = st.builds(FETH, selectivity=st.integers(0, 3), placement=st.integers(0, 15))
xrceth = st.builds(XRCETH, xrcsrq=u24)

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
    0x1C: (feth, reth),
    0x1D: (reth,),
    0xA1: (xrceth,),
    0xA5: (xrceth, immdt),
    0xAB: (xrceth, reth, immdt),
    0xAC: (xrceth, reth),
    0xB0: (aeth,),
    0xB2: (aeth, original),
    0xB4: (xrceth, atomic),
    0xB7: (xrceth, ieth),
    0xBC: (xrceth, feth, reth),
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


@settings(max_examples=samples(200), deadline=None)
@given(packet=packets())
def test_decode_returns_every_header_as_sent(packet):
    """After encoding and dissection the layers and fields are equal; encoded again, so are the bytes."""
    wire = bytes(packet)
    again = Ether(wire)
    want, decoded_header = packet[BTH], again[BTH]
    while want:
        assert type(decoded_header) is type(want)
        for name in want.fields:
            assert getattr(decoded_header, name) == getattr(want, name), name
        want, decoded_header = want.payload, decoded_header.payload
    assert again[BTH].icrc is not None
    assert bytes(again) == wire


def test_opcode_names_match_scapy():
    """Names are the same as scapy's, so that filters work with both."""
    # No name differs from scapy's, so its whole table is compared.
    assert {code: opcode_name(code) for code in _bth_opcodes} == dict(_bth_opcodes)


@settings(max_examples=samples(60), deadline=None)
@given(sent=st.lists(packets(), min_size=1, max_size=8), kind=st.sampled_from(["pcap", "pcapng"]))
def test_decode_agrees_with_scapy(sent, kind, tmp_path_factory):
    """The file is written by scapy, and each column is compared with scapy's fields."""
    path = tmp_path_factory.mktemp("capture") / f"some.{kind}"
    writer = PcapWriter(str(path), nano=True) if kind == "pcap" else PcapNgWriter(str(path))
    for index, packet in enumerate(sent):
        packet.time = 1_700_000_000 + index / 4
        writer.write(packet)
    writer.close()
    columns = decode(read(path))
    assert len(columns) == len(sent)
    for index, packet in enumerate(sent):
        scapy_packet = Ether(bytes(packet))
        bth = scapy_packet[BTH]
        network = scapy_packet[IP] if IP in scapy_packet else scapy_packet[IPv6]
        assert columns.time_ns[index] == 1_700_000_000_000_000_000 + index * 250_000_000
        assert columns.addresses[columns.src[index]] == network.src
        assert columns.addresses[columns.dst[index]] == network.dst
        assert columns.ecn[index] == ((network.tos if IP in scapy_packet else network.tc) & 3)
        assert columns.sport[index] == scapy_packet[UDP].sport
        assert (columns.opcode[index], columns.dqpn[index]) == (bth.opcode, bth.dqpn)
        assert (columns.psn[index], columns.ack_req[index]) == (bth.psn, bth.ackreq)
        # A READ response's AETH is read, a UD packet's headers are not.
        is_rc = bth.opcode < 0x20 or bth.opcode >= 0xA0
        assert columns.syndrome[index] == (scapy_packet[AETH].syndrome if is_rc and AETH in scapy_packet else -1)
        assert columns.msn[index] == (scapy_packet[AETH].msn if is_rc and AETH in scapy_packet else -1)
        assert columns.dma_bytes[index] == (scapy_packet[RETH].dmalen if RETH in scapy_packet else -1)
        assert columns.payload[index] == max(0, len(scapy_packet[Raw].load) - bth.padcount)
        assert columns.wire[index] == len(bytes(packet))


def test_written_pcapng_is_read_back_and_by_scapy(tmp_path):
    """Times, directions, interface names and lengths survive in the pcapng files that faultbed writes."""
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


def test_pcapng_slice_keeps_the_chosen_frames(tmp_path):
    """`order` selects the frames and their order."""
    frames = go_back_n(count=40, losses=set()).wire.frames()
    write_pcapng(tmp_path / "a.pcapng", frames, order=np.array([3, 4, 9]))
    assert read(tmp_path / "a.pcapng").time_ns.tolist() == frames.time_ns[[3, 4, 9]].tolist()


@pytest.mark.parametrize("cut", [1, 9, 30])
def test_truncated_capture_returns_its_whole_frames(tmp_path, cut):
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
def test_file_that_is_no_capture_is_refused(tmp_path, content, complaint):
    """The error names the file."""
    path = tmp_path / "x.pcap"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=complaint):
        read(path)


def test_decode_leaves_out_packets_that_are_not_roce(tmp_path):
    """These are ARP, TCP, other UDP, fragments and truncated frames."""
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


def block(kind, body, order="<"):
    size = len(body) + 12
    return struct.pack(f"{order}II", kind, size) + body + struct.pack(f"{order}I", size)


def interface(*options, order="<"):
    body = struct.pack(f"{order}HHI", 1, 0, 0)
    for code, value in (*options, (0, b"")):
        body += struct.pack(f"{order}HH", code, len(value)) + value + bytes(-len(value) % 4)
    return block(1, body, order)


def packet(content, ticks, order="<"):
    head = struct.pack(f"{order}IIIII", 0, ticks >> 32, ticks & 0xFFFFFFFF, len(content), len(content))
    return block(6, head + content + bytes(-len(content) % 4), order)


def section(order="<"):
    return block(0x0A0D0D0A, struct.pack(f"{order}IHHq", 0x1A2B3C4D, 1, 0, -1), order)


def roce(psn):
    return bytes(ETHER / IP() / UDP(sport=50000, dport=4791) / BTH(opcode=4, dqpn=1, psn=psn) / Raw(b"12345678"))


@settings(max_examples=samples(60), deadline=None)
@given(
    resolution=st.one_of(st.integers(0, 127), st.integers(128, 255)),
    offset_s=st.one_of(st.just(0), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(10**9), 10**9)),
    ticks=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=3),
    order=st.sampled_from("<>"),
)
def test_pcapng_times_of_any_resolution_are_exact_or_refused(resolution, offset_s, ticks, order, tmp_path_factory):
    """if_tsresol is a power of 10 or of 2, if_tsoffset counts seconds; what 63 bits of ns do not hold is refused."""
    path = tmp_path_factory.mktemp("capture") / "a.pcapng"
    options = (9, bytes([resolution])), (14, struct.pack(f"{order}q", offset_s))
    path.write_bytes(
        section(order) + interface(*options, order=order) + b"".join(packet(roce(1), one, order) for one in ticks)
    )
    per_s = 2 ** (resolution & 0x7F) if resolution & 0x80 else 10**resolution
    want = [one * 10**9 // per_s + offset_s * 10**9 for one in ticks]
    try:
        assert read(path).time_ns.tolist() == want
    except UsageError as error:
        assert "63 bits" in str(error)
        # The time stamp is refused if the upper half of its tick count alone exceeds 63 bits of ns.
        top = max(one | 0xFFFFFFFF for one in ticks) * 10**9 // per_s + offset_s * 10**9
        assert max(abs(top), abs(offset_s * 10**9)) >= 1 << 63


def damaged(tmp_path, content):
    path = tmp_path / "damaged.pcapng"
    path.write_bytes(content)
    analysis = analyse(read(path))
    return analysis, " ".join(analysis.doubts)


def test_pcapng_with_a_damaged_length_reports_where_and_has_a_doubt(tmp_path):
    """The damage is in the third of five packets: two packets are returned, and the doubt names the byte."""
    start, body = section() + interface(), [packet(roce(psn), psn) for psn in range(5)]
    offset = len(start) + 2 * len(body[0])
    for field, value in ((4, 0xFFFFFFFC), (4, 8), (4, 64), (4, 2 * len(body[0])), (20, 5000), (20, 0xFFFFFFFF)):
        content = bytearray(start + b"".join(body))
        content[offset + field : offset + field + 4] = struct.pack("<I", value)
        analysis, doubt = damaged(tmp_path, bytes(content))
        assert analysis.roce == 2, (field, value)
        assert f"byte {offset:,}:" in doubt


def test_pcap_with_a_damaged_length_reports_where_and_has_a_doubt(tmp_path):
    frames = [roce(psn) for psn in range(5)]
    content = bytearray(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1))
    for index, one in enumerate(frames):
        content += struct.pack("<IIII", 1, index, len(one), len(one)) + one
    offset = 24 + 2 * (16 + len(frames[0]))
    for value in (0x7FFFFFFF, 5000, len(frames[0]) + 1):
        broken = content.copy()
        broken[offset + 8 : offset + 12] = struct.pack("<I", value)
        analysis, doubt = damaged(tmp_path, bytes(broken))
        assert analysis.roce == 2
        assert f"byte {offset:,}:" in doubt


@pytest.mark.parametrize("kind", [2, 3, 0x46])
def test_pcapng_with_unsupported_packet_blocks_is_refused(tmp_path, kind):
    """Obsolete and simple packet blocks, and unknown blocks that may hold packets, must not be left out silently."""
    path = tmp_path / "a.pcapng"
    path.write_bytes(section() + interface() + block(kind, bytes(28)))
    with pytest.raises(UsageError, match=f"of type {kind}"):
        read(path)


def test_interface_of_another_section_is_refused(tmp_path):
    """The second interface is described in the next section only."""
    path = tmp_path / "a.pcapng"
    content = bytearray(packet(roce(1), 1))
    content[8:12] = struct.pack("<I", 1)
    path.write_bytes(section() + interface() + bytes(content) + section() + interface())
    with pytest.raises(UsageError, match="which has no interface block"):
        read(path)


@settings(max_examples=samples(150), deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 10_000)),
    kind=st.sampled_from(["pcap", "pcapng", "pcapng-be"]),
)
def test_reader_of_a_mutated_file_answers_or_refuses(changes, cut, kind, tmp_path_factory):
    """With any bytes changed and any cut, the result is an analysis or a UsageError, never more frames than before."""
    path = tmp_path_factory.mktemp("capture") / "a.cap"
    frames = go_back_n(count=12, losses={5}).wire.frames()
    order = ">" if kind == "pcapng-be" else "<"
    rows = [bytes(frames.data[at : at + size]) for at, size in zip(frames.start, frames.captured, strict=True)]
    if kind == "pcap":
        content = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 128, 1)
        content += b"".join(struct.pack("<IIII", 1, n, len(row), 1000) + row for n, row in enumerate(rows))
    else:
        content = section(order) + interface(order=order)
        content += b"".join(packet(row, n, order) for n, row in enumerate(rows))
    mutated = bytearray(content)
    for place, value in changes:
        mutated[place % len(mutated)] = value
    path.write_bytes(mutated if cut is None else mutated[: cut % len(mutated)])
    try:
        analysis = analyse(read(path))
    except UsageError:
        return
    if cut is not None and not changes:
        # A cut between two records cannot be detected; every other cut is a doubt.
        whole = analyse(read_bytes(path.with_suffix(".whole"), content))
        assert analysis.doubts or analysis.frames < whole.frames
    assert analysis.frames <= len(rows) or kind == "pcap"


def read_bytes(path, content):
    path.write_bytes(content)
    return read(path)


@settings(max_examples=samples(60), deadline=None)
@given(place=st.integers(0, 19), field=st.sampled_from([0, 4, 20, -4]), bit=st.integers(0, 31))
def test_reader_of_one_flipped_bit_in_a_pcapng_length_never_drops_silently(place, field, bit, tmp_path_factory):
    """One flipped bit in a block's type or lengths never drops packets silently.

    The file is rejected, in doubt, or decodes to the same packets. Type 6 (a packet) turned into 4 (name resolution)
    is excluded: such a block holds no packets.
    """
    assume((field, bit) != (0, 1))
    frames = [roce(psn) for psn in range(20)]
    start, body = section() + interface(), [packet(one, n) for n, one in enumerate(frames)]
    content = bytearray(start + b"".join(body))
    begin = len(start) + sum(map(len, body[:place]))
    at = begin + field if field >= 0 else begin + len(body[place]) + field
    (word,) = struct.unpack_from("<I", content, at)
    struct.pack_into("<I", content, at, word ^ 1 << bit)
    try:
        analysis = analyse(read_bytes(tmp_path_factory.mktemp("capture") / "a.pcapng", bytes(content)))
    except UsageError:
        return
    assert analysis.doubts or analysis.roce == len(frames)


@pytest.mark.parametrize("snap", [13, 33, 41, 48, 53, 57, 65])
def test_frames_cut_before_their_headers_end_are_a_doubt(tmp_path, snap):
    """A snap length below 70 may hide fields that the rules need: the syndrome of a NAK, the length of a READ."""
    frames = go_back_n(count=40, losses={7}).wire.frames(snap=snap)
    assert analyse(frames).doubts
    assert any("cut before" in doubt for doubt in analyse(frames).doubts) or analyse(frames).roce == 0
    assert analyse(go_back_n(count=40, losses={7}).wire.frames(snap=70)).doubts == ()


def test_empty_capture_proves_nothing(tmp_path):
    frames = go_back_n(count=40, losses=set()).wire.frames()
    write_pcapng(tmp_path / "a.pcapng", frames, order=np.array([], dtype=np.int64))
    analysis = analyse(read(tmp_path / "a.pcapng"))
    assert (analysis.violations, analysis.doubts) == (0, ("the capture has no frames",))


def test_packets_that_are_roce_and_not_decoded_are_a_doubt(tmp_path):
    """A fragment is missing for the rules, and was never looked at."""
    roce = UDP(sport=50000, dport=4791) / BTH(opcode=4, dqpn=1, psn=1) / Raw(b"12345678")
    others = [
        ETHER / IP(frag=0, flags="MF") / roce,
        ETHER / IPv6() / IPv6ExtHdrFragment(m=1) / roce,
        ETHER / IPv6() / IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt() / IPv6ExtHdrFragment(m=1) / roce,
        Ether(bytes(ETHER / Dot1Q(vlan=1) / IP(flags="MF") / roce)),
    ]
    quiet = [
        ETHER / IP(flags="MF") / UDP(dport=53) / Raw(bytes(40)),
        ETHER / IP(frag=100, flags="MF") / UDP(dport=4791) / Raw(bytes(40)),
        ETHER / IPv6() / IPv6ExtHdrFragment(offset=8) / UDP(dport=4791) / Raw(bytes(40)),
        ETHER / IPv6() / IPv6ExtHdrFragment(offset=8) / IPv6ExtHdrDestOpt() / UDP(dport=4791) / Raw(bytes(40)),
        ETHER / IPv6() / IPv6ExtHdrHopByHop(options=[PadN(optdata=bytes(4))]) / Raw(bytes(40)),
        ETHER / IPv6() / IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt() / UDP(dport=53) / Raw(bytes(40)),
    ]
    path = tmp_path / "a.pcap"
    with PcapWriter(str(path)) as writer:
        for packet in (ETHER / IP() / roce, *others, *quiet):
            writer.write(packet)
    assert decode(read(path)).not_decoded == len(others)
    analysis = analyse(read(path))
    assert (analysis.roce, analysis.violations) == (1, 0)
    assert any("4 RoCEv2 packets are fragments" in doubt for doubt in analysis.doubts)


OPTIONS = [PadN(optdata=bytes(12))]
CHAINS = {
    "one": IPv6ExtHdrHopByHop(),
    "two": IPv6ExtHdrHopByHop(options=OPTIONS) / IPv6ExtHdrDestOpt(),
    "three": IPv6ExtHdrHopByHop()
    / IPv6ExtHdrDestOpt(options=OPTIONS)
    / IPv6ExtHdrSegmentRouting(addresses=["::1"] * 2),
    "a fragment that is the whole packet": IPv6ExtHdrDestOpt() / IPv6ExtHdrFragment(offset=0, m=0),
    "authentication": IPv6ExtHdrDestOpt() / AH(nh=17, payloadlen=4, icv=bytes(12)),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_packets_behind_extension_headers_of_ipv6_are_decoded(tmp_path, chain):
    """Behind two of them a packet was neither decoded nor counted: what it broke was never seen."""
    ip = IPv6(src="2001:db8::1", dst="2001:db8::2", tc=1)
    nak = bytes(BTH(opcode=0x11, dqpn=9, psn=7))[:12] + bytes([0x60, 0, 0, 5]) + bytes(8)
    bare = UDP(sport=50000, dport=4791) / Raw(nak)
    path = tmp_path / "a.pcap"
    with PcapWriter(str(path)) as writer:
        for packet in (ETHER / ip / bare, ETHER / ip / chain / bare):
            writer.write(packet)
    columns = decode(read(path))
    assert (len(columns), columns.cut, columns.not_decoded, columns.hidden) == (2, 0, 0, {})
    assert (columns.psn.tolist(), columns.dqpn.tolist(), columns.ecn.tolist()) == ([7, 7], [9, 9], [1, 1])
    assert (columns.syndrome.tolist(), columns.msn.tolist()) == ([0x60] * 2, [5, 5])
    assert columns.payload[0] == columns.payload[1]
    assert columns.sport.tolist() == [50000, 50000]


def test_frames_that_end_between_extension_headers_or_vlan_tags_are_cut(tmp_path):
    chain = ETHER / IPv6() / CHAINS["three"] / UDP(dport=4791) / Raw(bytes(40))
    tagged = bytes(ETHER / IP() / UDP(dport=4791) / Raw(bytes(40)))
    tagged = Ether(tagged[:12] + b"\x81\x00\x00\x05" * 6 + tagged[12:])
    for packet, snaps in ((chain, (55, 60, 64, 80)), (tagged, (17, 18, 30, 38))):
        for snap in snaps:
            path = tmp_path / f"{snap}.pcap"
            with RawPcapWriter(str(path), linktype=1) as writer:
                writer.write_header(None)
                writer.write_packet(bytes(packet)[:snap], wirelen=len(packet))
            columns = decode(read(path))
            assert (len(columns), columns.cut, columns.not_decoded) == (0, 1, 0), snap


ROCE = UDP(sport=50000, dport=4791) / BTH(opcode=4, dqpn=1, psn=1) / Raw(b"12345678")


INNER = bytes(ETHER / IP() / ROCE)
AROUND = {
    "LLC and SNAP": INNER[:12] + b"\x00\x50\xaa\xaa\x03\x00\x00\x00" + INNER[12:],
    "EDSA tag of a switch": INNER[:12] + b"\xda\xda\x00\x00\x40\x00\x00\x00" + INNER[12:],
    "Cisco metadata": INNER[:12] + b"\x89\x09\x01\x01\x00\x01\x00\x07" + INNER[12:],
    "TRILL": INNER[:12] + b"\x22\xf3\x00\x3f\x00\x01\x00\x02" + INNER,
    "NSH": INNER[:12] + b"\x89\x4f\x0f\xc6\x01\x03\x00\x00\x01\xff" + bytes(16) + INNER,
    "GTP-U": bytes(ETHER / IP() / UDP(dport=2152) / Raw(b"\x30\xff\x00\x40\x00\x00\x00\x01" + INNER[14:])),
    "sFlow": bytes(ETHER / IP() / UDP(dport=6343) / Raw(bytes(28 + 56) + INNER)),
}
"""Real encapsulations that no table lists, by name."""


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("is_last", [False, True])
def test_roce_in_an_unlisted_encapsulation_is_a_doubt(tmp_path, name, is_last):
    """A flow inside GTP-U, beside a good flow, was "no rule of go-back-N is broken"."""
    dns = bytes(ETHER / IP() / UDP(sport=4789, dport=53) / Raw(bytes(200)))
    icmp = bytes(ETHER / IP() / ICMP(type=3, code=3) / Raw(INNER[14:]))
    frames = [INNER, dns, icmp, bytes(ETHER / ARP()), AROUND[name], *([] if is_last else [dns])]
    path = tmp_path / "a.pcap"
    with PcapWriter(str(path)) as writer:
        for frame in frames:
            writer.write(Ether(frame))
    analysis = analyse(read(path))
    assert analysis.roce == 1
    (doubt,) = (doubt for doubt in analysis.doubts if "is not decoded" in doubt)
    assert doubt.startswith("1 frames may hold RoCEv2 that is not decoded (1 in an encapsulation that is not known)")


def test_frames_cut_within_the_roce_port_of_an_unlisted_encapsulation_are_no_doubt(tmp_path):
    path = tmp_path / "a.pcap"
    frame = AROUND["GTP-U"]
    cut = frame.index(b"\x12\xb7") + 1
    with RawPcapWriter(str(path), linktype=1) as writer:
        writer.write_header(None)
        writer.write_packet(frame[:cut], wirelen=len(frame))
        writer.write_packet(b"\x12\xb7" * 40)
    assert decode(read(path)).hidden == {}


def test_encrypted_frames_are_a_doubt_that_names_each(tmp_path):
    """RoCEv2 in them is neither decoded nor missed by anything else that is counted."""
    hiding = {
        "Geneve with an unknown payload": ETHER / IPv6() / IPv6ExtHdrDestOpt() / UDP(dport=6081) / Raw(bytes(60)),
        "IPsec": ETHER / IP() / ESP(spi=1, seq=1, data=bytes(60)),
        "MPLS": Ether(bytes(ETHER)[:12] + b"\x88\x47" + bytes(60)),
        "MACsec": Ether(bytes(ETHER)[:12] + b"\x81\x00\x00\x05\x88\xe5" + bytes(60)),
        "GRE of another version": ETHER / IP() / GRE(version=1) / Raw(bytes(40)),
        "GRE with protocol 0x1234": ETHER / IP() / GRE(proto=0x1234) / Raw(bytes(40)),
    }
    authenticated = ETHER / IP(proto=51) / AH(nh=17, payloadlen=4, icv=bytes(12)) / ROCE
    plain = [ETHER / IP() / ROCE, ETHER / IP() / UDP(sport=4789, dport=53) / Raw(bytes(40)), ETHER / ARP()]
    path = tmp_path / "a.pcap"
    with PcapWriter(str(path)) as writer:
        for packet in (*plain, *hiding.values(), authenticated):
            writer.write(packet)
    assert decode(read(path)).hidden == {name: 1 + (name == "IPsec") for name in hiding}
    analysis = analyse(read(path))
    assert (analysis.roce, analysis.violations) == (1, 0)
    (doubt,) = (doubt for doubt in analysis.doubts if "is not decoded" in doubt)
    assert doubt.startswith("7 frames")
    assert all(name in doubt for name in hiding)


def erspan(inner, *, version):
    """Return a GRE packet that mirrors a frame as ERSPAN of type I, II or III."""
    header = {1: b"", 2: b"\x10\x00" + bytes(6), 3: b"\x20\x00" + bytes(10)}[version]
    gre = GRE(proto=0x22EB if version == 3 else 0x88BE, seqnum_present=int(version > 1), sequence_number=7)
    return ETHER / IP() / gre / Raw(header + bytes(inner))


def tunnels():
    """Return a frame around the same RoCEv2 packet for each tunnel and mirror that is decoded."""
    frame, v6 = ETHER / IP(src="10.1.1.1", dst="10.1.1.2") / ROCE, ETHER / IPv6(src="fd00::1", dst="fd00::2") / ROCE
    packet = IP(bytes(frame)[14:])
    vlan = Ether(bytes(frame)[:12] + b"\x88\xa8\x00\x05\x81\x00\x00\x07" + bytes(frame)[12:])
    return {
        "vxlan": (ETHER / IP() / UDP(dport=4789) / VXLAN(vni=7) / frame, frame),
        "vxlan over IPv6": (ETHER / IPv6() / UDP(dport=4789) / VXLAN(vni=7) / v6, v6),
        "vxlan with QinQ inside": (ETHER / IP() / UDP(dport=4789) / VXLAN(vni=7) / vlan, vlan),
        "geneve with options": (
            ETHER / IP() / UDP(dport=6081) / Raw(b"\x02\x00\x65\x58" + bytes(4) + bytes(8) + bytes(frame)),
            frame,
        ),
        "gre": (ETHER / IP() / GRE() / packet, packet),
        "gre with key and checksum": (ETHER / IP() / GRE(key_present=1, chksum_present=1) / packet, packet),
        "nvgre": (ETHER / IP() / GRE(proto=0x6558, key_present=1) / frame, frame),
        "ip in ip": (ETHER / IP() / packet, packet),
        "erspan 1": (erspan(frame, version=1), frame),
        "erspan 2": (erspan(frame, version=2), frame),
        "erspan 3": (erspan(frame, version=3), frame),
        "everflow on mellanox": (ETHER / IP() / GRE(proto=0x8949) / Raw(bytes(22) + bytes(frame)), frame),
        "two tunnels": (ETHER / IP() / GRE() / IP() / UDP(dport=4789) / VXLAN() / frame, frame),
    }


@pytest.mark.parametrize("name", tunnels())
def test_decode_packet_in_a_tunnel_is_the_same_as_outside(tmp_path, name):
    outer, inner = tunnels()[name]
    link = 1 if isinstance(inner, Ether) else 101
    found = []
    for number, (packet, linktype) in enumerate(((outer, 1), (inner, link))):
        path = tmp_path / f"{number}.pcap"
        with PcapWriter(str(path), linktype=linktype) as writer:
            writer.write(packet)
        found.append(decode(read(path)))
    around, bare = found
    assert (len(around), around.hidden, around.cut) == (1, {}, 0)
    assert around.addresses == bare.addresses
    for field in ("sport", "opcode", "dqpn", "psn", "payload", "wire", "ecn"):
        assert getattr(around, field).tolist() == getattr(bare, field).tolist(), field


LINKS = {
    "cooked": (113, bytes(14) + b"\x08\x00"),
    "cooked with a VLAN tag": (113, bytes(14) + b"\x81\x00\x00\x05\x08\x00"),
    "cooked 2": (276, b"\x08\x00" + bytes(18)),
    "cooked 2 with a VLAN tag": (276, b"\x81\x00" + bytes(18) + b"\x00\x05\x08\x00"),
    "raw": (101, b""),
    "raw of BSD": (12, b""),
    "IPv4": (228, b""),
    "loopback": (108, b"\x02\x00\x00\x00"),
    "ERF": (197, bytes(8) + b"\x02" + bytes(7) + bytes(2) + bytes(12) + b"\x08\x00"),
    "ERF with extension headers": (
        197,
        bytes(8) + b"\x82" + bytes(7) + b"\x80" + bytes(7) + bytes(8) + bytes(2) + bytes(12) + b"\x08\x00",
    ),
    "ERF with IP": (197, bytes(8) + b"\x16" + bytes(7)),
}


@pytest.mark.parametrize("name", LINKS)
def test_decode_reads_the_link_types_of_tcpdump_and_ibdump(tmp_path, name):
    linktype, header = LINKS[name]
    path = tmp_path / "a.pcap"
    packet = bytes(IP(src="10.1.1.1", dst="10.1.1.2") / ROCE)
    with RawPcapWriter(str(path), linktype=linktype) as writer:
        writer.write_header(None)
        writer.write_packet(header + packet)
    columns = decode(read(path))
    assert (len(columns), columns.cut, columns.hidden) == (1, 0, {})
    assert (columns.psn.tolist(), columns.addresses) == ([1], ("10.1.1.1", "10.1.1.2"))


def test_read_other_link_type_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "a.pcap"
    with RawPcapWriter(str(path), linktype=127) as writer:
        writer.write_header(None)
        writer.write_packet(bytes(60))
    with pytest.raises(UsageError, match=r"link type 127 \(IEEE 802.11 with a radio header\) .*`tcpdump -i any`"):
        read(path)


@pytest.mark.parametrize(("link", "hidden"), [(127, True), (220, False)])
def test_read_pcapng_with_another_interface_of_another_type_is_read(tmp_path, link, hidden):
    """Frames of a radio may hold RoCEv2 and are a doubt; those of USB cannot."""
    content = bytes(ETHER / IP() / ROCE)
    frames = Frames(
        data=np.frombuffer(content * 2 + bytes(128), dtype=np.uint8),
        start=np.array([0, len(content)]),
        captured=np.full(2, len(content)),
        length=np.full(2, len(content)),
        time_ns=np.array([1, 2]),
        interface=np.array([0, 1], dtype=np.int16),
        outbound=np.full(2, -1, dtype=np.int8),
        interfaces=("eth0", "other"),
        link_types=np.array([1, link]),
    )
    write_pcapng(tmp_path / "a.pcapng", frames)
    columns = decode(read(tmp_path / "a.pcapng"))
    assert (len(columns), bool(columns.hidden)) == (1, hidden)


@pytest.mark.parametrize("tags", [1, 2, 4, 5, 12])
def test_packets_behind_several_vlan_tags_are_decoded(tmp_path, tags):
    content = bytes(ETHER / IP() / UDP(sport=50000, dport=4791) / BTH(opcode=4, dqpn=1, psn=7) / Raw(b"12345678"))
    tagged = content[:12] + b"\x91\x00\x00\x05" + b"\x81\x00\x00\x07" * (tags - 1) + content[12:]
    with PcapWriter(str(tmp_path / "a.pcap")) as writer:
        writer.write(Ether(tagged))
    assert decode(read(tmp_path / "a.pcap")).psn.tolist() == [7]


@pytest.mark.parametrize("order", ["<", ">"])
def test_pcapng_whose_statistics_count_dropped_frames_has_a_doubt(tmp_path, order):
    """A dropped frame looks like a packet that the sender skipped, or hides a NAK. Statistics blocks hold totals."""

    def statistics(number, *options):
        body = struct.pack(f"{order}III", number, 0, 0)
        for code, value in (*options, (0, b"")):
            body += struct.pack(f"{order}HH", code, len(value)) + value + bytes(-len(value) % 4)
        return block(5, body, order)

    def count(code, frames):
        return code, struct.pack(f"{order}Q", frames)

    head = section(order) + interface(order=order) * 2 + packet(roce(1), 1, order)
    path = tmp_path / "a.pcapng"
    path.write_bytes(head + statistics(0, count(4, 1), count(5, 0)) + statistics(1, count(7, (1 << 64) - 1)))
    assert read(path).dropped == 0
    path.write_bytes(
        head
        + statistics(0, count(5, 3))
        + statistics(0, count(5, 4), count(7, 2))
        + statistics(1, (7, b""), count(5, 1))
    )
    assert read(path).dropped == 7
    assert any("7 frames were dropped" in doubt for doubt in analyse(read(path)).doubts)


def test_host_port_with_one_direction_alone_has_a_doubt_beside_a_port_with_both():
    """The responses of that port were not checked, although those of the other port are correct."""
    both, one = (go_back_n(count=40, losses={7}).wire for _ in range(2))
    one.packets = [packet for packet in one.packets if packet[2] == one.packets[0][2]]
    frames, ports = both.frames(), len(both.packets) + len(one.packets)
    both.packets += one.packets
    joined = replace(
        both.frames(),
        interface=np.repeat([0, 1], [len(frames), ports - len(frames)]).astype(np.int16),
        interfaces=("rtsw2:host4:rxe0", "rtsw2:host3:rxe0"),
        link_types=np.array([1, 1], dtype=np.int64),
    )
    analysis = analyse(joined)
    assert analysis.violations == 0
    assert analysis.doubts == (
        "rtsw2:host3:rxe0: all packets left the port towards the host: responses were not checked there",
    )
    assert analyse(frames).doubts == ()
