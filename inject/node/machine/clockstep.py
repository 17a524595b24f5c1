"""The wall clock stepped forwards or back, as by a time server that lies: CLOCK_REALTIME only, others go on.

What is remembered is how far the wall clock is ahead of the machine's own uptime (CLOCK_BOOTTIME), so that the way back
is right however long it took, and right again when it is gone twice.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["ClockStepActuator"]


class ClockStepActuator:
    """Steps the wall clock by `step_s` (negative: back)."""

    poll_s = None

    def __init__(self, *, step_s: int) -> None:
        self._step_s = step_s
        self._ahead_s = _ahead_s()

    def prepare(self) -> dict[str, Any]:
        """Remember how it stands."""
        self._ahead_s = _ahead_s()
        return self.read()

    def revert_script(self) -> str:
        """As far ahead of the uptime as it was."""
        program = (
            f"import time; time.clock_settime({time.CLOCK_REALTIME}, "
            f"time.clock_gettime({time.CLOCK_BOOTTIME}) + {self._ahead_s!r})"
        )
        return f"python3 -c '{program}'"

    def on(self) -> None:
        """Step it."""
        self._set(self._ahead_s + self._step_s)

    def off(self) -> None:
        """Step it back."""
        self._set(self._ahead_s)

    def read(self) -> dict[str, Any]:
        """How far it stands from where it was."""
        stepped_s = round(_ahead_s() - self._ahead_s, 3)
        return {"applied": abs(stepped_s) > abs(self._step_s) / 2, "stepped_s": round(stepped_s)}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Nothing is held open."""

    def _set(self, ahead_s: float) -> None:
        time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_BOOTTIME) + ahead_s)


def _ahead_s() -> float:
    return time.clock_gettime(time.CLOCK_REALTIME) - time.clock_gettime(time.CLOCK_BOOTTIME)
