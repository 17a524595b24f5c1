"""Annotated copies of captures: the same capture, with a comment in each frame that shows a finding."""

import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from gbn_model import go_back_n

from faultbed.harness.cli.main import cli
from faultbed.harness.packets.analysis import analyse
from faultbed.harness.packets.annotations import comments_of_frames
from faultbed.testbed.packets.capture_file import read
from faultbed.testbed.packets.pcapng_writer import write_pcapng

CAPTURES = sorted((Path(__file__).parents[3] / "data" / "captures").glob("*.pcap*"))


def packets(*arguments):
    return CliRunner().invoke(cli, ["packets", *map(str, arguments)], standalone_mode=False)


def comments(path):
    """Return the comments of frames, by number, read with plain struct calls."""
    content, at, number, texts = path.read_bytes(), 0, 0, {}
    while at + 12 <= len(content):
        kind, size = struct.unpack_from("<II", content, at)
        if kind == 6:
            number += 1
            captured = struct.unpack_from("<I", content, at + 20)[0]
            option = at + 28 + (captured + 3 & ~3)
            while option < at + size - 4:
                code, length = struct.unpack_from("<HH", content, option)
                if code == 1:
                    texts[number] = content[option + 4 : option + 4 + length].decode()
                option += 4 + (length + 3 & ~3)
        at += size
    return texts


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name)
def test_annotated_copy_has_the_same_analysis_and_each_finding(capture, tmp_path):
    copy = tmp_path / "copy.pcapng"
    done = packets(capture, "--annotate", copy)
    assert done.return_value in (0, 1, 2)
    original, annotated = analyse(read(capture)), analyse(read(copy))
    assert msgspec.to_builtins(annotated) == msgspec.to_builtins(original)
    assert comments(copy) == comments_of_frames(original)
    assert packets(copy).return_value == done.return_value


def test_annotated_copy_of_a_fatal_nak_says_so_in_its_frame(tmp_path):
    packets(next(path for path in CAPTURES if "remote-access" in path.name), "--annotate", tmp_path / "copy.pcapng")
    (text,) = comments(tmp_path / "copy.pcapng").values()
    assert "remote access error; it ends the connection" in text


def test_annotated_copy_of_dropped_or_damaged_frames_proves_no_more_than_the_original(tmp_path):
    frames = go_back_n(count=40, losses={7}).wire.frames()
    for number, poor in enumerate((replace(frames, dropped=3), replace(frames, damage="byte 7: broken"))):
        write_pcapng(tmp_path / f"{number}.pcapng", poor)
        copy = tmp_path / f"copy-{number}.pcapng"
        assert packets(tmp_path / f"{number}.pcapng", "--annotate", copy).return_value == 2
        assert packets(copy).return_value == 2
        assert len(read(copy)) == len(frames)
    assert read(tmp_path / "copy-0.pcapng").dropped == 3


def test_annotate_refuses_existing_files_and_places_that_cannot_be_written(tmp_path):
    capture = CAPTURES[0]
    (tmp_path / "there").write_text("kept")
    assert "exists already" in str(packets(capture, "--annotate", tmp_path / "there").exception)
    assert (tmp_path / "there").read_text() == "kept"
    assert "No such file" in str(packets(capture, "--annotate", tmp_path / "none" / "a").exception)
    assert "give one" in str(packets(capture, "--annotate", tmp_path / "b", "--explain", "1").exception)
    early = replace(read(capture), time_ns=np.full(len(read(capture)), -5))
    with pytest.raises(ValueError, match="before 1970"):
        write_pcapng(tmp_path / "c", early)


def test_comment_longer_than_an_option_is_cut(tmp_path):
    frames = go_back_n(count=8, losses=set()).wire.frames()
    write_pcapng(tmp_path / "a.pcapng", frames, comment="ä" * 70_000, comments={3: "ü" * 70_000, 8: "short"})
    assert len(read(tmp_path / "a.pcapng")) == len(frames)
    texts = comments(tmp_path / "a.pcapng")
    assert set(texts) == {3, 8}
    assert texts[3].endswith("ü ...")


@pytest.mark.skipif(shutil.which("tshark") is None, reason="needs tshark")
def test_tshark_reads_the_comments(tmp_path):
    copy = tmp_path / "copy.pcapng"
    packets(next(path for path in CAPTURES if "remote-access" in path.name), "--annotate", copy)
    argv = ["tshark", "-r", str(copy), "-T", "fields", "-e", "frame.comment"]
    assert "remote access error" in subprocess.run(argv, capture_output=True, text=True, check=True).stdout
