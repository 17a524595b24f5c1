"""Count NVIDIA's XID events by GPU, from the kernel's log.

The driver logs `NVRM: Xid (PCI:0000:1b:00): 79, ...` (NVIDIA, "XID Errors"); a soft GPU has its name as address.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator

__all__ = ["EVENT", "SYNTHETIC", "XIDS", "XidLog", "event"]

EVENT = re.compile(r"NVRM: Xid \(PCI:([^) ]+)[^)]*\): (\d+)")
"""The address of a MIG device, `0000:c8:00 GPU-I:05`, begins with that of its GPU."""
_HEALED = re.compile(r"\): 154, .* to 0x0 \(None\)|\): 14[4-9], .*\bNonfatal\b|\): 150, .*\bNonfatal\b")
"""Events that call for nothing: no recovery is needed any more, and NVLink errors that the hardware has corrected."""
XIDS = {"high-rate": 92, "contained": 94, "uncontained": 95, "pending": 63, "failed": 64}
"""Numbers of memory errors and row remappings. A corrected error has none: the driver logs 92 once their rate is too
high (NVIDIA, "XID Errors" and "GPU Memory Error Management")."""
SYNTHETIC = "synthetic: written by a fault injector"
"""Text of an event that a fault has written."""


def event(text: str) -> tuple[str, int] | None:
    """Return the GPU (its PCIe address) and the number of an event.

    None: the line is not an event, or it says that the GPU needs nothing.
    """
    match = EVENT.search(text)
    return None if match is None or _HEALED.search(text) else (match[1], int(match[2]))


class XidLog:
    """Counter of the XID events that the kernel logs after the creation of this object."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._counts: Counter[str] = Counter()
        with contextlib.suppress(OSError):  # not root, or a kernel without printk
            self._file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)

    def counts(self) -> Counter[str]:
        """Return the events so far, by GPU."""
        for text in self._new_records():
            if gpu_event := event(text):
                self._counts[gpu_event[0]] += 1
        return self._counts

    def _new_records(self) -> Iterator[str]:
        while self._file is not None:
            try:
                yield os.read(self._file, 8192).decode(errors="replace")
            except BlockingIOError:
                return
            except BrokenPipeError:  # records were overwritten: continue with the oldest that exists
                continue

    def close(self) -> None:
        """Close the log."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
