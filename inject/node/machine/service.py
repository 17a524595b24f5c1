"""A service that is killed and started again: of a transient unit that failed systemd keeps all that it needs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from inject.node.actuator import Refused
from inject.node.command import run, still_alive

__all__ = ["ServiceActuator"]

_DEADLINE_S = 20.0


class ServiceActuator:
    """SIGKILL of every process of the systemd unit `unit`, whose control group is `cgroup`."""

    poll_s = None
    patience_s = _DEADLINE_S

    def __init__(self, *, unit: str, cgroup: str) -> None:
        self._unit, self._cgroup = unit, Path(cgroup)

    def prepare(self) -> dict[str, Any]:
        """Refuse a unit that does not run."""
        seen = self.read()
        if seen["applied"]:
            raise Refused(f"{self._unit} is not running, and not by us: run `faultbed reset`")
        return seen

    def revert_script(self) -> str:
        """Start it, unless it runs."""
        return f"systemctl is-active --quiet {self._unit} || systemctl start {self._unit}"

    def on(self) -> None:
        """Kill it, until its control group is gone."""
        run(["systemctl", "kill", "--signal=KILL", self._unit])
        self._until(applied=True)

    def off(self) -> None:
        """Start it."""
        run(["systemctl", "start", self._unit])
        self._until(applied=False)

    def read(self) -> dict[str, Any]:
        """Whether it has processes."""
        try:
            pids = (self._cgroup / "cgroup.procs").read_text(encoding="ascii").split()
        except OSError:
            pids = []
        return {"applied": not pids, "unit": self._unit, "cgroup": str(self._cgroup), "processes": len(pids)}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Nothing is held open."""

    def _until(self, *, applied: bool) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while self.read()["applied"] is not applied or (applied and self._cgroup.exists()):
            if time.monotonic() > deadline:
                raise OSError(
                    f"{self._unit} {'still runs' if applied else 'has not come back'} after {_DEADLINE_S:g} s"
                )
            still_alive()
            time.sleep(0.02)
