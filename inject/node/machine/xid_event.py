"""An XID event in the kernel's log, as a GPU's driver would write it; synthetic, and it says so.

What is written stays in the log: there is nothing to bring back.
"""

from __future__ import annotations

import os
from typing import Any

from testbed.node.xid import SYNTHETIC, XidLog

__all__ = ["XidActuator"]

_ERROR = 3
"""The level at which NVIDIA's driver writes them (KERN_ERR)."""


class XidActuator:
    """Writes event `xid` of `gpu` at each onset."""

    poll_s = None

    def __init__(self, *, gpu: str, xid: int) -> None:
        self._gpu, self._xid = gpu, xid
        self._log = XidLog()
        self._on = False

    def prepare(self) -> dict[str, Any]:
        """Whether the log can be written to."""
        os.close(os.open("/dev/kmsg", os.O_WRONLY))
        return self.read()

    def revert_script(self) -> str:
        """Nothing."""
        return ":"

    def on(self) -> None:
        """Write it."""
        # Without its end of line a record waits for more, and nobody can read it (kernel/printk/printk.c).
        line = f"<{_ERROR}>NVRM: Xid (PCI:{self._gpu}): {self._xid}, {SYNTHETIC}\n"
        file = os.open("/dev/kmsg", os.O_WRONLY)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
        self._on = True

    def off(self) -> None:
        """It has been written."""
        self._on = False

    def read(self) -> dict[str, Any]:
        """How many the log has by now."""
        written = self._log.counts()[self._gpu]
        return {"applied": self._on and written > 0, "gpu": self._gpu, "events": written}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Let go of the log."""
        self._log.close()
