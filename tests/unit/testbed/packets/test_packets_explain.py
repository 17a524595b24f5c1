"""Explanation of one captured frame: every header with its fields, and whether the ICRC is correct."""

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner
from gbn_model import NAK, Wire, go_back_n
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.packet import Raw
from scapy.utils import PcapWriter

from faultbed.harness.cli.main import cli
from faultbed.testbed.errors import UsageError
from faultbed.testbed.packets.capture_file import read
from faultbed.testbed.packets.explain import explain
from faultbed.testbed.packets.layers import AETH, BTH, RETH
from faultbed.testbed.packets.pcapng_writer import write_pcapng

ETHER = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
WRITE = ETHER / IP(src="10.1.2.3", dst="10.3.2.1") / UDP(sport=50000, dport=4791) / BTH(opcode=0x0A, dqpn=17, psn=5)
WRITE = WRITE / RETH(va=4096, rkey=7, dmalen=64) / Raw(bytes(64))


def written(tmp_path, *contents):
    path = tmp_path / "a.pcap"
    writer = PcapWriter(str(path))
    for each in contents:
        writer.write(each)
    writer.close()
    return path


def fields_of(explanation, name):
    (layer,) = (layer for layer in explanation.layers if layer.name == name)
    return layer.fields


def test_explain_names_every_header_and_its_fields(tmp_path):
    explanation = explain(read(written(tmp_path, ETHER / IP() / UDP(dport=53), WRITE)), 2)
    assert [layer.name for layer in explanation.layers] == ["Ethernet", "IP", "UDP", "BTH", "RETH"]
    bth = fields_of(explanation, "BTH")
    assert (bth["opcode"], bth["dqpn"], bth["psn"]) == ("RC_RDMA_WRITE_ONLY (0x0a)", "17", "5")
    assert fields_of(explanation, "RETH")["dmalen"] == "64"
    assert (explanation.payload_bytes, explanation.icrc) == (64, "right")


@pytest.mark.parametrize("place", [43, 53, 60, 90, -1])
def test_explain_of_a_damaged_frame_reports_a_wrong_icrc(tmp_path, place):
    """One bit flips in the BTH, the PSN, the RETH, the payload or the ICRC itself."""
    content = bytearray(bytes(WRITE))
    content[place] ^= 0x10
    assert explain(read(written(tmp_path, bytes(content))), 1).icrc == "wrong"


def test_explain_of_a_truncated_frame_leaves_the_icrc_unknown(tmp_path):
    wire = go_back_n(count=4, losses=set()).wire
    write_pcapng(tmp_path / "a.pcapng", wire.frames(snap=70))
    explanation = explain(read(tmp_path / "a.pcapng"), 1)
    assert (explanation.icrc, explanation.captured, explanation.outbound) == ("not captured", 70, True)


@pytest.mark.parametrize(
    ("syndrome", "words"),
    [(0x1F, "ACK, credit code 31"), (0x2E, "RNR NAK, timer 1.28 ms"), (NAK, "NAK, PSN sequence error")],
)
def test_explain_names_the_meaning_of_a_syndrome(tmp_path, syndrome, words):
    wire = Wire()
    wire.request(0, 1)
    wire.response(10, 1, syndrome)
    explanation = explain(wire.frames(), 2)
    assert fields_of(explanation, AETH().name)["syndrome"] == f"0x{syndrome:02x}, {words}"


def test_explain_of_a_frame_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="give a number from 1 to 2"):
        explain(Wire(packets=[(0, bytes(60), True), (1, bytes(60), True)]).frames(), 3)


def test_explain_of_any_bytes_never_raises_unexpectedly():
    """Random bytes, cut anywhere, are explained or refused."""
    rng = np.random.default_rng(5)
    for size in range(1, 130):
        content = bytearray(bytes(WRITE)[:size])
        content[rng.integers(size)] ^= int(rng.integers(1, 256))
        frames = Wire(packets=[(0, bytes(content), True)]).frames()
        if size < 14:
            with pytest.raises(UsageError, match="within the first header"):
                explain(frames, 1)
        else:
            explain(frames, 1)


def test_command_explains_a_frame_and_ends_with_1_for_a_wrong_icrc(tmp_path):
    broken = bytearray(bytes(WRITE))
    broken[-1] ^= 1
    path = written(tmp_path, WRITE, bytes(broken))
    done = CliRunner().invoke(cli, ["packets", str(path), "--explain", "1"], standalone_mode=False)
    assert done.return_value == 0
    assert "RC_RDMA_WRITE_ONLY" in done.output
    done = CliRunner().invoke(cli, ["packets", str(path), "--explain", "2", "--json"], standalone_mode=False)
    assert done.return_value == 1
    assert json.loads(done.output)["icrc"] == "wrong"


def test_command_that_could_not_look_at_the_icrc_is_inconclusive(tmp_path):
    frames = dataclasses.replace(read(written(tmp_path, WRITE)), captured=np.array([60], dtype=np.int64))
    write_pcapng(tmp_path / "cut.pcapng", frames)
    done = CliRunner().invoke(
        cli, ["packets", str(tmp_path / "cut.pcapng"), "--explain", "1", "--json"], standalone_mode=False
    )
    assert (done.return_value, json.loads(done.output)["icrc"]) == (2, "not captured")
