"""Rows of nccl-tests: one for each size, with the wrong elements out of place and in place.

    #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
         1048576        262144     float     sum      -1    52.31   20.05   35.08      0    51.90   20.21   35.36      0

A row is one iteration: it is printed after all operations of its size, also if `-J` writes JSON to a file beside it.
`-S` appends a timestamp, `-I` four columns to each half, and a replayed trace has one half. Times of 10 s and more, and
a million wrong elements and more, are printed with an exponent (nccl-tests 2.19, `src/util.cu`,
`writeBenchmarkLineBody` and `getFloatStr`). Launchers may put the rank before each line.
"""

from __future__ import annotations

import re

from faultbed.traffic.node.programs.readers.progress_step import Step

__all__ = ["ProgressReader"]

_TAG = re.compile(r"^(?:\[[^\]\s]+\](?:<std(?:out|err)>)?: ?|\s*[0-9]+: )")
"""`[1,0]<stdout>:` of mpirun --tag-output, `12: ` of srun --label."""
_ROW = re.compile(r"\s*[0-9]+\s+[0-9]+\s+[A-Za-z]\w*\s+\w+\s+-?[0-9]+\s")
"""Size, count, type, redop and root."""
_TIMESTAMP = re.compile(r"\s+[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}\s*$")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:e\+?[0-9]+)?")
_NAMES, _TIMES = 5, 3
_HALVES = {4: 4, 8: 4, 16: 8}
"""Length of a half by the number of columns after the names: one half, two, and two of `-I`.

One half with `-I` has 8 columns, too. Its last one is no count, so that it is not read, rather than read wrongly.
"""
_COUNT = re.compile(r"[0-9]+|[0-9](?:\.[0-9]+)?e\+[0-9]+")
_WRONG, _NOT_CHECKED = 3, "N/A"


class ProgressReader:
    """Reads the rows below the head of the table."""

    def __init__(self) -> None:
        self._row_ns: int | None = None

    def line(self, text: str, now_ns: int) -> list[Step]:
        """Return the iteration of a row. The first row only shows that the test is running: its begin is unknown."""
        wrong = _wrong_in(_TIMESTAMP.sub("", _TAG.sub("", text)))
        if wrong is None:
            return []
        began_ns, self._row_ns = self._row_ns, now_ns
        if began_ns is None:
            return [Step(now_ns, now_ns, 0, is_iteration=wrong > 0, wrong=wrong)]
        return [Step(began_ns, now_ns, 0, is_iteration=True, wrong=wrong)]

    def end(self, now_ns: int) -> list[Step]:
        """Return nothing: every row is complete."""
        return []


def _wrong_in(text: str) -> int | None:
    """Return the wrong elements of a row; None: it is no row, or not one that can be read whole."""
    if _ROW.match(text) is None:
        return None
    columns = text.split()[_NAMES:]
    half = _HALVES.get(len(columns))
    if half is None:
        return None
    wrong = 0
    for at in range(0, len(columns), half):
        counted = columns[at + _WRONG]
        if not all(map(_NUMBER.fullmatch, columns[at : at + _TIMES])):
            return None
        if counted != _NOT_CHECKED and _COUNT.fullmatch(counted) is None:
            return None
        wrong += 0 if counted == _NOT_CHECKED else round(float(counted))
    return wrong
