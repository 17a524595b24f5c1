"""What is located at once is what the layers, one after the other, would have found."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from gbn_model import go_back_n
from mutations import mutated, mutations

from faultbed.harness.packets.analysis import analyse
from faultbed.testbed.errors import UsageError
from faultbed.testbed.packets import encapsulation
from faultbed.testbed.packets.capture_file import read
from faultbed.testbed.packets.columns import decode
from faultbed.testbed.packets.encapsulation import locate

CAPTURES = sorted((Path(__file__).parents[3] / "data" / "captures").glob("*.pcap*"))


def columns(thing):
    return {one.name: np.asarray(getattr(thing, one.name)).tolist() for one in fields(thing) if one.name != "hidden"}


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name)
def test_plain_frames_are_located_as_by_all_layers(capture, tmp_path, monkeypatch):
    plain = encapsulation._locate_plain
    content, file, rng = capture.read_bytes(), tmp_path / "a", np.random.default_rng(5)
    for number in range(mutations(200, 10)):
        file.write_bytes(content if not number else mutated(content, rng))
        try:
            frames = read(file)
        except UsageError:
            continue
        monkeypatch.setattr(encapsulation, "_locate_plain", plain)
        fast, packets = locate(frames), decode(frames)
        monkeypatch.setattr(encapsulation, "_locate_plain", lambda frames, _: np.zeros(len(frames), dtype=np.bool_))
        slow, packets_of_layers = locate(frames), decode(frames)
        assert columns(fast) == columns(slow)
        assert columns(packets) == columns(packets_of_layers)
        assert packets.hidden == packets_of_layers.hidden
        assert fast.hidden == slow.hidden


@pytest.mark.parametrize("length", [0, 20, 43])
def test_packets_whose_ip_length_is_shorter_than_their_headers_prove_no_rule(length):
    """An offload writes 0. Payloads computed from such a length broke the rule of request lengths."""
    wire = go_back_n(count=20, losses=set()).wire
    wire.packets = [
        (time_ns, content[:16] + length.to_bytes(2, "big") + content[18:], outbound)
        for time_ns, content, outbound in wire.packets
    ]
    analysis = analyse(wire.frames())
    assert analysis.violations == 0
    assert any("too short for their own headers" in doubt for doubt in analysis.doubts)
