"""Carry out a planned power cycle, and wait until the host is back. Not yet run on hardware.

A host is back if it answers by SSH with an uptime that is shorter than the time since the cycle began. A new boot id
alone would not do: a host that did not answer before has none to compare with. The BMC's answer proves nothing about
the host.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from faultbed.testbed.backends.rack.power_cycle import PowerCycle
from faultbed.testbed.errors import CommandFailed, LabError, Unreachable
from faultbed.testbed.remote.remote_node import Node

__all__ = ["RETURN_S", "Boot", "boot_of", "carry_out"]

RETURN_S = 900.0
"""How long a server with eight GPUs may take for its firmware, its kernel and its drivers."""
_BMC_S = 120.0
_LOOK_EVERY_S = 5.0
_ANSWER_S = 20.0
_BOOT = ("cat", "/proc/sys/kernel/random/boot_id", "/proc/uptime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """A host's boot: its id (Documentation/admin-guide/sysctl/kernel.rst) and how long it is up."""

    id: str
    uptime_s: float


def boot_of(node: Node) -> Boot | None:
    """Return a host's present boot; None: it does not answer, or not as a Linux machine would."""
    try:
        lines = node.run(list(_BOOT), timeout_s=_ANSWER_S).stdout.splitlines()
        return Boot(id=lines[0].strip(), uptime_s=float(lines[1].split()[0]))
    except (Unreachable, CommandFailed, ValueError, IndexError):
        return None


def carry_out(
    planned: PowerCycle,
    look: Callable[[], Boot | None],
    *,
    progress: Callable[[str], None] = lambda _: None,
    return_s: float = RETURN_S,
    pause: Callable[[float], None] = time.sleep,
) -> float:
    """Run the commands of a power cycle, and wait until its host is back.

    Args:
        planned: the commands, which share one shell.
        look: returns the host's present boot; None: it does not answer.
        progress: receives a line for each step.
        return_s: how long the host may take.
        pause: waits for a number of seconds.

    Returns:
        The seconds from the begin of the cycle until the host was back.

    Raises:
        LabError: the BMC did not do it, or the host is not back in time; the message says which.
    """
    before, began = look(), time.monotonic()
    progress(f"{planned.host}: power cycle by {planned.bmc}")
    _run(planned)
    progress(f"{planned.host}: the BMC has accepted it; waiting for the host for at most {return_s:g} s")
    while (elapsed_s := time.monotonic() - began) < return_s:
        now = look()
        elapsed_s = time.monotonic() - began
        if now is not None and now.uptime_s <= elapsed_s and (before is None or now.id != before.id):
            return elapsed_s
        pause(_LOOK_EVERY_S)
    last = look()
    state = "does not answer" if last is None else f"answers and is up for {last.uptime_s:.0f} s: it has not booted"
    raise LabError(
        f"{planned.host}: {state}, {return_s:g} s after its power cycle by {planned.bmc}; look at its console, and at "
        "its power state by the BMC"
    )


def _run(planned: PowerCycle) -> None:
    """Run the commands in one shell; credentials come from the netrc file, or from IPMI_PASSWORD."""
    try:
        done = subprocess.run(
            ["bash", "-e"],
            input="\n".join(planned.commands),
            text=True,
            errors="replace",
            capture_output=True,
            check=False,
            timeout=_BMC_S,
        )
    except subprocess.TimeoutExpired:
        raise LabError(
            f"{planned.host}: {planned.bmc} did not answer within {_BMC_S:g} s; the host may be off: check its power "
            "state"
        ) from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise LabError(
            f"{planned.host}: the power cycle by {planned.bmc} failed: {said}; check the credentials (bmc.netrc, "
            "IPMI_PASSWORD) and the host's power state"
        )
