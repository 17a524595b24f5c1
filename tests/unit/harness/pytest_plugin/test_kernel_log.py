"""Kernel logs: which lines are reported, which count as errors, and which make a run an ERROR."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import pytest

from harness.pytest_plugin import receipts
from harness.pytest_plugin.kernel_guard import KernelGuard, KernelReport
from harness.pytest_plugin.keys import FAILED
from harness.record import kernel_log
from testbed.errors import Unreachable
from testbed.node import watch
from testbed.node.gpu.xid import SYNTHETIC
from testbed.observe.telemetry import Change


def log_entry(text, node="host1", subject="kernel"):
    return Change(at_ns=1, node=node, subject=subject, text=text)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ("3,812,55001,-;rxe0: link lost\n SUBSYSTEM=net\n", "3 rxe0: link lost"),
        ("11,813,55002,-;of a daemon, facility 1, level 3", "3 of a daemon, facility 1, level 3"),
        ("4,814,55003,-;WARNING: CPU: 0 PID: 7 at net/core/dev.c:1", "4 WARNING: CPU: 0 PID: 7 at net/core/dev.c:1"),
        ("6,815,55004,-;rtsw1: link becomes ready", None),
        ("4,816,55005,c;a warning of somebody else", None),
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
    ],
)
def test_unhealthy_kernel_log_lines_by_kind_of_lab(text, soft, rack):
    """VMs that starve each other report lockups although no machine is faulty."""
    for kind, counts in (("soft", soft), ("rack", rack)):
        assert bool(kernel_log.unhealthy([log_entry(text)], lab_kind=kind)) is counts


def test_unhealthy_kernel_reports_each_message_once_with_its_machine():
    warning = log_entry("4 WARNING: CPU: 0 PID: 7 at net/core/dev.c:1")
    assert kernel_log.unhealthy([warning, warning], lab_kind="soft") == [
        "host1: kernel: WARNING: CPU: 0 PID: 7 at net/core/dev.c:1"
    ]


class Kernels:
    """A lab whose machines return the kernel log since the last request."""

    kind = "rack"

    def __init__(self):
        self.logged = {"host1": [], "host2": []}
        self.unread = ()

    def nodes(self):
        return ("host1", "host2")

    def request(self, machine, request):
        assert request == {"do": "kernel_log"}
        if machine in self.unread:
            raise Unreachable(f"{machine} does not answer")
        messages, self.logged[machine] = self.logged[machine], []
        return {"messages": messages}


def test_kernel_guard_counts_only_messages_since_it_started():
    lab = Kernels()
    lab.logged["host1"] = ["4 WARNING: CPU: 0 PID: 7 at before.c:1"]
    guard = KernelGuard(lab)
    assert guard.report() == KernelReport(unhealthy=[], unknown=[])
    lab.logged["host2"] = ["4 WARNING: CPU: 0 PID: 7 at during.c:1", "3 eth0: link lost"]
    assert guard.report().unhealthy == ["host2: kernel: WARNING: CPU: 0 PID: 7 at during.c:1"]


@pytest.mark.parametrize("when", ["before the test", "after the test"])
def test_kernel_log_that_cannot_be_read_is_unknown(when):
    """It used to count as a log without messages. A watcher that starts late has not recorded what came before."""
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


def test_watcher_returns_the_kernel_log_since_the_last_request(monkeypatch, tmp_path):
    """The first request starts the listener; each later one returns the lines since the one before."""
    log = tmp_path / "kmsg"
    log.write_text("")
    monkeypatch.setattr(watch.os, "open", lambda path, flags, real=os.open: real(log, flags))
    records = [b"4,1,1,-;WARNING: CPU: 0 PID: 7 at a.c:1\n", b"6,2,2,-;ready\n"]

    def read(_file, _most):
        if not records:
            raise BlockingIOError
        return records.pop(0)

    watching = watch.Watch()
    with monkeypatch.context() as patch:
        patch.setattr(watch.os, "read", read)
        assert watching.kernel_log({}) == {"messages": ["4 WARNING: CPU: 0 PID: 7 at a.c:1"]}
        assert watching.kernel_log({}) == {"messages": []}
        records.append(b"3,3,3,-;rxe0: link lost\n")
        assert watching.kernel_log({}) == {"messages": ["3 rxe0: link lost"]}
    watching.log.close()


def test_xid_event_of_a_driver_counts_and_a_synthetic_one_does_not():
    """The fault's own log line used to make `kernel.errors max = 0` fail in every experiment that injects it."""
    log = [
        log_entry(f"3 NVRM: Xid (PCI:gpu0): 79, {SYNTHETIC}"),
        log_entry("3 NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus."),
    ]
    assert kernel_log.errors(log) == (log[1],)
