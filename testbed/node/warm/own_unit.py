"""Become the main process of a transient systemd unit of one's own.

A process that is forked by a warm parent is no child of PID 1, which therefore would not notice its end. It loses its
parent first: PID 1 adopts it. The unit's only command then moves it into the unit's cgroup and ends; the PID file makes
it the main process (systemd.service(5): Type=forking, PIDFile=). From then on PID 1 supervises it as if it had started
it: `WatchdogSec`, `RuntimeMaxSec`, `ExecStopPost`, and SIGKILL of the cgroup act as for any service.
"""

from __future__ import annotations

import os
import subprocess
import time

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["enter_unit", "leave_parent"]

NOTIFY_SOCKET = "/run/systemd/notify"
_FOLDER = "/run/faultbed/warm"
_KEPT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL")
"""Variables that a unit of PID 1 has, too. The others describe an SSH session."""
_ADOPTED_S, _START_S = 10.0, 60.0
_JOIN = (
    'while IFS=: read -r version _ group; do [ "$version" != 0 ] || break; done </proc/self/cgroup; '
    '[ "$version" = 0 ] && read -r oom </proc/self/oom_score_adj && echo "$oom" >/proc/"$1"/oom_score_adj && '
    'echo "$1" >/sys/fs/cgroup"$group"/cgroup.procs'
)
"""What the unit's command does: it gives the process with this id its own OOM score, and then its cgroup.

Machines with both versions of cgroups list several in /proc/self/cgroup; the number of version 2 is 0."""


def leave_parent() -> None:
    """Continue in a child that PID 1 adopts; the calling process ends with exit code 0.

    Raises:
        OSError: another process has adopted it (prctl(2), PR_SET_CHILD_SUBREAPER).
    """
    before = os.getpid()
    if os.fork():
        os._exit(0)
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() == before and time.monotonic() < deadline:
        time.sleep(0.001)
    if os.getppid() != 1:
        raise OSError(f"process {os.getppid()} has adopted this one; only PID 1 can supervise it")


def enter_unit(start: Sequence[str]) -> None:
    """Start a unit whose main process is this one. Until this returns, the caller must have changed nothing.

    Args:
        start: `systemd-run` with the unit's name and properties, without a command.

    Raises:
        OSError: systemd did not start it. Whatever it has started ends by itself.
    """
    pid = os.getpid()
    file = f"{_FOLDER}/{pid}.pid"
    os.chdir("/")
    os.setgroups([])
    for name in os.environ.keys() - set(_KEPT):
        del os.environ[name]
    os.environ["NOTIFY_SOCKET"] = NOTIFY_SOCKET
    # PID 1 removes this file with the unit. If it were removed here, a unit whose `systemd-run` was killed would wait
    # for it until its start times out.
    with open(file, "w", encoding="ascii") as content:
        content.write(f"{pid}\n")
    try:
        done = subprocess.run(
            [*start, "-p", "Type=forking", "-p", f"PIDFile={file}", "/bin/sh", "-c", _JOIN, "join", str(pid)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_START_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise OSError(f"systemd did not start its unit within {_START_S:g} s") from error
    if done.returncode:
        raise OSError(f"systemd did not start its unit: {' '.join(done.stderr.split())[-300:]}")
