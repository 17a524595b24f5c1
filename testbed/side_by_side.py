"""Do the same work on several machines at once, with a deadline for all of them.

`concurrent.futures` waits without a deadline for its threads: at the end of its `with` block and at the end of the
process. These threads are daemons: one that hangs on a machine is named and left behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from typing import TypeVar

from faultbed.testbed.errors import CommandFailed
from faultbed.testbed.stopping import Deadline

__all__ = ["in_background", "on_each", "result_of"]

_S = TypeVar("_S")
_T = TypeVar("_T")


def on_each(
    items: Iterable[_S],
    work: Callable[[_S], _T],
    *,
    timeout_s: float,
    at_once: int | None = None,
    name_of: Callable[[_S], str] = str,
) -> list[_T]:
    """Return the results of the same work on all items, in the order of the items.

    If one fails or is interrupted, those that have not begun are skipped, and the others are waited for.

    Args:
        items: machines, or names of them.
        work: what to do with one item.
        timeout_s: how long all of it may take.
        at_once: number of threads; default: one for each item.
        name_of: names an item in messages.

    Raises:
        CommandFailed: not all of it was done in time; the message has the items.
        Exception: the error of the first item whose work failed.
    """
    todo = list(items)
    futures: list[Future[_T]] = [Future() for _ in todo]
    left = iter(list(zip(futures, todo, strict=True)))
    taking, has_failed = threading.Lock(), threading.Event()

    def work_off() -> None:
        while not has_failed.is_set():
            with taking:
                taken = next(left, None)
            if taken is None:
                return
            future, item = taken
            if not _fulfil(future, lambda: work(item)):  # noqa: B023 (called at once)
                has_failed.set()

    for number in range(len(todo) if at_once is None else min(at_once, len(todo))):
        threading.Thread(target=work_off, name=f"side by side {number}", daemon=True).start()
    deadline = Deadline(timeout_s)
    try:
        return [result_of(future, deadline, name_of(item)) for future, item in zip(futures, todo, strict=True)]
    except BaseException:
        for future in futures:
            future.cancel()
        _wait_for(futures, deadline)  # what they are busy with must not outlive the cleanup of their caller
        raise


def in_background(work: Callable[[], _T], name: str) -> Future[_T]:
    """Do work on a thread of its own; `result_of` returns its result."""
    future: Future[_T] = Future()
    threading.Thread(target=_fulfil, args=(future, work), name=name, daemon=True).start()
    return future


def result_of(future: Future[_T], deadline: Deadline, name: str) -> _T:
    """Return the result of work in the background.

    Raises:
        CommandFailed: it is not done by the deadline; `name` says whose it is.
        Exception: the error of the work.
    """
    while True:
        try:
            return future.result(deadline.step_s)
        except NotDone:
            if future.done():
                return future.result(0)  # or the work's own error: a TimeoutError of an SSH channel is one, too
            if deadline.is_over:
                raise CommandFailed(f"{name}: not done after {deadline.waited}") from None


def _fulfil(future: Future[_T], work: Callable[[], _T]) -> bool:
    """Do the work of a future unless it was cancelled; return whether it has a result."""
    if not future.set_running_or_notify_cancel():
        return False
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 (the thread that waits for the result raises it)
        future.set_exception(error)
        return False
    future.set_result(result)
    return True


def _wait_for(futures: Iterable[Future[_T]], deadline: Deadline) -> None:
    for future in futures:
        while not future.done() and not deadline.is_over:
            try:
                future.exception(deadline.step_s)
            except NotDone:
                continue
