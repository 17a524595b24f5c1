"""fio's JSON (`--output-format=json`), once at the end, or every second with `--status-interval=1`.

Each report is an object whose braces stand alone on their lines. Its counts of bytes are totals since the start, so the
progress of a report is the difference from the one before (fio's HOWTO, "JSON output"; `stat.c`).
"""

from __future__ import annotations

import json

from faultbed.traffic.node.programs.readers.progress_step import Step

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["ProgressReader"]

_MOST_BYTES = 4 << 20


class ProgressReader:
    """Collects the lines of a report until its last brace."""

    def __init__(self) -> None:
        self._lines: list[str] | None = None
        self._size = 0
        self._total: int | None = None
        self._report_ns = 0

    def line(self, text: str, now_ns: int) -> list[Step]:
        """Return the progress of the report that this line ends. A report of more than 4 MiB is left out."""
        bare = text.rstrip()
        if bare == "{":
            self._lines, self._size = [], 0
        if self._lines is None:
            return []
        self._lines.append(bare)
        self._size += len(bare)
        if self._size > _MOST_BYTES:
            self._lines = None
        if bare != "}" or self._lines is None:
            return []
        content, self._lines = "\n".join(self._lines), None
        try:
            total = _bytes_of(json.loads(content))
        except (ValueError, TypeError, KeyError, AttributeError):
            return []
        return self._step(total, now_ns)

    def _step(self, total: int, now_ns: int) -> list[Step]:
        before, began_ns = self._total, self._report_ns
        self._total, self._report_ns = total, now_ns
        if before is None:  # when fio began to write is unknown
            return [Step(now_ns, now_ns, 0)] if total else []
        return [Step(began_ns, now_ns, total - before)] if total > before else []

    def end(self, now_ns: int) -> list[Step]:
        """Return nothing: a report without its last brace is not known whole."""
        return []


def _bytes_of(report: Any) -> int:
    directions = [job[name] for job in report["jobs"] for name in ("read", "write", "trim") if name in job]
    return sum(int(direction["io_bytes"]) for direction in directions)
