"""The next message of a program that speaks JSON lines, out of the queue that a reader thread fills."""

from __future__ import annotations

import json
import queue
from typing import Any

from testbed.errors import CommandFailed, LabError

__all__ = ["next_message"]


def next_message(lines: queue.Queue[bytes | None], *, what: str, said: str, timeout_s: float) -> dict[str, Any] | None:
    """Wait for a line and decode it; what `testbed.remote.remote_node.Channel.receive` promises.

    Args:
        lines: lines as they come; None after the last one, and it stays there for the next caller.
        what: the program, for messages.
        said: the end of what it wrote on its stderr, for messages; may be empty.
        timeout_s: how long to wait.

    Raises:
        CommandFailed: nothing came by the timeout.
        LabError: the line is not JSON.
    """
    try:
        line = lines.get(timeout=timeout_s)
    except queue.Empty:
        raise CommandFailed(f"{what} said nothing for {timeout_s:.0f} s{said}") from None
    if line is None:
        lines.put(None)
        return None
    try:
        message: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise LabError(f"{what} said something that is not JSON: {line[:200]!r}{said}") from error
    return message
