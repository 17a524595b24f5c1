"""The journal: after a kill at any byte, all complete records can still be read."""

from __future__ import annotations

import fcntl
import itertools
import json
import random
import subprocess
import sys
import threading

import pytest
from house import HOUSE
from hypothesis import given, settings
from hypothesis import strategies as st

from faultbed.inject.journal import Journal, broken_lines, pending, read


def lines_of(raw):
    """Return each line with its offset."""
    lines = raw.splitlines(keepends=True)
    return list(zip(lines, [0, *itertools.accumulate(len(line) for line in lines)], strict=False))


def write(path, count):
    with Journal(path) as journal:
        for index in range(count):
            seq = journal.invoke("arm", fault=f"f{index}", note="ü\n")
            journal.ok(seq, "arm", at_ns=index)


@settings(deadline=None)  # each record is fsynced, and disks have their moods
@given(st.data())
def test_journal_cut_at_any_byte_loses_at_most_one_record(tmp_path_factory, data):
    """After truncation at any byte, all complete records are read in order."""
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    write(path, data.draw(st.integers(1, 6)))
    raw = path.read_bytes()
    cut = data.draw(st.integers(0, len(raw)))
    path.write_bytes(raw[:cut])
    records = read(path)
    whole = sum(len(line.rstrip(b"\n")) <= cut - start for line, start in lines_of(raw))
    assert [record.seq for record in records] == list(range(whole))
    is_cut = cut not in {0, len(raw), *(start + len(line) - at for line, start in lines_of(raw) for at in (0, 1))}
    assert broken_lines(path) == ((whole + 1,) if is_cut else ())


def test_journal_cut_at_a_thousand_offsets_loses_at_most_one_record(tmp_path):
    """A thousand fixed random offsets: the records read are those written, except for the truncated one."""
    path, cut = tmp_path / "journal.jsonl", tmp_path / "cut.jsonl"
    write(path, 40)
    written, raw = read(path), path.read_bytes()
    starts = [0, *itertools.accumulate(len(line) for line in raw.splitlines(keepends=True))][:-1]
    assert len(written) == len(starts) == 80
    drawn = random.Random(4)
    for offset in [0, len(raw), *(drawn.randint(0, len(raw)) for _ in range(998))]:
        cut.write_bytes(raw[:offset])
        result = read(cut)
        assert result == written[: len(result)]
        begun = sum(start < offset for start in starts)
        assert begun - 1 <= len(result) <= begun


@settings(deadline=None)  # each record is fsynced, and disks have their moods
@given(st.data())
def test_journal_continues_after_a_truncated_record(tmp_path_factory, data):
    """A journal reopened after a kill keeps the torn line, and continues on a new line with the next number."""
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    write(path, 2)
    raw = path.read_bytes()
    cut = raw[: data.draw(st.integers(0, len(raw)))]
    path.write_bytes(cut)
    before, broken = len(read(path)), broken_lines(path)
    with Journal(path) as journal:
        assert journal.broken == broken
        journal.note("resumed")
    assert path.read_bytes().startswith(cut)
    assert broken_lines(path) == broken
    records = read(path)
    assert [record.seq for record in records] == list(range(before + 1))
    assert records[-1].op == "resumed"


def test_journal_record_after_a_broken_line_in_the_middle_is_read(tmp_path):
    """A broken line used to hide all later records. It occurs if one of two commands that append is killed."""
    path = tmp_path / "journal.jsonl"
    with Journal(path) as first:
        first.note("before")
        with path.open("ab") as other:
            other.write(b'{"seq":7,"type":"no')
        first.note("after")
    assert [record.op for record in read(path)] == ["before", "after"]
    assert broken_lines(path) == (2,)


def test_journal_in_a_file_without_a_newline_at_its_end_keeps_the_file(tmp_path):
    """`--journal FILE` used to cut the last line of any such file."""
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nmore of them")
    with Journal(path) as journal:
        journal.note("first")
        assert journal.broken == (1, 2)
    assert path.read_text().startswith("my notes\nmore of them\n{")
    assert [(record.seq, record.op) for record in read(path)] == [(0, "first")]


def test_journal_intent_without_completion_is_pending(tmp_path):
    """An intent that ended, successfully or not, is not pending."""
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        first = journal.invoke("arm", fault="a")
        journal.fail(first, "arm", error="no")
        journal.invoke("arm", fault="b")
    assert [record.data["fault"] for record in pending(read(path))] == ["b"]


def test_journal_doing_records_begin_and_failure(tmp_path):
    """The intent is recorded before the block runs and the error after it, and the exception is raised."""
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal, pytest.raises(ZeroDivisionError), journal.doing("clear", fault="a") as outcome:
        assert [record.type for record in read(path)] == ["invoke"]
        outcome["seen"] = 1
        raise ZeroDivisionError
    invoke, fail = read(path)
    assert (fail.type, fail.of, fail.data["seen"]) == ("fail", invoke.seq, 1)
    assert "ZeroDivisionError" in fail.data["error"]


def test_journal_can_be_shared_by_threads(tmp_path):
    """Records of several threads are whole lines with numbers of their own."""
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        threads = [threading.Thread(target=lambda: [journal.note("beat", who=1) for _ in range(20)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(json.loads(line)["seq"] for line in path.read_text().splitlines()) == list(range(80))


def test_journal_of_two_writers_numbers_each_record_once(tmp_path):
    """Each writer used to count on from what it read when it opened the file, so both used the same numbers."""
    path = tmp_path / "journal.jsonl"
    with Journal(path) as first, Journal(path) as second:
        intents = [journal.invoke("arm", fault=name) for journal, name in [(first, "a"), (second, "b"), (first, "c")]]
        second.ok(intents[1], "arm")
    records = read(path)
    assert [record.seq for record in records] == [0, 1, 2, 3]
    assert [record.data["fault"] for record in pending(records)] == ["a", "c"]


def test_journal_of_two_processes_at_once_numbers_lines_in_order(tmp_path):
    """One process is killed while it writes; its broken line has no number, and both others go on."""
    path = tmp_path / "journal.jsonl"
    program = "import sys\nfrom pathlib import Path\nfrom faultbed.inject.journal import Journal\n"
    program += "with Journal(Path(sys.argv[1])) as journal:\n    for _ in range(40): journal.note('beat')\n"
    with Journal(path) as third:
        writers = [subprocess.Popen([sys.executable, "-c", program, str(path)], cwd=HOUSE) for _ in range(2)]
        try:
            with path.open("ab") as killed:
                fcntl.flock(killed, fcntl.LOCK_EX)
                killed.write(b'{"seq":3,"type":"no')
            third.note("after")
        finally:
            assert [writer.wait(60) for writer in writers] == [0, 0]
    assert [record.seq for record in read(path)] == list(range(81))
    assert len(broken_lines(path)) == 1


def test_journal_that_another_process_keeps_locked_refuses_an_intent_and_lets_a_revert_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("faultbed.inject.journal._LOCK_WAIT_S", 0.05)
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal, path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="another process has locked it"):
            journal.invoke("arm", fault="a")
        journal.note("reverted")
        assert isinstance(journal.failure, TimeoutError)
        fcntl.flock(other, fcntl.LOCK_UN)
        assert journal.invoke("arm", fault="a") == 0
