"""What kernels write to their logs: what is told, what counts, and what makes a run an error."""

from __future__ import annotations

import pytest

from harness.record import kernel_log
from testbed.onnode import watch
from testbed.telemetry import Change


def said(text, node="host1", subject="kernel"):
    return Change(at_ns=1, node=node, subject=subject, text=text)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ("3,812,55001,-;rxe0: link lost\n SUBSYSTEM=net\n", "3 rxe0: link lost"),
        ("11,813,55002,-;of a daemon, facility 1, level 3", "3 of a daemon, facility 1, level 3"),
        ("4,814,55003,-;WARNING: CPU: 0 PID: 7 at net/core/dev.c:1", "4 WARNING: CPU: 0 PID: 7 at net/core/dev.c:1"),
        ("6,815,55004,-;rtsw1: link becomes ready", None),
        ("4,816,55005,c;a warning of somebody else", None),
    ],
)
def test_errors_are_told_and_warnings_of_the_kernels_own_code(record, told):
    assert watch.KernelLog.told(record.encode()) == told


def test_what_a_busy_machine_says_anyway_does_not_count():
    log = [
        said("3 rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:"),
        said("0 watchdog: BUG: soft lockup - CPU#0 stuck for 26s!"),
        said("3 rxe0: failed to do something"),
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
def test_a_kernel_that_broke_is_named_once_with_what_to_do(text):
    found = kernel_log.broken([said(text), said(text), said("3 worse"), said("UP mtu 1500", subject="link be0")])
    assert len(found) == 1
    assert found[0].startswith(f"host1: its kernel broke: {text[2:]}; run `faultbed reset`")
