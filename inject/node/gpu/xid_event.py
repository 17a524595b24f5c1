"""An XID event in the kernel's log, as a GPU's driver would write it; its text says that it is synthetic.

An event stays in the log: there is nothing to revert.
"""

from __future__ import annotations

import os
from typing import Any

from faultbed.inject.node.actuator import Actuator
from faultbed.testbed.node.gpu.xid import SYNTHETIC, XidLog

__all__ = ["XidActuator", "require_log", "write_event"]

_ERROR = 3
"""The log level of NVIDIA's driver for these events (KERN_ERR)."""


def require_log() -> None:
    """Check that the kernel's log can be written.

    Raises:
        OSError: it cannot.
    """
    os.close(os.open("/dev/kmsg", os.O_WRONLY))


def write_event(gpu: str, xid: int) -> None:
    """Write an event into the kernel's log, signed as synthetic."""
    # A record without newline is not readable until the next one (kernel/printk/printk.c).
    line = f"<{_ERROR}>NVRM: Xid (PCI:{gpu}): {xid}, {SYNTHETIC}\n"
    file = os.open("/dev/kmsg", os.O_WRONLY)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


class XidActuator(Actuator):
    """Writes event `xid` of `gpu` at each onset."""

    def __init__(self, *, gpu: str, xid: int) -> None:
        self._gpu, self._xid = gpu, xid
        self._log = XidLog()
        self._on = False

    def prepare(self) -> dict[str, Any]:
        """Refuse a log that cannot be written."""
        require_log()
        return self.read()

    def revert_script(self) -> str:
        return ":"

    def on(self) -> None:
        write_event(self._gpu, self._xid)
        self._on = True

    def off(self) -> None:
        self._on = False

    def read(self) -> dict[str, Any]:
        """Count the GPU's events in the log."""
        written = self._log.counts()[self._gpu]
        return {"applied": self._on and written > 0, "gpu": self._gpu, "events": written}

    def close(self) -> None:
        self._log.close()
