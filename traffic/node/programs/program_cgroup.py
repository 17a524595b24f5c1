"""A cgroup (version 2) for the processes of one program, which ends with the engine whatever happens to it.

A watchdog waits for the end of a pipe that only the engine holds. It then writes `cgroup.kill`, which ends every
process of the cgroup with SIGKILL: those that forked, became daemons, began sessions or ignore SIGTERM, too
(Documentation/admin-guide/cgroup-v2.rst; Linux 5.14). Closing the cgroup and losing the engine are the same event.
"""

from __future__ import annotations

import os
import subprocess
import time

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["ProgramCgroup", "cgroup_mount"]

_WATCHDOG = (
    'read -r _; tries=0; echo 1 > "$1/cgroup.kill"; '
    'until rmdir "$1"; do tries=$((tries+1)); [ "$tries" -gt 100 ] && exit 1; sleep 0.05; done 2>/dev/null'
)
_ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
_CLOSE_S = 10.0


def cgroup_mount() -> str:
    """Return where the cgroups of version 2 are.

    Raises:
        OSError: they are not mounted.
    """
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        for line in mounts:
            _, place, kind, *_ = line.split()
            if kind == "cgroup2":
                return place
    raise OSError("no cgroups of version 2 are mounted; a program is started in one, which ends it with the run")


class ProgramCgroup:
    """A cgroup with its watchdog. `start` starts processes in it; `close` ends them all."""

    def __init__(self, name: str) -> None:
        self.path = f"{cgroup_mount()}/faultbed-{name}"
        os.mkdir(self.path)
        read_end, self._pipe = os.pipe()
        try:
            self._watchdog = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHDOG, "faultbed-program-watchdog", self.path],
                stdin=read_end, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
            )  # fmt: skip
        except BaseException:
            os.close(self._pipe)
            os.rmdir(self.path)
            raise
        finally:
            os.close(read_end)

    def start(self, words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process in the cgroup, in a session of its own; `options` are those of `subprocess.Popen`.

        Raises:
            OSError: it could not be started.
        """
        entered = ["/bin/sh", "-c", _ENTER, self.path, *words]
        return subprocess.Popen(entered, stdin=subprocess.DEVNULL, start_new_session=True, **options)

    def processes(self) -> tuple[int, ...]:
        """Return the ids of the processes that are in the cgroup now. Dead ones that nobody waited for do not count."""
        try:
            with open(f"{self.path}/cgroup.procs", encoding="ascii") as file:
                return tuple(pid for pid in map(int, file.read().split()) if not _is_zombie(pid))
        except OSError:
            return ()

    def signal(self, number: int) -> None:
        """Send a signal to every process of the cgroup."""
        for pid in self.processes():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def kill(self) -> None:
        """End every process of the cgroup with SIGKILL; the cgroup stays."""
        with open(f"{self.path}/cgroup.kill", "w", encoding="ascii") as file:
            file.write("1")

    def close(self) -> bool:
        """End every process, and remove the cgroup. Return whether that is done."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        deadline_ns = time.monotonic_ns() + int(_CLOSE_S * 1e9)
        while self._watchdog.poll() is None and time.monotonic_ns() < deadline_ns:
            time.sleep(0.01)
        return not os.path.isdir(self.path)


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(") ")[2][:1] == "Z"
    except OSError:
        return True
