"""A CPU limit for the processes of one program, in a cgroup of their own.

The group is next to those of the soft GPUs, so that the same counters, fingerprint and `heal` handle it. It exists only
while the fault is on.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.machine.process import processes_with

__all__ = ["CGROUPS", "RANKS_CGROUP", "STORAGE_CGROUP", "LimitActuator"]

RANKS_CGROUP = "/sys/fs/cgroup/faultbed.slice/faultbed-ranks.service"
STORAGE_CGROUP = "/sys/fs/cgroup/faultbed.slice/faultbed-storage.service"
CGROUPS = (RANKS_CGROUP, STORAGE_CGROUP)
"""All cgroups that `LimitActuator` may create; `heal` removes them."""

ROOT = "/sys/fs/cgroup"
_EMPTY_S = 2.0


class LimitActuator(Actuator):
    """Moves the processes that have `argument` in their command line to `cgroup` with the limit `value`, and back."""

    poll_s = 0.05

    def __init__(self, *, argument: str, cgroup: str, value: str) -> None:
        self._argument, self._cgroup, self._value = argument, Path(cgroup), value
        self._homes: dict[int, str] = {}
        self._throttled = 0
        self._limit = ""

    def prepare(self) -> dict[str, Any]:
        """Refuse a machine without such a process, or with an existing group."""
        if self._cgroup.exists():
            raise Refused(f"{self._cgroup} already exists, a leftover of a fault; run `faultbed heal`")
        for pid in processes_with(self._argument):
            # The only line of a machine without cgroup v1: "0::/path" (cgroups(7)).
            self._homes[pid] = Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").strip().rpartition("::")[2]
        if not self._homes:
            raise Refused(f"no process of {self._argument} runs here; start the workload first")
        return self.read()

    def revert_script(self) -> str:
        """Return a script that moves all processes back (to the root if their group is gone) and removes the group.

        It moves only processes that are in the group, because the pid of an ended process may be in use again.
        """
        homes = "".join(f"{pid}) h={home} ;; " for pid, home in self._homes.items())
        return (
            f"[ ! -e {self._cgroup} ] || {{ for p in $(cat {self._cgroup}/cgroup.procs); do case $p in {homes}*) h= ;; "
            f"esac; {{ echo $p > {ROOT}$h/cgroup.procs; }} 2>/dev/null || echo $p > {ROOT}/cgroup.procs; done; "
            f"rmdir {self._cgroup}; }}"
        )

    def on(self) -> None:
        """Set the limit first, then move the processes."""
        self._cgroup.mkdir()
        (self._cgroup / "cpu.max").write_text(self._value, encoding="ascii")
        self._limit = (self._cgroup / "cpu.max").read_text(encoding="ascii").strip()
        for pid in self._homes.keys() & set(processes_with(self._argument)):
            with contextlib.suppress(ProcessLookupError):
                (self._cgroup / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def off(self) -> None:
        """Move the processes back, and remove the group."""
        if not self._cgroup.exists():
            return
        self._throttled = self.hits()
        deadline = time.monotonic() + _EMPTY_S
        while pids := [int(pid) for pid in (self._cgroup / "cgroup.procs").read_text(encoding="ascii").split()]:
            for pid in pids:
                self._move_home(pid)
            if time.monotonic() > deadline:
                raise OSError(f"{self._cgroup} still has processes {pids}")
        self._cgroup.rmdir()

    def read(self) -> dict[str, Any]:
        """Report the limit, and how many processes are in the group."""
        if not self._cgroup.exists():
            return {"applied": False, "cgroup": str(self._cgroup), "cpu.max": None, "processes": 0}
        return {
            "applied": True,
            "cgroup": str(self._cgroup),
            "cpu.max": (self._cgroup / "cpu.max").read_text(encoding="ascii").strip(),
            "processes": len((self._cgroup / "cgroup.procs").read_text(encoding="ascii").split()),
        }

    def is_lost(self) -> bool:
        """Return whether the limit was changed, or a process that still runs was moved out of the group.

        A process that has ended is no loss: a job ends its processes.
        """
        if not self._cgroup.exists() or (self._cgroup / "cpu.max").read_text(encoding="ascii").strip() != self._limit:
            return True
        inside = {int(pid) for pid in (self._cgroup / "cgroup.procs").read_text(encoding="ascii").split()}
        return bool(self._homes.keys() & set(processes_with(self._argument)) - inside)

    def hits(self) -> int:
        """Return the number of periods in which the group was throttled."""
        with contextlib.suppress(OSError):
            stat = (self._cgroup / "cpu.stat").read_text(encoding="ascii")
            return int(dict(line.split() for line in stat.splitlines()).get("nr_throttled", 0))
        return self._throttled

    def _move_home(self, pid: int) -> None:
        for home in (self._homes.get(pid, "/"), "/"):
            try:
                with open(f"{ROOT}{home.rstrip('/')}/cgroup.procs", "w", encoding="ascii") as procs:  # noqa: PTH123
                    procs.write(str(pid))
            except ProcessLookupError:
                return
            except OSError:
                continue
            return
