"""The bulk decoder, `--explain` and tshark agree on every frame: opcodes, padding, FCS, ICRC, lengths."""

import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import samples
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Raw
from scapy.utils import RawPcapWriter

from faultbed.testbed.packets.bth import OPCODES
from faultbed.testbed.packets.capture_file import read
from faultbed.testbed.packets.columns import decode
from faultbed.testbed.packets.explain import explain
from faultbed.testbed.packets.layers import BTH

CAPTURES = sorted((Path(__file__).parents[3] / "data" / "captures").glob("*.pcap*"))
ETHER = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
SHORTEST = 60
"""Bytes of the shortest Ethernet frame without its FCS; the driver pads shorter ones."""
NETWORKS = {
    "IPv4": ETHER / IP(src="10.1.2.3", dst="10.3.2.1", tos=2, ttl=9),
    "IPv6": ETHER / IPv6(src="2001:db8::1", dst="2001:db8::2", tc=1, fl=77, hlim=3),
    "VLAN": ETHER / Dot1Q(vlan=7) / IP(src="10.1.2.3", dst="10.3.2.1"),
}


def frame_of(opcode, *, network="IPv4", payload=0, pad=0, fcs=False, headers=None):
    """Return a frame: headers of zeros as long as the opcode's, then payload, padding, ICRC, trailer, FCS."""
    row = OPCODES[opcode]
    body = bytes(row.extended) if headers is None else headers
    packet = UDP(sport=50000, dport=4791) / BTH(opcode=opcode, dqpn=0x123456, psn=0xABCDEF, padcount=pad)
    content = bytes(NETWORKS[network] / packet / Raw(body + bytes(payload) + bytes(pad)))
    content += bytes(max(0, SHORTEST - len(content)))
    return content + (zlib.crc32(content).to_bytes(4, "little") if fcs else b"")


def write(path, contents):
    with RawPcapWriter(str(path), linktype=1) as writer:
        writer.write_header(None)
        for content in contents:
            writer.write_packet(content)
    return path


def shown(explanation, layer, name):
    """Return a field of the innermost layer of this name."""
    return [one.fields[name] for one in explanation.layers if one.name == layer][-1]


def assert_agree(path):
    """Check every frame of a capture: `--explain` reports what the bulk decoder has in its columns."""
    frames = read(path)
    packets = decode(frames)
    at = {int(number): row for row, number in enumerate(packets.number)}
    for number in range(1, len(frames) + 1):
        explanation = explain(frames, number)
        assert explanation.icrc == ("right" if number in at else "none")
        if number in at:
            row = at[number]
            assert shown(explanation, "BTH", "psn") == str(packets.psn[row])
            assert shown(explanation, "BTH", "dqpn") == str(packets.dqpn[row])
            assert f"(0x{packets.opcode[row]:02x})" in shown(explanation, "BTH", "opcode")
            assert explanation.payload_bytes == packets.payload[row]
    return frames, packets


@settings(max_examples=samples(60), deadline=None)
@given(
    opcode=st.sampled_from(sorted(number for number, row in OPCODES.items() if row.transport != "RD")),
    network=st.sampled_from(sorted(NETWORKS)),
    payload=st.integers(0, 80),
    pad=st.integers(0, 3),
    fcs=st.booleans(),
)
def test_decoders_agree_on_padding_and_checksums(tmp_path_factory, opcode, network, payload, pad, fcs):
    path = tmp_path_factory.mktemp("capture") / "a.pcap"
    content = frame_of(opcode, network=network, payload=payload, pad=pad, fcs=fcs)
    frames, packets = assert_agree(write(path, [content]))
    explanation = explain(frames, 1)
    assert (explanation.icrc, explanation.fcs) == ("right", "right" if fcs else "none")
    assert (explanation.payload_bytes, explanation.pad_bytes) == (payload, pad)
    assert explanation.trailer_bytes == len(content) - (len(bytes(NETWORKS[network])) + 8 + 12) - (
        OPCODES[opcode].extended + payload + pad + 4
    )
    assert packets.payload.tolist() == [payload]


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name)
def test_decoders_agree_on_every_frame_of_the_recorded_captures(path):
    frames, packets = assert_agree(path)
    assert len(packets) == len(frames)


@pytest.mark.parametrize("place", [14 + 20 + 8 + 5, -1])
def test_explain_of_a_changed_byte_reports_a_wrong_icrc_also_with_trailer(tmp_path, place):
    """The ICRC is behind the payload, not at the end of the frame."""
    content = bytearray(frame_of(0x11, fcs=False))
    content[place if place > 0 else 14 + 20 + 8 + 12 + 4] ^= 1
    assert explain(read(write(tmp_path / "a.pcap", [bytes(content)])), 1).icrc == "wrong"


def tshark(path, *fields):
    argv = ["tshark", "-n", "-r", str(path), "-T", "fields", *(word for name in fields for word in ("-e", name))]
    lines = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()
    return [[None if word == "" else int(word.split(",")[-1], 0) for word in line.split("\t")] for line in lines]


FIELDS = ("bth.opcode", "bth.destqp", "bth.psn", "bth.padcnt", "aeth.msn", "reth.dmalen", "invariant.crc")


@pytest.mark.skipif(shutil.which("tshark") is None, reason="tshark is not installed")
@pytest.mark.parametrize("path", [*CAPTURES, None], ids=lambda path: path.name if path else "every opcode")
def test_decoders_agree_with_tshark(path, tmp_path):
    if path is None:
        headers = bytes(range(1, 41))
        # tshark 4.0 reads no headers of XRC, and knows neither FLUSH nor ATOMIC WRITE.
        known = [n for n, row in OPCODES.items() if row.transport in ("RC", "UC") and n & 0x1F < 0x16]
        contents = [frame_of(n, payload=9, headers=headers[: OPCODES[n].extended]) for n in known]
        path = write(tmp_path / "a.pcap", contents)
    frames = read(path)
    packets = decode(frames)
    rows = tshark(path, *(f"infiniband.{name}" for name in FIELDS))
    for row, values in enumerate(rows):
        opcode, qpn, psn, _, msn, dma_bytes, _ = values
        assert (packets.opcode[row], packets.dqpn[row], packets.psn[row]) == (opcode, qpn, psn), row
        assert packets.msn[row] == (-1 if msn is None else msn), hex(opcode)
        assert packets.dma_bytes[row] == (-1 if dma_bytes is None else dma_bytes), hex(opcode)
    assert len(rows) == len(packets)
