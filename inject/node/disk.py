"""A disk that is full: one file takes all that is left of a file system."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from inject.node.actuator import Refused

__all__ = ["FILE", "DiskActuator"]

FILE = "/var/lib/faultbed-full"
"""What takes the room: the mark that `heal` goes by."""

_LEFT_BYTES = 64 << 10


class DiskActuator:
    """Fills the file system of `FILE`, root's reserve too."""

    poll_s = None

    def __init__(self) -> None:
        self._folder = os.path.dirname(FILE)  # noqa: PTH120 - start-up time

    def prepare(self) -> dict[str, Any]:
        """Refuse where the file is there already, or the room cannot be taken without writing it."""
        if os.path.exists(FILE):  # noqa: PTH110 - start-up time
            raise Refused(f"{FILE} is already there: a leftover? run `faultbed heal`")
        return self.read()

    def revert_script(self) -> str:
        """Away with it."""
        return f"rm -f {FILE}"

    def on(self) -> None:
        """Take what is left, in parts that grow smaller: a file system keeps some for itself, nobody knows how much."""
        size, part = 0, self._free()
        file = os.open(FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while part >= _LEFT_BYTES:
                try:
                    os.posix_fallocate(file, size, part)
                    size += part
                    part = min(part, self._free())
                except OSError:
                    part //= 2
        finally:
            os.close(file)

    def off(self) -> None:
        """Give it back."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(FILE)  # noqa: PTH108 - start-up time

    def read(self) -> dict[str, Any]:
        """Whether the file is there, and what is left."""
        there = os.path.exists(FILE)  # noqa: PTH110 - start-up time
        return {"applied": there, "file": FILE, "left_bytes": self._free()}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Nothing is held open."""

    def _free(self) -> int:
        seen = os.statvfs(self._folder)
        return seen.f_bfree * seen.f_bsize
