"""A process group that gets less CPU: `cpu.max` of its cgroup (Documentation/admin-guide/cgroup-v2.rst)."""

from __future__ import annotations

import math
import time
from typing import Any

from inject.node.actuator import Refused

__all__ = ["CgroupActuator"]

UNLIMITED = "max 100000"


class CgroupActuator:
    """Writes `value` ("QUOTA PERIOD", in µs) to cpu.max of `cgroup`.

    With `swing_us` and `wave_s` the quota swings by that much around its value, as a sine that begins at `value`.
    """

    poll_s = 0.05

    def __init__(self, *, cgroup: str, value: str, swing_us: int = 0, wave_s: float = 0.0) -> None:
        self._cgroup, self._value, self._swing_us, self._wave_s = cgroup, value, swing_us, wave_s
        self._began_ns = 0
        self._base: int | None = None

    def prepare(self) -> dict[str, Any]:
        """Refuse a limit that is not ours, and a group without processes: throttling nothing proves nothing."""
        try:
            before = self._read("cpu.max")
        except FileNotFoundError:
            raise Refused(
                f"{self._cgroup} has no cpu.max: is the soft GPU running, with the cpu controller on in its slice?"
            ) from None
        if before != UNLIMITED:
            raise Refused(f"{self._cgroup}/cpu.max is already {before!r}, and not by us: run `faultbed heal`")
        if not self._read("cgroup.procs"):
            raise Refused(f"no process is in {self._cgroup}: is the soft GPU running?")
        return self.read()

    def revert_script(self) -> str:
        """Write the default back; a group that is gone has no limit."""
        path = f"{self._cgroup}/cpu.max"
        return f"[ ! -e {path} ] || {{ echo {UNLIMITED} > {path} && grep -qx '{UNLIMITED}' {path}; }}"

    def on(self) -> None:
        """Limit."""
        if self._base is None:
            self._base = self._throttled()
        self._began_ns = time.monotonic_ns()
        self._write(self._value)

    def tick(self, now_ns: int) -> None:
        """Follow the wave; asked for at every poll while the fault is on."""
        if self._wave_s:
            quota, period = self._value.split()
            phase = 2 * math.pi * (now_ns - self._began_ns) / 1e9 / self._wave_s
            self._write(f"{round(int(quota) + self._swing_us * math.sin(phase))} {period}")

    def off(self) -> None:
        """Limit no more."""
        self._write(UNLIMITED)

    def read(self) -> dict[str, Any]:
        """`cpu.max` as it stands."""
        now = self._read("cpu.max")
        applied = now not in (UNLIMITED, "") if self._wave_s else now == self._value
        return {"applied": applied, "cpu.max": now, "cgroup": self._cgroup}

    def hits(self) -> int:
        """Periods in which the group was held back since the first `on`."""
        return 0 if self._base is None else self._throttled() - self._base

    def close(self) -> None:
        """Nothing is held open."""

    def _throttled(self) -> int:
        stat = dict(line.split() for line in self._read("cpu.stat").splitlines())
        return int(stat.get("nr_throttled", 0))

    def _read(self, name: str) -> str:
        with open(f"{self._cgroup}/{name}", encoding="ascii") as file:  # noqa: PTH123 - start-up time
            return file.read().strip()

    def _write(self, value: str) -> None:
        with open(f"{self._cgroup}/cpu.max", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(value)
