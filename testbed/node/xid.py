"""What GPUs' drivers have told the kernel's log of errors of theirs: NVIDIA's XID events, counted by GPU.

The driver writes `NVRM: Xid (PCI:0000:1b:00): 79, ...` (NVIDIA, "XID Errors"); a soft GPU has its name for an address.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator

__all__ = ["EVENT", "SYNTHETIC", "XidLog", "event"]

EVENT = re.compile(r"NVRM: Xid \(PCI:([^)]+)\): (\d+)")
SYNTHETIC = "synthetic: written by a fault injector"
"""What follows an event that a fault has written."""


def event(text: str) -> tuple[str, int] | None:
    """The GPU (its PCIe address) and the number of an event; None: the line is none."""
    found = EVENT.search(text)
    return (found[1], int(found[2])) if found else None


class XidLog:
    """Reads on in the kernel's log where it was; what was there before it began is not counted."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._seen: Counter[str] = Counter()
        with contextlib.suppress(OSError):  # not root, or a kernel without printk
            self._file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)

    def counts(self) -> Counter[str]:
        """Events so far, by GPU."""
        for text in self._news():
            if found := event(text):
                self._seen[found[0]] += 1
        return self._seen

    def _news(self) -> Iterator[str]:
        while self._file is not None:
            try:
                yield os.read(self._file, 8192).decode(errors="replace")
            except BlockingIOError:
                return
            except BrokenPipeError:  # more came than the kernel keeps: it goes on with the oldest that is there
                continue

    def close(self) -> None:
        """Read no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
