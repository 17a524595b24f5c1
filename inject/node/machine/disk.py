"""A full disk: an open file without a name takes all free space of a file system.

The space is freed when the holder ends for any reason, or by a reboot. There is nothing else to revert, and nothing can
be left behind (open(2), O_TMPFILE).
"""

from __future__ import annotations

import os
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused

__all__ = ["FOLDER", "DiskActuator"]

FOLDER = "/var/lib"
"""A folder on the file system that the fault fills."""

_LEFT_BYTES = 64 << 10


class DiskActuator(Actuator):
    """Fills the file system of `folder`, including root's reserve."""

    def __init__(self, *, folder: str = FOLDER) -> None:
        self._folder = folder
        self._file = -1

    def prepare(self) -> dict[str, Any]:
        """Refuse a file system that is full already."""
        if self._free() < _LEFT_BYTES:
            raise Refused(
                f"the file system of {self._folder} is already full, and not because of a fault; free space there first"
            )
        return self.read()

    def revert_script(self) -> str:
        return "true"

    def on(self) -> None:
        """Allocate free space in parts that get smaller, because a file system keeps an unknown reserve."""
        self._file = self._unnamed()
        size, part = 0, self._free()
        while part >= _LEFT_BYTES:
            try:
                os.posix_fallocate(self._file, size, part)
                size += part
                part = min(part, self._free())
            except OSError:
                part //= 2

    def off(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def read(self) -> dict[str, Any]:
        """Report whether the file is open, its size, and the free space."""
        taken_bytes = os.fstat(self._file).st_blocks * 512 if self._file >= 0 else 0
        return {
            "applied": self._file >= 0,
            "folder": self._folder,
            "taken_bytes": taken_bytes,
            "left_bytes": self._free(),
        }

    def is_lost(self) -> bool:
        """Return whether the file is closed, or the file system has free space because something else was deleted."""
        from faultbed.testbed.node.counts import is_full  # noqa: PLC0415 - start-up time

        return self._file < 0 or not is_full(self._folder)

    def close(self) -> None:
        self.off()

    def _unnamed(self) -> int:
        try:
            return os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:  # the file system does not support O_TMPFILE
            path = f"{self._folder}/faultbed-full"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.unlink(path)  # noqa: PTH108 - start-up time
            return file

    def _free(self) -> int:
        usage = os.statvfs(self._folder)
        return usage.f_bfree * usage.f_bsize
