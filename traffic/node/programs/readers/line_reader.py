"""Lines that match a regular expression: each is one iteration. A group `bytes` has the bytes that it moved.

progress = 'lines:step (?P<step>[0-9]+) done, (?P<bytes>[0-9]+) bytes'
"""

from __future__ import annotations

import re

from faultbed.traffic.node.programs.readers.progress_step import Step

__all__ = ["ProgressReader"]

_MOST_BYTES = 1 << 50
"""More cannot be moved in one iteration: such a number is something else."""


class ProgressReader:
    """Counts the lines. The time of an iteration is that since the line before."""

    def __init__(self, pattern: str) -> None:
        if not pattern:
            raise ValueError("the regular expression is empty, so that every line would be progress")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        self._line_ns: int | None = None

    def line(self, text: str, now_ns: int) -> list[Step]:
        """Return the iteration of a line. The first one only shows that the program runs: its begin is unknown."""
        match = self._pattern.search(text)
        if match is None:
            return []
        began_ns, self._line_ns = self._line_ns, now_ns
        if began_ns is None:
            return [Step(now_ns, now_ns, 0)]
        written = match.groupdict().get("bytes") or ""
        size = (
            int(written) if written.isascii() and written.isdigit() and len(written) < len(str(_MOST_BYTES)) + 1 else 0
        )
        return [Step(began_ns, now_ns, min(size, _MOST_BYTES), is_iteration=True)]

    def end(self, now_ns: int) -> list[Step]:
        """Return nothing: every iteration has its line."""
        return []
