"""An executor that runs its tasks in the main thread, where signals arrive: a run restores its lab on SIGTERM."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

__all__ = ["MainThread"]

_Task = tuple["Future[Any]", Callable[[], Any]]


class MainThread(Executor):
    """Tasks that other threads submit, executed one after the other by whoever calls `run`."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Add a task."""
        future: Future[Any] = Future()
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        """Execute tasks until `shutdown`. KeyboardInterrupt and SystemExit end it, and the task that they meet."""
        while (task := self._tasks.get()) is not None:
            future, call = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - it is the task's, and goes to whoever submitted it
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise
            else:
                future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        """Let `run` return after the tasks that are there."""
        self._tasks.put(None)
