"""Readers of progress: each turns the output of one program into steps, as the lines arrive. Pure.

A step says what the program did between two times. A reader invents nothing: what it does not recognise is no step.
"""

from __future__ import annotations

import importlib

from faultbed.traffic.node.programs.readers.progress_step import Step

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Protocol

    class Reader(Protocol):
        """Reads the output of one process."""

        def line(self, text: str, now_ns: int) -> list[Step]:
            """Return the steps that a line reports. It arrived at `now_ns` (CLOCK_MONOTONIC)."""

        def end(self, now_ns: int) -> list[Step]:
            """Return the steps that only the end of the output shows."""


__all__ = ["COUNTERS", "LINES", "NAMES", "Step", "reader_of"]

COUNTERS = "counters"
"""Progress by the counters of the RNIC, instead of the program's output."""
LINES = "lines:"
"""Prefix of a regular expression that matches each line which reports an iteration."""
_MODULES = {
    "fio": "fio_reader",
    "nccl-tests": "nccl_reader",
    "perftest": "perftest_reader",
    "rping": "rping_reader",
}
NAMES = (*_MODULES, COUNTERS)
"""Names of the readers; a regular expression after `LINES` is another one."""


def reader_of(progress: str) -> Reader | None:
    """Return a new reader; None: the counters of the RNIC show the progress.

    Raises:
        ValueError: the regular expression is invalid.
        KeyError: no reader has this name.
    """
    if progress == COUNTERS:
        return None
    module, pattern = (
        ("line_reader", [progress[len(LINES) :]]) if progress.startswith(LINES) else (_MODULES[progress], [])
    )
    made: Reader = importlib.import_module(f"{__name__}.{module}").ProgressReader(*pattern)
    return made
