"""Rows of perftest's bandwidth tests: `ib_write_bw`, `ib_read_bw`, `ib_send_bw` and their relatives.

     #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
     65536      2310             0.00               1.21               0.002310

With `--run_infinitely`, perftest prints a row every `-D` seconds, with the iterations since the row before (perftest's
`perftest_resources.c`, `handle_signal_print_thread`). A row has no time: its interval is that between the arrivals of
two rows. When the first interval began is unknown, as the connection is made after the head of the table is printed, so
the first row only shows that data moves. A test that prints a single row has moved its bytes at an unknown time between
the head and the row.
"""

from __future__ import annotations

import re

from faultbed.traffic.node.programs.readers.progress_step import Step

__all__ = ["ProgressReader"]

_HEAD = re.compile(r"\s*#bytes\s+#iterations\s+BW peak\[(MB|Gb)/sec\]")
_ROW = re.compile(r"\s*(\d+)\s+(\d+)\s+(?:\d+\.\d+|inf)\s+(\d+\.\d+|inf)\s+(\d+\.\d+|inf)(?:\s|$)")


class ProgressReader:
    """Reads the rows below the head of the table."""

    def __init__(self) -> None:
        self._head_ns: int | None = None
        self._row_ns: int | None = None
        self._single: Step | None = None

    def line(self, text: str, now_ns: int) -> list[Step]:
        """Return the progress of a row."""
        if _HEAD.match(text):
            self._head_ns = now_ns
            return []
        row = _ROW.match(text)
        if row is None or self._head_ns is None:
            return []
        size, began_ns = int(row[1]) * int(row[2]), self._row_ns
        self._row_ns = now_ns
        if began_ns is None:
            self._single = Step(self._head_ns, now_ns, size)
            return [Step(now_ns, now_ns, 0)]
        self._single = None
        return [Step(began_ns, now_ns, size)]

    def end(self, now_ns: int) -> list[Step]:
        """Return the only row, if there was no other one."""
        return [] if self._single is None else [self._single]
