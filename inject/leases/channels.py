"""How the injector reaches a holder: a transient unit on the target, or a guarded process beside QEMU.

Both are a `faultbed.testbed.remote.remote_node.Channel`, and both have a supervisor that reverts when the holder dies
or stops: PID 1 through `ExecStopPost` and `WatchdogSec` (systemd.service(5)), `faultbed.inject.node.guardian` through
a pipe. A unit's holder is forked by the machine's warm parent if it has one, and becomes the main process of its unit
before it serves requests (`faultbed.testbed.node.warm.own_unit`).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faultbed.inject.node.holder import REVERT_DIR
from faultbed.inject.node.qmp import DEADLINE_S
from faultbed.testbed import shipped
from faultbed.testbed.directories import home_dir
from faultbed.testbed.errors import Unreachable
from faultbed.testbed.node.holders import claim_file
from faultbed.testbed.observe.fingerprint import stored_reverts
from faultbed.testbed.remote.jsonlines import next_message

if TYPE_CHECKING:
    from faultbed.inject.leases.leased import Leased
    from faultbed.testbed.lab import Lab
    from faultbed.testbed.remote.remote_node import Channel

__all__ = [
    "REPROVISION",
    "UNIT_PREFIX",
    "LocalChannel",
    "healed_file",
    "last_heal",
    "local_args",
    "local_python",
    "open_holder",
    "patience_s",
    "revert_dir",
    "revert_file",
    "unit_command",
    "unit_of",
]

MODULE = "faultbed.inject.node.holder"
REPROVISION = "faultbed.inject.reprovision"
"""The program that provisions a rebooted host again."""
# Longest life of a unit beyond its fault's window: time to prepare the fault, to wait until it is due, and to clear it.
SLACK_S = 600.0
START_S = 60.0
"""Deadline for a holder's interpreter to start, on a starved machine."""
# Time that a busy machine may let pass between a holder's heartbeat (at most twice a second) and its command to QEMU.
_TURN_S = 1.5
UNIT_PREFIX = "faultbed-fault-"
SYSTEMD_RUN = ("systemd-run", "--quiet", "--collect")


def open_holder(lab: Lab, planned: Leased, *, instance: str, ttl_s: float) -> Channel:
    """Start the holder of a fault. It changes nothing yet.

    `instance` is the fault's id with a random suffix. Two holders of the same plan, one after the other, therefore
    have different units and stored reverts.

    Raises:
        Unreachable: the target does not answer.
        LabError: the holder cannot be started.
    """
    if planned.place.local:
        return LocalChannel(instance, revert_file(lab, instance), watchdog_s=patience_s(ttl_s))
    return lab.open_in_unit(
        planned.place.node,
        MODULE,
        unit=unit_of(planned, instance=instance),
        by_interpreter=lambda python: unit_command(planned, python, instance=instance),
    )


def patience_s(ttl_s: float) -> float:
    """Return how long a local holder may be silent: a quarter of the lease, but longer than QEMU takes to answer."""
    return max(ttl_s / 4, DEADLINE_S + _TURN_S)


def unit_command(planned: Leased, python: Sequence[str], *, instance: str) -> list[str]:
    """Return the command that starts a holder by an interpreter of its own, in its unit (`unit_of`)."""
    return [*unit_of(planned, instance=instance), "--pipe", "--wait", "-p", "Type=notify", *python]


def unit_of(planned: Leased, *, instance: str) -> list[str]:
    """Return `systemd-run` with name and properties of the unit of a holder, whose revert PID 1 guarantees.

    The unit is killed when its holder, once armed, hangs for half a lease (`WatchdogSec`), and in any case long after
    the window (`RuntimeMaxSec`). Whatever ends the unit, `ExecStopPost` runs the stored revert, if there is one.
    """
    stored = f"{REVERT_DIR}/{instance}.revert"
    revert = f"{{ [ ! -e {stored} ] || sh {stored}; }} && rm -f {stored} {claim_file(stored)}"
    properties = {
        # A long watchdog until there is something to revert: the holder shortens it to half a lease when it arms.
        "NotifyAccess": "main",
        "WatchdogSec": f"{START_S:g}",
        "WatchdogSignal": "SIGKILL",
        "TimeoutStartSec": f"{START_S:g}",
        # This is also the revert's deadline: on a starved machine a process alone needs seconds to start.
        "TimeoutStopSec": f"{START_S + float(planned.request.get('patience_s', 0.0)):g}",
        "RuntimeMaxSec": f"{planned.ends_s + SLACK_S:.0f}",
        "OOMScoreAdjust": "-900",
        # Real-time, for machines whose CPU forwards packets all the time; programs it restarts do not inherit that.
        "ExecStopPost": f"/usr/bin/env chrt --reset-on-fork --rr 10 /bin/sh -c {shlex.quote(revert)}",
    }
    settings = [word for name, value in properties.items() for word in ("-p", f"{name}={value}")]
    return [*SYSTEMD_RUN, f"--unit={UNIT_PREFIX}{instance}", *settings]


def revert_dir(lab: Lab) -> Path:
    """Return the folder with the reverts of local holders while their faults are in place."""
    return stored_reverts(lab.state_dir)


def revert_file(lab: Lab, instance: str) -> Path:
    """Return the path of one local holder's stored revert."""
    return revert_dir(lab) / f"{instance}.revert"


def healed_file(lab: Lab) -> Path:
    """Return the path of the file that every `heal` rewrites before it searches for local holders."""
    return lab.state_dir / "healed"


def last_heal(lab: Lab) -> str:
    """Return what the last `heal` wrote; empty if there was none."""
    with contextlib.suppress(OSError):
        return healed_file(lab).read_text(encoding="ascii")
    return ""


def local_python() -> list[str]:
    """Return the command that runs Python with this package on its path, from any folder."""
    return ["env", f"PYTHONPATH={shipped.import_root()}", sys.executable, "-P"]


def local_args(lab: Lab, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a local holder that depend on the running lab: QEMU's process id, sockets, commands."""
    args = request["args"]
    if request["actuator"] == "process":
        return {"find": {**args["find"], "pid": lab.vm_pid(args["host"])}}
    if request["actuator"] == "vm_reset":
        # Any user may run this command, from any folder.
        home = f"FAULTBED_HOME={home_dir().resolve()}"
        reprovision = ["env", home, *local_python(), "-m", REPROVISION, str(lab.inventory.resolve()), args["host"]]
        return {"socket": str(lab.qmp_socket(args["host"])), "reprovision": reprovision}
    return {
        "socket": str(lab.qmp_socket(args["host"])),
        "nic": lab.nic_id(args["host"], args["netdev"]),
        "python": local_python(),
    }


class LocalChannel:
    """A guardian and its holder on this machine, in a session of their own.

    Implements `faultbed.testbed.remote.remote_node.Channel`.
    """

    def __init__(self, name: str, stored: Path, *, watchdog_s: float) -> None:
        self._what = f"holder of {name}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "faultbed.inject.node.guardian", str(stored), f"{watchdog_s:g}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(shipped.import_root())},
        )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name=f"reader of {self._what}", daemon=True)
        self._reader.start()

    @property
    def guardian_pid(self) -> int:
        """Process id of the guardian; the holder is its child."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """See `faultbed.testbed.remote.remote_node.Channel.send`."""
        try:
            with self._lock:
                if self._process.stdin is None:
                    raise BrokenPipeError
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise Unreachable(f"{self._what} is gone") from error

    def receive(self, *, timeout_s: float) -> dict[str, Any] | None:
        """See `faultbed.testbed.remote.remote_node.Channel.receive`."""
        return next_message(self._lines, program=self._what, stderr_note="", timeout_s=timeout_s)

    def close(self) -> None:
        """Close the holder's stdin, then wait for guardian and holder. Safe to call twice."""
        with self._lock, contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._reader.join(timeout=2)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def _read(self) -> None:
        out = self._process.stdout
        if out is None:
            return
        with contextlib.suppress(OSError, ValueError):
            for line in out:
                self._lines.put(line)
        self._lines.put(None)
