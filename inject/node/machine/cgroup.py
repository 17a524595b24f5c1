"""A CPU limit for a cgroup: `cpu.max` (Documentation/admin-guide/cgroup-v2.rst)."""

from __future__ import annotations

import math
import time
from typing import Any

from inject.node.actuator import Actuator, Refused

__all__ = ["CgroupActuator"]

UNLIMITED = "max 100000"


class CgroupActuator(Actuator):
    """Writes `value` ("QUOTA PERIOD", in µs) to cpu.max of `cgroup`.

    With `swing_us` and `wave_s` the quota follows a sine of that amplitude and period around its value, starting at
    `value`.
    """

    poll_s = 0.05
    look_s = 0.2

    def __init__(self, *, cgroup: str, value: str, swing_us: int = 0, wave_s: float = 0.0) -> None:
        self._cgroup, self._value, self._swing_us, self._wave_s = cgroup, value, swing_us, wave_s
        self._began_ns = 0
        self._base: int | None = None

    def prepare(self) -> dict[str, Any]:
        """Refuse an existing limit, and a group without processes: throttling nothing proves nothing."""
        try:
            before = self._read("cpu.max")
        except FileNotFoundError:
            raise Refused(
                f"{self._cgroup} has no cpu.max; start the soft GPU, with the cpu controller enabled in its slice"
            ) from None
        if before != UNLIMITED:
            raise Refused(f"{self._cgroup}/cpu.max is already {before!r}, and no fault set it; run `faultbed heal`")
        if not self._read("cgroup.procs"):
            raise Refused(f"no process is in {self._cgroup}; start the soft GPU")
        return self.read()

    def revert_script(self) -> str:
        """Return a script that writes the default back; a group that is gone has no limit."""
        path = f"{self._cgroup}/cpu.max"
        return f"[ ! -e {path} ] || {{ echo {UNLIMITED} > {path} && grep -qx '{UNLIMITED}' {path}; }}"

    def on(self) -> None:
        if self._base is None:
            self._base = self._throttled()
        self._began_ns = time.monotonic_ns()
        self._write(self._value)

    def tick(self, now_ns: int) -> None:
        if self._wave_s:
            quota, period = self._value.split()
            phase = 2 * math.pi * (now_ns - self._began_ns) / 1e9 / self._wave_s
            self._write(f"{round(int(quota) + self._swing_us * math.sin(phase))} {period}")

    def off(self) -> None:
        self._write(UNLIMITED)

    def read(self) -> dict[str, Any]:
        now = self._read("cpu.max")
        applied = now not in (UNLIMITED, "") if self._wave_s else now == self._value
        return {"applied": applied, "cpu.max": now, "cgroup": self._cgroup}

    def hits(self) -> int:
        """Return the number of periods in which the group was throttled since the first `on`."""
        return 0 if self._base is None else self._throttled() - self._base

    def _throttled(self) -> int:
        stat = dict(line.split() for line in self._read("cpu.stat").splitlines())
        return int(stat.get("nr_throttled", 0))

    def _read(self, name: str) -> str:
        with open(f"{self._cgroup}/{name}", encoding="ascii") as file:  # noqa: PTH123 - start-up time
            return file.read().strip()

    def _write(self, value: str) -> None:
        with open(f"{self._cgroup}/cpu.max", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(value)
