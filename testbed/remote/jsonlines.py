"""Read messages of a program that speaks JSON lines from the queue that a reader thread fills."""

from __future__ import annotations

import json
import queue
from typing import Any

from faultbed.testbed.errors import CommandFailed, LabError
from faultbed.testbed.stopping import Deadline

__all__ = ["next_message"]


def next_message(
    lines: queue.Queue[bytes | None], *, program: str, stderr_note: str, timeout_s: float
) -> dict[str, Any] | None:
    """Wait for a line and decode it, as `faultbed.testbed.remote.remote_node.Channel.receive` specifies.

    Args:
        lines: the lines in order, then None; the None is put back for the next caller.
        program: the program, for messages.
        stderr_note: the end of its stderr, for messages; may be empty.
        timeout_s: how long to wait.

    Raises:
        CommandFailed: no line came by the timeout.
        LabError: the line is not JSON.
    """
    deadline = Deadline(timeout_s)
    while True:
        try:
            line = lines.get(timeout=deadline.step_s)
            break
        except queue.Empty:
            if deadline.is_over:
                raise CommandFailed(f"{program}: no output for {deadline.waited}{stderr_note}") from None
    if line is None:
        lines.put(None)
        return None
    try:
        message: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise LabError(f"{program}: output that is not JSON: {line[:200]!r}{stderr_note}") from error
    return message
