"""The bulk readers of capture files against a plain loop from record to record, also where guesses mislead."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import samples

from faultbed.testbed.packets.capture_file import read


def pcap(records, order):
    """Return a file of (seconds, part, payload) records."""
    head = struct.pack(f"{order}IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 1 << 18, 1)
    heads = (struct.pack(f"{order}IIII", seconds, part, len(payload), 1500) for seconds, part, payload in records)
    return head + b"".join(first + payload for first, (_, _, payload) in zip(heads, records, strict=True))


def pcapng(records, order):
    def block(kind, body):
        body += bytes(-len(body) % 4)
        size = struct.pack(f"{order}I", len(body) + 12)
        return struct.pack(f"{order}I", kind) + size + body + size

    blocks = [
        block(0x0A0D0D0A, struct.pack(f"{order}IHHq", 0x1A2B3C4D, 1, 0, -1)),
        block(1, struct.pack(f"{order}HHI", 1, 0, 0)),
    ]
    for seconds, part, payload in records:
        ticks = seconds * 1_000_000 + part
        head = struct.pack(f"{order}IIIII", 0, ticks >> 32, ticks & 0xFFFFFFFF, len(payload), 1500)
        blocks.append(block(6, head + payload))
        if part % 5 == 0:
            blocks.append(block(4, b""))  # names: the chain of packet blocks is broken
    return b"".join(blocks)


WRITERS = {"pcap": pcap, "pcapng": pcapng}


def payloads(order):
    """Payloads that look like records: other captures, and what a guess goes by."""
    small = [(1_700_000_000, 5, b"x" * 20), (1_700_000_001, 7, b"y" * 8)]
    return st.sampled_from(
        [
            b"",
            b"\x00" * 40,
            bytes(range(60)),
            pcap(small, order),
            pcapng(small, order)[28:],
            struct.pack(f"{order}II", 6, 32) + bytes(20) + struct.pack(f"{order}I", 32),
            struct.pack(f"{order}IIII", 1_700_000_000, 1, 4, 4) + b"abcd",
            struct.pack(f"{order}I", 6) * 16,
        ]
    )


@settings(max_examples=samples(150), deadline=None)
@given(data=st.data(), order=st.sampled_from("<>"), kind=st.sampled_from(["pcap", "pcapng"]))
def test_reader_finds_the_records_that_a_loop_finds(data, order, kind, tmp_path_factory):
    record = st.tuples(
        st.sampled_from([0, 65_535, 65_536, 1_700_000_000, 1_700_000_001, 1_700_065_536]),
        st.integers(0, 999_999),
        payloads(order),
    )
    records = data.draw(st.lists(record, min_size=1, max_size=40))
    path = tmp_path_factory.mktemp("chain") / "a"
    path.write_bytes(WRITERS[kind](records, order))
    frames = read(path)
    assert not frames.damage
    assert (frames.time_ns == [seconds * 1_000_000_000 + part * 1_000 for seconds, part, _ in records]).all()
    assert (frames.length == 1500).all()
    rows = zip(frames.start.tolist(), frames.captured.tolist(), strict=True)
    assert [frames.data[at : at + size].tobytes() for at, size in rows] == [payload for *_, payload in records]


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_reader_of_a_file_longer_than_a_window_finds_every_record(kind, tmp_path):
    records = [(1_700_000_000 + number, number, bytes(number % 97 + 1)) for number in range(60_000)]
    path = tmp_path / "a"
    path.write_bytes(WRITERS[kind](records, "<"))
    frames = read(path)
    assert not frames.damage
    assert (np.diff(frames.time_ns) == 1_000_001_000).all()
    assert (frames.captured == np.arange(60_000) % 97 + 1).all()
