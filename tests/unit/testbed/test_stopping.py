"""Deadlines of waits, before and after a request to stop, and work that is done side by side."""

from __future__ import annotations

import threading
import time

import pytest

from faultbed.testbed import stopping
from faultbed.testbed.errors import CommandFailed
from faultbed.testbed.side_by_side import in_background, on_each, result_of
from faultbed.testbed.stopping import Deadline


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only the test advances."""
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


def test_deadline_without_a_request_is_its_timeout(clock):
    deadline = Deadline(60.0)
    clock(59.0)
    assert deadline.left_s == 1.0
    assert deadline.step_s == stopping.STEP_S
    clock(2.0)
    assert deadline.is_over
    assert deadline.waited == "61 s"


def test_request_shortens_a_wait_that_has_begun(clock):
    deadline = Deadline(3600.0)
    stopping.request()
    assert deadline.left_s == stopping.WORKLOAD_S
    clock(stopping.WORKLOAD_S)
    assert deadline.is_over
    assert "because this command is ending" in deadline.waited


def test_stages_follow_each_other_and_the_last_one_ends_before_the_promised_end(clock):
    stopping.request()
    deadline = Deadline(3600.0)
    for stage_s in (stopping.FAULTS_S, stopping.COMPARE_S):
        stopping.allow(stage_s)
        assert deadline.left_s == stage_s
    assert stopping.COMPARE_S < stopping.hard_end_s() - 100.0 < stopping.FIRST_S


def test_stage_without_a_request_changes_no_wait(clock):
    stopping.allow(stopping.COMPARE_S)
    assert Deadline(60.0).left_s == 60.0


def test_stage_that_begins_just_before_its_request_is_recorded_counts(clock):
    """Python raises KeyboardInterrupt on the main thread, and another thread records the request."""
    stopping.allow(stopping.FAULTS_S)
    stopping.request()
    assert Deadline(60.0).left_s == stopping.FAULTS_S


def test_second_request_ends_all_waits_and_no_stage_prolongs_them(clock):
    deadline = Deadline(3600.0)
    stopping.request()
    clock(1.0)
    stopping.request()
    stopping.allow(stopping.COMPARE_S)
    assert deadline.left_s < stopping.SECOND_S
    assert stopping.hard_end_s() - 101.0 < stopping.SECOND_S
    clock(1.0)
    assert stopping.request() == 3
    assert stopping.hard_end_s() - 101.0 < stopping.SECOND_S


def test_second_request_late_in_a_stage_leaves_no_more_than_its_own_time(clock):
    stopping.request()
    stopping.allow(stopping.COMPARE_S)
    clock(stopping.COMPARE_S - 0.5)
    stopping.request()
    assert Deadline(60.0).left_s < stopping.SECOND_S


def test_wait_that_begins_late_still_takes_an_answer_that_is_on_its_way():
    stopping.request()
    stopping.request()
    time.sleep(1.1)
    arrives = threading.Event()
    threading.Timer(0.05, arrives.set).start()
    assert Deadline(60.0).wait(arrives)


def test_forced_end_leaves_the_newest_first_and_passes_its_sentence_on():
    lab, injector, passed = object(), object(), []
    stopping.owe(lab, lambda reasons: passed.extend(reasons) or "the lab is DIRTY")
    stopping.owe(injector, lambda _: "the fault reverts by itself")
    assert stopping.leave_all() == ["the fault reverts by itself", "the lab is DIRTY"]
    assert passed == ["the fault reverts by itself"]
    assert not stopping.is_owed()


def test_what_was_restored_is_not_left():
    stopping.owe(test_what_was_restored_is_not_left, lambda _: "never")
    stopping.settle(test_what_was_restored_is_not_left)
    assert stopping.leave_all() == []


def test_on_each_returns_results_in_the_order_of_the_items():
    assert on_each([3, 1, 2], lambda number: number * number, timeout_s=60.0, at_once=2) == [9, 1, 4]


def test_on_each_names_the_item_that_is_late():
    hangs = threading.Event()
    with pytest.raises(CommandFailed, match="host2: not done after 0 s"):
        on_each(["host1", "host2"], lambda name: name == "host1" or hangs.wait(60), timeout_s=0.1)
    hangs.set()


def test_on_each_names_items_as_its_caller_does():
    hangs = threading.Event()
    with pytest.raises(CommandFailed, match=r"^host7: not done"):
        on_each([7], lambda _: hangs.wait(60), timeout_s=0.1, name_of=lambda number: f"host{number}")
    hangs.set()


def test_on_each_raises_the_error_of_the_work_and_begins_no_more():
    begun = []

    def work(number):
        begun.append(number)
        raise TimeoutError(f"of item {number}")

    with pytest.raises(TimeoutError, match="of item 0"):
        on_each(range(100), work, timeout_s=60.0, at_once=1)
    assert len(begun) < 100


def test_on_each_without_items_returns_nothing():
    assert on_each([], str, timeout_s=0.0) == []


def test_result_in_the_background():
    assert result_of(in_background(lambda: 7, "seven"), Deadline(60.0), "seven") == 7
