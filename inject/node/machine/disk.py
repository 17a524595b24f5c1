"""A disk that is full: an open file without a name takes all that is left of a file system.

It lives as long as the process that has it open: the end of the holder, however it comes, and a reboot give the room
back. There is nothing else to revert, and nothing that could be left (open(2), O_TMPFILE).
"""

from __future__ import annotations

import os
from typing import Any

from inject.node.actuator import Refused

__all__ = ["FOLDER", "DiskActuator"]

FOLDER = "/var/lib"
"""A folder of the file system that is filled."""

_LEFT_BYTES = 64 << 10


class DiskActuator:
    """Fills the file system of `folder`, root's reserve too."""

    poll_s = None

    def __init__(self, *, folder: str = FOLDER) -> None:
        self._folder = folder
        self._file = -1

    def prepare(self) -> dict[str, Any]:
        """Refuse a file system that is full already."""
        if self._free() < _LEFT_BYTES:
            raise Refused(f"the file system of {self._folder} is full already, and not by us: make room there first")
        return self.read()

    def revert_script(self) -> str:
        """Return a command that does nothing: the room is given back when the holder ends."""
        return "true"

    def on(self) -> None:
        """Take what is left, in parts that grow smaller: a file system keeps some for itself, nobody knows how much."""
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
        """Close the file, which gives the room back."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def read(self) -> dict[str, Any]:
        """Whether the file is open, how large it is, and what is left of the file system."""
        taken = os.fstat(self._file).st_blocks * 512 if self._file >= 0 else 0
        return {
            "applied": self._file >= 0,
            "folder": self._folder,
            "taken_bytes": taken,
            "left_bytes": self._free(),
        }

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Close the file if it is still open."""
        self.off()

    def _unnamed(self) -> int:
        try:
            return os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:  # a file system that has no such files
            path = f"{self._folder}/faultbed-full"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.unlink(path)  # noqa: PTH108 - start-up time
            return file

    def _free(self) -> int:
        seen = os.statvfs(self._folder)
        return seen.f_bfree * seen.f_bsize
