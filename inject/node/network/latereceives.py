"""A receiver that is not ready: the traffic engine on this host posts receives late, or not at all.

The engine reads the delay from a file (`faultbed.traffic.node.flows.late`, which has the same name for it).
"""

from __future__ import annotations

import contextlib
import glob
import os
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused

__all__ = ["FILE", "LateReceivesActuator"]

FILE = "/run/faultbed/late-receives"
"""The file, which `heal` removes. It is below /run, so that it does not survive a boot."""
_COUNTED = "/sys/class/infiniband/*/ports/1/hw_counters"
# rxe's counter, and mlx5's, which counts messages without a posted receive (not yet run on hardware).
_SENT = ("send_rnr_err", "out_of_buffer")


class LateReceivesActuator(Actuator):
    """Writes `late_ms` into `FILE`; 0: no receives are posted while the file exists."""

    poll_s = 0.1
    loss_check_s = 0.2

    def __init__(self, *, late_ms: int) -> None:
        self._late_ms = late_ms
        self._before: int | None = None

    def prepare(self) -> dict[str, Any]:
        """Refuse an existing file, and a host without a counter of RNR NAKs."""
        if os.path.exists(FILE):  # noqa: PTH110 - start-up time
            raise Refused(f"{FILE} already exists, a leftover of a fault; run `faultbed heal`")
        if _sent() is None:
            raise Refused(f"no RNIC of this host has {' or '.join(_SENT)} below hw_counters; choose another host")
        return self.read()

    def revert_script(self) -> str:
        return f"rm -f {FILE}"

    def on(self) -> None:
        """Write the file atomically, because the engine may read it at any moment."""
        if self._before is None:
            self._before = _sent()
        os.makedirs(os.path.dirname(FILE), exist_ok=True)  # noqa: PTH103, PTH120 - start-up time
        temporary = f"{FILE}.new"
        with open(temporary, "w", encoding="ascii") as file:  # noqa: PTH123 - start-up time
            file.write(f"{self._late_ms}\n")
        os.rename(temporary, FILE)  # noqa: PTH104 - start-up time

    def off(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(FILE)  # noqa: PTH108 - start-up time

    def read(self) -> dict[str, Any]:
        """Report whether the file exists, and its content."""
        content = None
        with contextlib.suppress(FileNotFoundError), open(FILE, encoding="ascii") as file:  # noqa: PTH123
            content = file.read().strip()
        return {"applied": content == str(self._late_ms), "file": FILE, "late_ms": content}

    def hits(self) -> int | None:
        """Return the RNR NAKs sent by this host's RNICs since the first `on`; None before it, or without a counter."""
        sent = _sent()
        return None if sent is None or self._before is None else sent - self._before


def _sent() -> int | None:
    counts = []
    for path in (path for name in _SENT for path in glob.glob(f"{_COUNTED}/{name}")):  # noqa: PTH207 - start-up time
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:  # noqa: PTH123
            counts.append(int(file.read()))
    return sum(counts) if counts else None
