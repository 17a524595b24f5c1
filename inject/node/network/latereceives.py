"""A receiver that is not ready: programs of ours on this host post receives late, or not at all.

They look for a file that says by how much (`traffic.node.flows.late`, which has the same name for it).
"""

from __future__ import annotations

import contextlib
import glob
import os
from typing import Any

from inject.node.actuator import Refused

__all__ = ["FILE", "LateReceivesActuator"]

FILE = "/run/faultbed/late-receives"
"""The mark that `heal` goes by, too. Below /run: no boot finds it."""
_COUNTED = "/sys/class/infiniband/*/ports/1/hw_counters"
# rxe's name, and mlx5's, which counts what came and found no receive (not yet run on hardware).
_SENT = ("send_rnr_err", "out_of_buffer")


class LateReceivesActuator:
    """Writes `late_ms` into `FILE`; 0: none for as long as it is there."""

    poll_s = 0.1

    def __init__(self, *, late_ms: int) -> None:
        self._late_ms = late_ms
        self._before: int | None = None

    def prepare(self) -> dict[str, Any]:
        """Refuse where the file is there already, and where no RNIC would count what it does."""
        if os.path.exists(FILE):  # noqa: PTH110 - start-up time
            raise Refused(f"{FILE} is already there: a leftover? run `faultbed heal`")
        if _sent() is None:
            raise Refused(f"no RNIC of this host has {' or '.join(_SENT)} below hw_counters: nothing could be counted")
        return self.read()

    def revert_script(self) -> str:
        """Away with it."""
        return f"rm -f {FILE}"

    def on(self) -> None:
        """Write it; whole, or not at all, for it may be read at any moment."""
        if self._before is None:
            self._before = _sent()
        os.makedirs(os.path.dirname(FILE), exist_ok=True)  # noqa: PTH103, PTH120 - start-up time
        beside = f"{FILE}.new"
        with open(beside, "w", encoding="ascii") as file:  # noqa: PTH123 - start-up time
            file.write(f"{self._late_ms}\n")
        os.rename(beside, FILE)  # noqa: PTH104 - start-up time

    def off(self) -> None:
        """Take it away."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(FILE)  # noqa: PTH108 - start-up time

    def read(self) -> dict[str, Any]:
        """Whether the file is there, and what it says."""
        said = None
        with contextlib.suppress(FileNotFoundError), open(FILE, encoding="ascii") as file:  # noqa: PTH123
            said = file.read().strip()
        return {"applied": said == str(self._late_ms), "file": FILE, "late_ms": said}

    def hits(self) -> int | None:
        """RNR NAKs that the RNICs of this host have sent since the first `on`; None: they do not count them."""
        sent = _sent()
        return None if sent is None or self._before is None else sent - self._before

    def close(self) -> None:
        """Nothing is held open."""


def _sent() -> int | None:
    found = []
    for path in (path for name in _SENT for path in glob.glob(f"{_COUNTED}/{name}")):  # noqa: PTH207 - start-up time
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:  # noqa: PTH123
            found.append(int(file.read()))
    return sum(found) if found else None
