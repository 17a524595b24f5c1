"""Memory errors, row remapping and heat of a soft GPU: synthetic registers, with the effects that the real ones have.

The registers are those of `faultbed.testbed.node.gpu.health`, which the watcher, preflight and the soft GPU itself
read. `off` has the effect of a reset (memory, rows) or of cooling down (heat).
"""

from __future__ import annotations

import time
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.gpu.xid_event import require_log, write_event
from faultbed.inject.node.machine.cgroup import CgroupActuator
from faultbed.inject.node.machine.service import ServiceActuator
from faultbed.testbed.node.gpu.health import IDLE_C, SHUTDOWN_C, SLOWDOWN_C, Health
from faultbed.testbed.node.gpu.xid import XIDS

__all__ = ["GpuHeatActuator", "GpuMemoryActuator", "GpuRowsActuator"]

_OFF_THE_BUS = 79


class _Register(Actuator):
    """Sets registers of one part of a GPU, and resets them."""

    part = ""
    loss_check_s = 0.2

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._health = Health(gpu)

    def prepare(self) -> dict[str, Any]:
        """Refuse registers that are set already, and a kernel log that cannot be written."""
        if (state := self._health.state(self.part)) is not None:
            raise Refused(f"{self._gpu}: its {self.part} is already set to {state}; run `faultbed heal`")
        require_log()
        return self.read()

    def revert_script(self) -> str:
        path = self._health.file(self.part)
        return f"rm -f {path} && [ ! -e {path} ]"

    def off(self) -> None:
        self._health.reset(self.part)

    def read(self) -> dict[str, Any]:
        """Return the registers that are set."""
        state = self._health.state(self.part)
        return {"applied": state is not None, "gpu": self._gpu, self.part: state}


class GpuMemoryActuator(_Register):
    """Adds memory errors to the counters: `count` at the onset, and `rate` more each second.

    `error` is `corrected`, `high-rate` (corrected, and so many that the driver reports them), `contained` or
    `uncontained`.
    """

    part = "memory"

    def __init__(self, *, gpu: str, error: str, count: int, rate: float = 0.0) -> None:
        super().__init__(gpu)
        self._error, self._count, self._rate = error, count, rate
        self._name = "ecc_corrected" if error in ("corrected", "high-rate") else "ecc_uncorrected"
        self._errors = 0
        self._began_ns: int | None = None
        self.poll_s = 0.1 if rate else None

    def on(self) -> None:
        self._began_ns = time.monotonic_ns()
        self._add_errors(self._count)

    def tick(self, now_ns: int) -> None:
        if self._began_ns is not None:
            due = self._count + int(self._rate * (now_ns - self._began_ns) / 1e9)
            if due > self._errors:
                self._add_errors(due - self._errors)

    def _add_errors(self, more: int) -> None:
        is_first, self._errors = self._errors == 0, self._errors + more
        self._health.count(self.part, **{f"{self._name}_total": more})
        self._health.set(self.part, **{self._name: self._errors, "error": self._error})
        # The driver reports each uncorrected error, but a high rate only once.
        if self._error in XIDS and (is_first or self._name == "ecc_uncorrected"):
            write_event(self._gpu, XIDS[self._error])

    def hits(self) -> int:
        """Return the number of errors so far."""
        return self._errors


class GpuRowsActuator(_Register):
    """Marks a row of memory for remapping at the next reset (`pending`), or lets its remapping fail (`failed`)."""

    part = "rows"

    def __init__(self, *, gpu: str, remap: str) -> None:
        super().__init__(gpu)
        self._remap = remap

    def on(self) -> None:
        if self._remap == "pending":
            # This register counts InfoROM entries, and the driver writes an entry at once, not at the reset.
            self._health.count(self.part, remapped_rows=1)
        self._health.set(self.part, **{f"remap_{self._remap}": 1})
        write_event(self._gpu, XIDS[self._remap])


class GpuHeatActuator(_Register):
    """Heats a GPU to `celsius`.

    From `SLOWDOWN_C` on the GPU slows itself down (`slow`: the value of cpu.max of its `cgroup`). From `SHUTDOWN_C` on
    it is lost, with XID 79: its service `unit` has no process until the fault ends.
    """

    part = "heat"

    def __init__(self, *, gpu: str, celsius: int, unit: str, cgroup: str, slow: str) -> None:
        super().__init__(gpu)
        self._celsius = celsius
        self._effect: Actuator | None = None
        if celsius >= SHUTDOWN_C:
            self._effect = ServiceActuator(unit=unit, cgroup=cgroup)
        elif celsius >= SLOWDOWN_C:
            self._effect = CgroupActuator(cgroup=cgroup, value=slow)
        self.patience_s = self._effect.patience_s if self._effect else 0.0

    def prepare(self) -> dict[str, Any]:
        if self._celsius <= IDLE_C:
            raise Refused(
                f"{self._gpu}: {self._celsius} °C is not above its idle temperature of {IDLE_C} °C; choose more"
            )
        if self._effect is not None:
            self._effect.prepare()
        return super().prepare()

    def revert_script(self) -> str:
        own = super().revert_script()
        return own if self._effect is None else f"{own} && {{ {self._effect.revert_script()}; }}"

    def on(self) -> None:
        is_slowed = SLOWDOWN_C <= self._celsius < SHUTDOWN_C
        slowed = {"slowed_since_ns": time.monotonic_ns()} if is_slowed else {}
        self._health.set(self.part, temp_c=self._celsius, **slowed)
        if self._effect is not None:
            self._effect.on()
        if self._celsius >= SHUTDOWN_C:
            write_event(self._gpu, _OFF_THE_BUS)

    def off(self) -> None:
        if self._effect is not None:
            self._effect.off()
        since_ns = (self._health.state(self.part) or {}).get("slowed_since_ns")
        super().off()
        if since_ns is not None:
            self._health.count(self.part, thermal_slowdown_us=(time.monotonic_ns() - since_ns) // 1000)

    def read(self) -> dict[str, Any]:
        """Return the temperature and its effect. `applied` is true as long as either of them is left."""
        register = super().read()
        effect = self._effect.read() if self._effect is not None else {}
        return {**effect, **register, "applied": register["applied"] or effect.get("applied", False)}

    def is_lost(self) -> bool:
        """Return whether the temperature or its effect is gone: the fault consists of both."""
        return super().read()["applied"] is False or (self._effect is not None and self._effect.is_lost())
