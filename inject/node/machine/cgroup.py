"""A CPU limit for a cgroup: `cpu.max` (Documentation/admin-guide/cgroup-v2.rst)."""

from __future__ import annotations

import math
import time
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused

__all__ = ["CgroupActuator"]

UNLIMITED = "max 100000"


class CgroupActuator(Actuator):
    """Writes `value` ("QUOTA PERIOD", in µs) to cpu.max of `cgroup`.

    With `wave_s`, the quota varies as a sine wave around its value, with an amplitude of `swing_us` and a period of
    `wave_s`.
    """

    poll_s = 0.05
    loss_check_s = 0.2

    def __init__(self, *, cgroup: str, value: str, swing_us: int = 0, wave_s: float = 0.0) -> None:
        self._cgroup, self._value, self._swing_us, self._wave_s = cgroup, value, swing_us, wave_s
        self._began_ns = 0
        self._periods_before_on: int | None = None

    def prepare(self) -> dict[str, Any]:
        """Refuse a cgroup with a limit, and a cgroup without processes: throttling nothing proves nothing."""
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
        """Return a script that writes the default back. A cgroup that no longer exists needs no revert."""
        path = f"{self._cgroup}/cpu.max"
        return f"[ ! -e {path} ] || {{ echo {UNLIMITED} > {path} && grep -qx '{UNLIMITED}' {path}; }}"

    def on(self) -> None:
        if self._periods_before_on is None:
            self._periods_before_on = self._throttled_periods()
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
        """Return the number of periods in which the cgroup was throttled since the first `on`."""
        return 0 if self._periods_before_on is None else self._throttled_periods() - self._periods_before_on

    def _throttled_periods(self) -> int:
        stat = dict(line.split() for line in self._read("cpu.stat").splitlines())
        return int(stat.get("nr_throttled", 0))

    def _read(self, name: str) -> str:
        with open(f"{self._cgroup}/{name}", encoding="ascii") as file:  # noqa: PTH123 - start-up time
            return file.read().strip()

    def _write(self, value: str) -> None:
        with open(f"{self._cgroup}/cpu.max", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(value)
