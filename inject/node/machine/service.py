"""A service that is killed and started again; its transient unit survives a failure with all its settings."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.command import heartbeat, run

__all__ = ["ServiceActuator"]

_DEADLINE_S = 20.0


class ServiceActuator(Actuator):
    """Kills every process of the systemd unit `unit`, whose control group is `cgroup`, with SIGKILL."""

    patience_s = _DEADLINE_S
    loss_check_s = 0.2

    def __init__(self, *, unit: str, cgroup: str) -> None:
        self._unit, self._cgroup = unit, Path(cgroup)

    def prepare(self) -> dict[str, Any]:
        """Refuse a unit that does not run."""
        state = self.read()
        if state["applied"]:
            raise Refused(f"{self._unit} is not running, and no fault stopped it; run `faultbed reset`")
        return state

    def revert_script(self) -> str:
        return f"systemctl is-active --quiet {self._unit} || systemctl start {self._unit}"

    def on(self) -> None:
        """Kill the processes, and wait until the control group is gone.

        Raises:
            Refused: the unit has ended by itself since `prepare`, so that the fault would kill nothing.
        """
        if self.read()["applied"]:
            raise Refused(f"{self._unit} ended by itself before the fault; look why it ended")
        run(["systemctl", "kill", "--signal=KILL", self._unit])
        self._wait_until(applied=True)

    def off(self) -> None:
        run(["systemctl", "start", self._unit])
        self._wait_until(applied=False)

    def read(self) -> dict[str, Any]:
        """Report whether the unit has processes."""
        try:
            pids = (self._cgroup / "cgroup.procs").read_text(encoding="ascii").split()
        except OSError:
            pids = []
        return {"applied": not pids, "unit": self._unit, "cgroup": str(self._cgroup), "processes": len(pids)}

    def _wait_until(self, *, applied: bool) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while self.read()["applied"] is not applied or (applied and self._cgroup.exists()):
            if time.monotonic() > deadline:
                raise OSError(
                    f"{self._unit} {'still runs' if applied else 'has not started again'} after {_DEADLINE_S:g} s"
                )
            heartbeat()
            time.sleep(0.02)
