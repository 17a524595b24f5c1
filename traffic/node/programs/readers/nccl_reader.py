"""Rows of nccl-tests: one for each size, with the wrong elements out of place and in place.

    #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
         1048576        262144     float     sum      -1    52.31   20.05   35.08      0    51.90   20.21   35.36      0

A row is one iteration: it is printed after all operations of its size (nccl-tests, `src/common.cu`, `TimeTest`).
"""

from __future__ import annotations

from faultbed.traffic.node.programs.readers.progress_step import Step

__all__ = ["ProgressReader"]

_COLUMNS = 13
_FIRST_TIME, _WRONG = 5, (8, 12)


class ProgressReader:
    """Reads the rows below the head of the table."""

    def __init__(self) -> None:
        self._row_ns: int | None = None

    def line(self, text: str, now_ns: int) -> list[Step]:
        """Return the iteration of a row. The first row only shows that the test is running: its begin is unknown."""
        cells = text.split()
        if (
            len(cells) != _COLUMNS
            or not cells[0].isdigit()
            or not cells[1].isdigit()
            or not _is_number(cells[_FIRST_TIME])
        ):
            return []
        began_ns, self._row_ns = self._row_ns, now_ns
        wrong = sum(int(cells[index]) for index in _WRONG if cells[index].isdigit())
        if began_ns is None:
            return [Step(now_ns, now_ns, 0, is_iteration=wrong > 0, wrong=wrong)]
        return [Step(began_ns, now_ns, 0, is_iteration=True, wrong=wrong)]

    def end(self, now_ns: int) -> list[Step]:
        """Return nothing: every row is complete."""
        return []


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
