"""Crashes in the log files of FRR and SONiC: which lines count, and that none is lost between processes."""

from __future__ import annotations

import contextlib

import pytest

from faultbed.testbed.node.logs import daemon_log
from faultbed.testbed.node.logs.daemon_log import DaemonLog, crash_in

FRR = "2026/11/28 07:00:01 BGP: Received signal 11 at 1795852801 (si_addr 0x0, PC 0x55d0c0ffee); aborting..."
SONIC = "2026 Nov 28 07:00:02.123456 leaf1 {} {}"
SAI = (
    ":- handleSaiFailure: Encountered failure in create operation, exiting orchagent, SAI API: SAI_API_ACL, "
    "status: SAI_STATUS_TABLE_FULL"
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (FRR, f"2 syslog {FRR[20:]}"),
        # As bgpd of FRR 8 wrote it to its `log file` after a SIGSEGV: without a time.
        ("BGP: Received signal 11 at 1795853984 (si_addr 0x2a4a, PC 0x7f996e960366); aborting...", 2),
        ("2026/11/28 07:00:01 ZEBRA: lib/if.c:311: if_delete(): assertion (ifp) failed", 2),
        (SONIC.format("ERR", f"swss#orchagent: {SAI}"), f"3 syslog swss#orchagent: {SAI}"),
        (SONIC.format("INFO", "bgp#supervisord INFO exited: bgpd (terminated by SIGSEGV; not expected)"), 6),
        ("Nov 28 07:00:02 leaf1 bgpd[812]: Received signal 6 at 1795852801 (si_addr 0x3); aborting...", 2),
        ("2026-11-28T07:00:02.1+00:00 leaf1 zebra[8]: Received signal 7 at 1795852801; aborting...", 2),
        # The controller's own faults: a killed daemon, one that is stopped, next hops and sessions that go.
        ("2026/11/28 07:00:01 BGP: Received signal 15 at 1795852801 (si_addr 0x0, PC 0x5); exiting...", None),
        (SONIC.format("INFO", "bgp#supervisord INFO exited: bgpd (terminated by SIGKILL; not expected)"), None),
        ("2026/11/28 07:00:01 ZEBRA: [EC 4043309093] netlink-dp error: Network is down", None),
        ("Nov 28 07:00:02 leaf1 kernel: bgpd: assertion (x) failed", None),
        (SONIC.format("ERR", "pmon#xcvrd: Failed to read EEPROM"), None),
        ("", None),
    ],
)  # fmt: skip
def test_crash_in_line_of_a_daemon(line, expected):
    """FRR's `zlog_signal` and `_zlog_assert_failed`, supervisord's `finish`, orchagent's `handleSaiFailure`."""
    found = crash_in(line)
    if isinstance(expected, int):
        assert found is not None
        assert found.startswith(f"{expected} syslog ")
        assert "leaf1" not in found
    else:
        assert found == expected


@pytest.fixture
def log(monkeypatch, tmp_path):
    monkeypatch.setattr(daemon_log, "_SWITCH", (str(tmp_path),))
    monkeypatch.setattr(daemon_log, "_FILES", (f"{tmp_path}/*.log",))
    file = tmp_path / "frr.log"
    file.write_text(f"{FRR}\n")
    return file


@pytest.fixture
def follow(log):
    """Return the log from a position on; it is closed after the test."""
    with contextlib.ExitStack() as stack:

        def start(position=None):
            return stack.enter_context(contextlib.closing(DaemonLog(position)))

        yield start


def crash(number):
    return f"BGP: Received signal 11 at {number}; aborting..."


def add(file, *numbers, end="\n"):
    with file.open("a") as stream:
        stream.write("\n".join(map(crash, numbers)) + end)


def seen(texts):
    return [int(text.split(" at ")[1].partition(";")[0]) if "signal" in text else text for text in texts]


def test_daemon_log_begins_at_its_end_and_returns_whole_lines_once(log, follow):
    daemons = follow()
    assert daemons.read() == []
    add(log, 1, 2, end="")
    assert seen(daemons.read()) == [1]
    add(log, end="\n")
    assert seen(daemons.read()) == [2]
    add(log.with_name("zebra.log"), 3)
    assert seen(daemons.read()) == [3], "a file that is made later is read from its beginning"


@pytest.mark.parametrize("is_alive", [True, False], ids=["same process", "next process"])
def test_daemon_log_continues_across_rotation(log, follow, is_alive):
    """A watcher that is started again, or whose machine has rebooted, continues where the last one ended."""
    daemons = follow()
    add(log, 1, 2, end="")
    assert seen(daemons.read()) == [1]
    position = daemons.position
    add(log, end="\n")
    log.rename(f"{log}.1")
    log.write_text("")
    add(log, 3)
    assert seen((daemons if is_alive else follow(position)).read()) == [2, 3]


def test_daemon_log_that_cannot_continue_says_so(log, follow):
    position = follow().position
    log.unlink()
    log.with_name("other").write_text("keeps the inode from being used again")
    log.write_text("")
    add(log, 4)
    inode, offset = position[str(log)]
    lost, *texts = follow({str(log): [inode + 1_000_000, offset]}).read()
    assert lost.startswith("3 syslog messages were lost")
    assert seen(texts) == [4]


def test_daemon_log_in_memory_begins_again_with_the_machine_and_loses_nothing_else(log, follow, monkeypatch):
    """A soft lab that is reset has the log of its snapshot: shorter, and no sign of lost messages."""
    add(log, 1)
    position = follow().position
    log.write_text("")
    add(log, 4)
    assert seen(follow(position).read())[0].startswith("3 syslog messages were lost")
    monkeypatch.setattr(daemon_log, "_IN_MEMORY", str(log.parent))
    assert seen(follow(position).read()) == [4]


def test_daemon_log_that_was_truncated_says_so_and_begins_again(log, follow):
    daemons = follow()
    log.write_text("")
    add(log, 5)
    lost, *texts = daemons.read()
    assert "shorter than before" in lost
    assert seen(texts) == [5]


def test_daemon_log_of_a_machine_without_switch_daemons_is_empty(log, follow, monkeypatch):
    """The syslog of a host has crashes of programs that are none of the lab's."""
    monkeypatch.setattr(daemon_log, "_SWITCH", ("/nonexistent",))
    daemons = follow()
    add(log, 6)
    assert (daemons.read(), daemons.position) == ([], {})


def test_daemon_log_with_an_endless_line_stays_small(log, follow):
    daemons = follow()
    with log.open("a") as stream:
        stream.write("x" * 3_000_000)
    assert daemons.read() == []
    add(log, 7, 8)
    assert seen(daemons.read()) == [7, 8]
