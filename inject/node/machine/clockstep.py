"""The wall clock stepped forwards or back, as by a wrong time server: CLOCK_REALTIME only.

The offset of the wall clock to the machine's uptime (CLOCK_BOOTTIME) is stored. The revert is therefore exact however
long the fault lasted, and may run any number of times.
"""

from __future__ import annotations

import time
from typing import Any

from faultbed.inject.node.actuator import Actuator

__all__ = ["ClockStepActuator"]


class ClockStepActuator(Actuator):
    """Steps the wall clock by `step_s` (negative: back)."""

    def __init__(self, *, step_s: int) -> None:
        self._step_s = step_s
        self._ahead_s = _ahead_s()

    def prepare(self) -> dict[str, Any]:
        self._ahead_s = _ahead_s()
        return self.read()

    def revert_script(self) -> str:
        """Return a script that restores the stored offset to the uptime."""
        program = (
            f"import time; time.clock_settime({time.CLOCK_REALTIME}, "
            f"time.clock_gettime({time.CLOCK_BOOTTIME}) + {self._ahead_s!r})"
        )
        return f"python3 -c '{program}'"

    def on(self) -> None:
        self._set(self._ahead_s + self._step_s)

    def off(self) -> None:
        self._set(self._ahead_s)

    def read(self) -> dict[str, Any]:
        """Report how far the wall clock is from the stored offset; `applied` if that is over half of the step."""
        stepped_s = round(_ahead_s() - self._ahead_s, 3)
        return {"applied": abs(stepped_s) > abs(self._step_s) / 2, "stepped_s": round(stepped_s)}

    def _set(self, ahead_s: float) -> None:
        time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_BOOTTIME) + ahead_s)


def _ahead_s() -> float:
    return time.clock_gettime(time.CLOCK_REALTIME) - time.clock_gettime(time.CLOCK_BOOTTIME)
