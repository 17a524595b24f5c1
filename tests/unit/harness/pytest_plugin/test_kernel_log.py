"""Kernel logs: which lines are reported, which count as errors, and which make a run an ERROR."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from house import HOUSE

from faultbed.harness.pytest_plugin import receipts
from faultbed.harness.pytest_plugin.kernel_guard import KernelGuard, KernelReport
from faultbed.harness.pytest_plugin.keys import FAILED
from faultbed.harness.record import kernel_log
from faultbed.testbed.errors import Unreachable
from faultbed.testbed.inventory.schema import IgnoredMessageVars
from faultbed.testbed.lab import Lab
from faultbed.testbed.node import watch
from faultbed.testbed.node.gpu.xid import SYNTHETIC
from faultbed.testbed.observe.kernel_messages import KernelMessages
from faultbed.testbed.observe.telemetry import Change

TODAY = dt.date(2026, 11, 28)
RATE_LIMIT = IgnoredMessageVars(pattern=r"at net/core/dev\.c", reason="fixed in 6.13", until=TODAY, machines=["host*"])
IN_DEV = "4 WARNING: CPU: 0 PID: 7 at net/core/dev.c:1"


def log_entry(text, node="host1", subject="kernel"):
    return Change(at_ns=1, node=node, subject=subject, text=text)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ("3,812,55001,-;rxe0: link lost\n SUBSYSTEM=net\n", "3 rxe0: link lost"),
        ("11,813,55002,-;of a daemon, facility 1, level 3", "3 of a daemon, facility 1, level 3"),
        ("4,814,55003,-;WARNING: CPU: 0 PID: 7 at net/core/dev.c:1", "4 WARNING: CPU: 0 PID: 7 at net/core/dev.c:1"),
        ("6,815,55004,-;rtsw1: link becomes ready", None),
        ("4,816,55005,c;a warning of another program", None),
    ],
)
def test_kernel_log_reports_errors_and_warnings_of_kernel_code(record, expected):
    assert watch.KernelLog.text_of(record.encode()) == expected


def test_kernel_log_messages_of_a_busy_machine_are_no_errors():
    log = [
        log_entry("3 rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:"),
        log_entry("0 watchdog: BUG: soft lockup - CPU#0 stuck for 26s!"),
        log_entry("3 rxe0: failed to do something"),
    ]
    assert kernel_log.errors(log) == (log[2],)
    assert kernel_log.broken(log) == []


@pytest.mark.parametrize(
    "text",
    [
        "1 BUG: kernel NULL pointer dereference, address: 0000000000000000",
        "4 Oops: double fault: 0000 [#1] PREEMPT SMP",
        "0 Kernel panic - not syncing: Fatal exception in interrupt",
        "2 kernel BUG at mm/slub.c:448!",
    ],
)
def test_broken_kernel_is_named_once_with_the_remedy(text):
    result = kernel_log.broken(
        [log_entry(text), log_entry(text), log_entry("3 worse"), log_entry("UP mtu 1500", subject="link be0")]
    )
    assert len(result) == 1
    assert result[0].startswith(f"host1: its kernel broke: {text[2:]}; run `faultbed reset`")


@pytest.mark.parametrize(
    ("text", "soft", "rack"),
    [
        ("4 WARNING: CPU: 0 PID: 7 at drivers/infiniband/sw/rxe/rxe_qp.c:1", True, True),
        ("1 BUG: kernel NULL pointer dereference, address: 0000000000000000", True, True),
        ("0 watchdog: BUG: soft lockup - CPU#0 stuck for 26s!", False, True),
        ("3 rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:", False, True),
        ("3 INFO: task kworker/0:1 blocked for more than 120 seconds.", False, True),
        ("2 mlx5_core 0000:19:00.0 eth2: NETDEV WATCHDOG: CPU: 1: transmit queue 0 timed out", False, True),
        ("3 rxe0: link lost", False, False),
        ("3 messages were lost", False, False),
        ("2 syslog bgpd[7]: Received signal 11 at 1795852800 (si_addr 0x0, PC 0x5); aborting...", True, True),
    ],
)
def test_unhealthy_kernel_log_lines_by_kind_of_lab(text, soft, rack):
    """VMs that starve each other report lockups although no machine is faulty."""
    for kind, counts in (("soft", soft), ("rack", rack)):
        assert bool(kernel_log.unhealthy([log_entry(text)], lab_kind=kind, today=TODAY)) is counts


def test_unhealthy_kernel_reports_each_message_once_with_its_machine():
    warning = log_entry("4 WARNING: CPU: 0 PID: 7 at net/core/dev.c:1")
    assert kernel_log.unhealthy([warning, warning], lab_kind="soft", today=TODAY) == [
        "host1: kernel: WARNING: CPU: 0 PID: 7 at net/core/dev.c:1"
    ]


def test_message_that_the_inventory_ignores_is_no_error_until_its_day_is_over():
    log = [log_entry(IN_DEV), log_entry(IN_DEV, node="rtsw1")]
    assert kernel_log.errors(log, [RATE_LIMIT]) == (log[1],)
    unhealthy = partial(kernel_log.unhealthy, lab_kind="soft", ignored=[RATE_LIMIT])
    assert unhealthy(log, today=TODAY) == ["rtsw1: kernel: WARNING: CPU: 0 PID: 7 at net/core/dev.c:1"]
    first, _ = unhealthy(log, today=TODAY + dt.timedelta(days=1))
    assert first.endswith("at net/core/dev.c:1 (it was to be ignored until 2026-11-28: fixed in 6.13)")
    assert kernel_log.not_expired([RATE_LIMIT], TODAY) == (RATE_LIMIT,)
    assert kernel_log.not_expired([RATE_LIMIT], TODAY + dt.timedelta(days=1)) == ()


def test_ignored_messages_never_hide_a_broken_kernel():
    oops = log_entry("4 Oops: 0000 [#1] at net/core/dev.c")
    assert kernel_log.errors([oops], [RATE_LIMIT]) == (oops,)
    assert kernel_log.unhealthy([oops], lab_kind="soft", ignored=[RATE_LIMIT], today=TODAY)
    crash = log_entry("2 syslog orchagent: BUG: Oops; exiting orchagent", node="rtsw1")
    assert kernel_log.broken([crash]) == []


def test_kernel_guard_whose_log_has_a_gap_is_unknown():
    """Lost messages used to count as none."""
    lab = Kernels()
    guard = KernelGuard(lab)
    lab.logged["host2"] = ["3 syslog messages were lost: /var/log/syslog was replaced"]
    lab.logged["host1"] = ["3 messages were lost"]
    report = guard.report()
    assert report.unhealthy == []
    assert report.unknown == [
        "host1: a part of its log is unknown: messages were lost",
        "host2: a part of its log is unknown: syslog messages were lost: /var/log/syslog was replaced",
    ]


class Kernels:
    """A lab whose machines return the kernel log since the last request."""

    kind = "rack"
    inventory_model = SimpleNamespace(ignored_messages=())

    def __init__(self):
        self.logged = {"host1": [], "host2": []}
        self.unread = ()

    def nodes(self):
        return ("host1", "host2")

    def kernel_log(self, machine):
        if machine in self.unread:
            raise Unreachable(f"{machine} does not answer")
        messages, self.logged[machine] = self.logged[machine], []
        return messages


def test_kernel_guard_counts_only_messages_since_it_started():
    lab = Kernels()
    lab.logged["host1"] = ["4 WARNING: CPU: 0 PID: 7 at before.c:1"]
    guard = KernelGuard(lab)
    assert guard.report() == KernelReport(unhealthy=[], unknown=[])
    lab.logged["host2"] = ["4 WARNING: CPU: 0 PID: 7 at during.c:1", "3 eth0: link lost"]
    assert guard.report().unhealthy == ["host2: kernel: WARNING: CPU: 0 PID: 7 at during.c:1"]


@pytest.mark.parametrize("when", ["before the test", "after the test"])
def test_kernel_log_that_cannot_be_read_is_unknown(when):
    """An unreadable log used to count as one without messages. A watcher that starts late lacks earlier messages."""
    lab = Kernels()
    lab.unread = ("host2",) if when == "before the test" else ()
    guard = KernelGuard(lab)
    lab.unread = ("host2",) if when == "after the test" else ()
    report = guard.report()
    assert report.unknown == ["host2: its kernel log could not be read: host2 does not answer"]
    lab.unread = ()
    guard.report()
    assert guard.report().unknown == []


@pytest.mark.parametrize("has_failed", [False, True])
def test_test_whose_kernel_logs_are_unknown_is_inconclusive(has_failed):
    passed = [(receipts.EXIT_CODE, 0)]
    item = SimpleNamespace(stash={FAILED: has_failed}, user_properties=passed[:], config=SimpleNamespace(stash={}))
    with (
        contextlib.nullcontext() if has_failed else pytest.raises(pytest.fail.Exception, match="INCONCLUSIVE") as raised
    ):
        receipts.fail_unknown_kernels(item, ["host2: its kernel log could not be read: no answer"])
    assert item.user_properties == (passed if has_failed else [(receipts.EXIT_CODE, 2)])
    assert has_failed or "host2: its kernel log" in str(raised.value)


class Kmsg:
    """/dev/kmsg of one boot after the other, as `faultbed.testbed.node.watch` opens and reads it."""

    def __init__(self, monkeypatch, folder):
        self.records, self.boot, self.at = [], "boot-1", {}
        (folder / "kmsg").write_text("")
        real_open, real_seek = os.open, os.lseek

        def opened(_path, flags):
            file = real_open(folder / "kmsg", flags)
            self.at[file] = 0
            return file

        def to_end(file, offset, how):
            self.at[file] = len(self.records)
            return real_seek(file, offset, how)

        monkeypatch.setattr(
            watch, "os", SimpleNamespace(**{**vars(os), "open": opened, "read": self.read, "lseek": to_end})
        )
        monkeypatch.setattr(watch, "boot_id", lambda: self.boot)

    def read(self, file, _most):
        if self.at[file] == len(self.records):
            raise BlockingIOError
        self.at[file] += 1
        return self.records[self.at[file] - 1]

    def log(self, text):
        self.records.append(f"{text[0]},{len(self.records)},1,-;{text[2:]}\n".encode())

    def reboot(self):
        self.records, self.boot = [], "boot-2"


@pytest.fixture
def kmsg(monkeypatch, tmp_path):
    return Kmsg(monkeypatch, tmp_path)


WARNING = "4 WARNING: CPU: 0 PID: 7 at {}.c:1"


def test_watcher_returns_the_kernel_log_since_the_last_request(kmsg):
    """The first request starts the listener; each later one returns the lines since the one before."""
    watching = watch.Watch()
    kmsg.log(WARNING.format("before"))
    assert watching.kernel_log({}) == {"boot": "boot-1", "after": 0, "files": {}, "messages": []}
    kmsg.log("6 ready")
    assert watching.kernel_log({}) == {"boot": "boot-1", "after": 1, "files": {}, "messages": []}
    kmsg.log("3 rxe0: link lost")
    assert watching.kernel_log({})["messages"] == ["3 rxe0: link lost"]
    watching.log.close()


def test_watcher_that_starts_again_continues_the_kernel_log(kmsg):
    """A watcher used to begin with an empty log, so what came before its start was lost."""
    first, again, rebooted = watch.Watch(), watch.Watch(), watch.Watch()
    kmsg.log(WARNING.format("long_before"))
    known = first.kernel_log({})
    kmsg.log(WARNING.format("between"))
    position = {"boot": known["boot"], "after": known["after"]}
    assert again.kernel_log(position)["messages"] == [WARNING.format("between")]
    kmsg.reboot()
    kmsg.log(WARNING.format("while_it_booted"))
    assert rebooted.kernel_log(position) == {
        "boot": "boot-2", "after": 0, "files": {}, "messages": [WARNING.format("while_it_booted")]
    }  # fmt: skip
    for watching in (first, again, rebooted):
        watching.log.close()


WATCHER = """
import os
from faultbed.testbed.inventory.schema import IgnoredMessageVars
from faultbed.testbed.lab import Lab
from faultbed.testbed.node import watch

class Log(watch.KernelLog):
    def __init__(self, *, is_whole):
        self.number = -1
        self.file, self.write_end = os.pipe()
        os.set_blocking(self.file, False)

    def read(self, *, after=-1):
        texts = super().read(after=after)
        if self.write_end is not None:  # it is logged after the answer to the first request
            os.write(self.write_end, b"4,7,1,-;WARNING: CPU: 0 PID: 7 at a.c:1")
            self.write_end = None
        return texts

watch.KernelLog = Log
watch.main()
"""


def test_watcher_sends_a_kernel_message_at_once():
    """A message from before a reboot used to wait in the machine for the next reading, and was lost."""
    argv = [sys.executable, "-c", WATCHER]
    with subprocess.Popen(argv, cwd=HOUSE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        program.stdin.write('{"do":"kernel_log","seq":1}\n')
        program.stdin.flush()
        answer, event = (json.loads(program.stdout.readline()) for _ in range(2))
        program.stdin.close()
    assert (answer["event"], answer["messages"]) == ("kernel_log", [])
    assert (event["event"], event["after"], event["messages"]) == ("kernel", 7, [WARNING.format("a")])


def test_lab_kernel_log_includes_what_was_sent_before_a_reboot(monkeypatch):
    """The watcher from before the reboot is gone at the next reading; a new one returns the messages after it."""
    lab = object.__new__(Lab)
    lab.kernel_messages = KernelMessages()
    files = {"/var/log/syslog": [7, 100]}
    requests, answers = [], [
        {"boot": "1", "after": 3, "files": {}, "messages": []},
        {"boot": "2", "after": 1, "files": {}, "messages": ["3 c"]},
    ]  # fmt: skip
    monkeypatch.setattr(Lab, "request", lambda _lab, _machine, request: requests.append(request) or answers.pop(0))
    assert lab.kernel_log("host1") == []
    lab.kernel_messages.keep(
        "host1", {"boot": "1", "after": 5, "files": files, "messages": ["4 WARNING: a", "4 WARNING: b"]}
    )
    assert lab.kernel_log("host1") == ["4 WARNING: a", "4 WARNING: b", "3 c"]
    assert requests == [{"do": "kernel_log"}, {"do": "kernel_log", "boot": "1", "after": 5, "files": files}]
    lab.kernel_messages.forget()
    assert lab.kernel_messages.read_up_to("host1") == {}


def test_xid_event_of_a_driver_counts_and_a_synthetic_one_does_not():
    """The fault's own log line used to make `kernel.errors max = 0` fail in every experiment that injects it."""
    log = [
        log_entry(f"3 NVRM: Xid (PCI:gpu0): 79, {SYNTHETIC}"),
        log_entry("3 NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus."),
    ]
    assert kernel_log.errors(log) == (log[1],)
