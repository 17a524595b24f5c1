"""Processes killed or stopped by signal: routing daemons, ranks of a job, a whole VM (QEMU's process).

A process is identified by its pid and its start time, so that a reused pid is never signalled (proc_pid_stat(5),
starttime). A killed daemon is started again with its previous arguments, outside the holder's cgroup and scheduling
class, so that it outlives the holder unchanged.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import time
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused, enter_netns
from faultbed.inject.node.command import heartbeat, run
from faultbed.inject.node.inside import unless_gone

__all__ = ["ProcessActuator", "processes_with"]

FRR_DIR = "/run/frr"
_END_S = 5.0
_START_S = 30.0


class ProcessActuator(Actuator):
    """Sends the signal `how` (STOP or KILL) to the processes that `find` names; with `again`, restarts killed daemons.

    `find` is {"daemons": [...]} (of the switch `netns`, by their pid files), {"argument": text} (a whole argument of a
    command line) or {"pid": number, "comm": name}.
    """

    loss_check_s = 0.2

    def __init__(
        self,
        *,
        find: dict[str, Any],
        how: str,
        netns: str | None = None,
        host: str | None = None,
        again: bool = False,
    ) -> None:
        self._find, self._how, self._netns, self._host, self._again = find, how, netns, host, again
        self._started: dict[int, int] = {}
        self._commands: list[tuple[str, str]] = []
        self._over = True
        self.patience_s = _START_S / 3 if again else 0.0

    def prepare(self) -> dict[str, Any]:
        """Find the processes; refuse if there is none, or if one is stopped already."""
        enter_netns(self._netns)
        pids = self._pids()
        if not pids:
            raise Refused(f"no process to {self._how.lower()} ({self._names()}); start it first")
        for pid in pids:
            state, started = _stat(pid) or ("", 0)
            if state == "T":
                raise Refused(f"process {pid} ({self._names()}) is stopped already; run `faultbed heal`")
            self._started[pid] = started
        if self._again:
            self._commands = [(_pidfile(self._netns, _comm(pid)), _restart(self._netns, pid)) for pid in pids]
        return self.read()

    def revert_script(self) -> str:
        """Return a script that continues stopped processes and restarts killed daemons; a killed rank stays dead."""
        if self._how == "STOP":
            parts = [
                f"if [ \"$(sed 's/.*) //' /proc/{pid}/stat 2>/dev/null | cut -d' ' -f20)\" = {started} ]; "
                f"then kill -CONT {pid}; fi"
                for pid, started in self._started.items()
            ]
            # `on` may stop a daemon that was started after this script was stored.
            parts += [
                f"p=$(cat {_pidfile(self._netns, name)} 2>/dev/null); "
                f'[ "$(cat /proc/$p/comm 2>/dev/null)" != {name} ] || kill -CONT $p'
                for name in self._find.get("daemons", ())
            ]
            return "; ".join(parts)
        parts = [
            f'p=$(cat {path} 2>/dev/null); if [ "$(cat /proc/$p/comm 2>/dev/null)" != {_name_of(path)} ]; '
            f"then {command}; fi"
            for path, command in self._commands
        ]
        return unless_gone(self._netns, "; ".join([*parts, "true"]))

    def on(self) -> None:
        """Send the signal; after KILL, wait until the processes are gone.

        Raises:
            Refused: every process to kill has ended by itself since `prepare`, so that the fault would kill nothing.
        """
        if "daemons" in self._find:
            self._find_again()
        self._over = False
        number = signal.SIGSTOP if self._how == "STOP" else signal.SIGKILL
        sent = [_send(pid, started, number) for pid, started in self._started.items()]
        if self._how == "STOP":
            self._wait_for_signal(stopped=True)
        elif not any(sent):
            raise Refused(
                f"no process to kill ({self._names()}) any more: it ended by itself before the fault; look why it ended"
            )

    def off(self) -> None:
        """Continue stopped processes, or restart killed ones."""
        self._over = True
        if self._how == "STOP":
            for pid, started in self._started.items():
                _send(pid, started, signal.SIGCONT)
            self._wait_for_signal(stopped=False)
            return
        for path, command in self._commands:
            if not _alive(path):
                run(["/bin/sh", "-c", command], timeout_s=_START_S)

    def read(self) -> dict[str, Any]:
        """Report the states of the processes found by `prepare`, and whether daemons run again."""
        states = {
            str(pid): (stat[0] if (stat := _stat(pid)) and stat[1] == started else "gone")
            for pid, started in self._started.items()
        }
        if self._how == "STOP":
            applied = bool(states) and all(state == "T" for state in states.values())
            if self._over:
                applied = "T" in states.values()
        elif self._again:
            applied = bool(self._started) and not all(_alive(path) for path, _ in self._commands)
        else:
            applied = not self._over and set(states.values()) == {"gone"}
        return {"applied": applied, "netns": self._netns, "host": self._host, "states": states, "what": self._names()}

    def is_lost(self) -> bool:
        """Return whether at least one stopped process or killed daemon runs again.

        A stopped rank that is killed is no loss: ending a rank that hangs is the job's reaction to the fault. A stopped
        daemon that is killed is a loss: its sessions end at once, which is another fault.
        """
        if self._how == "STOP":
            stopped = ("T",) if "daemons" in self._find else ("T", "gone")
            return any(state not in stopped for state in self.read()["states"].values())
        return any(_alive(path) for path, _ in self._commands) if self._again else super().is_lost()

    def _find_again(self) -> None:
        """Find the daemons again: an earlier fault of the run may have replaced those that `prepare` found."""
        stats = {pid: _stat(pid) for pid in self._pids()}
        self._started = {pid: stat[1] for pid, stat in stats.items() if stat is not None}
        if not self._started:
            raise Refused(f"no process to {self._how.lower()} ({self._names()}) any more; start it first")

    def _wait_for_signal(self, *, stopped: bool) -> None:
        """Wait until the processes are stopped, or run again: a thread handles a signal at its next kernel entry."""
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            states = [stat[0] for pid, at in self._started.items() if (stat := _stat(pid)) and stat[1] == at]
            if all((state == "T") is stopped for state in states):
                return
            heartbeat()
            time.sleep(0.002)

    def _pids(self) -> list[int]:
        if "pid" in self._find:
            pid = int(self._find["pid"])
            return [pid] if _comm(pid).startswith(self._find["comm"]) else []
        if "daemons" in self._find:
            numbers = (_read(_pidfile(self._netns, name)) for name in self._find["daemons"])
            pids = [int(number) for number in numbers if number]
            return [pid for pid, name in zip(pids, self._find["daemons"]) if _comm(pid) == name]  # noqa: B905
        return processes_with(self._find["argument"])

    def _names(self) -> str:
        return ", ".join(
            str(x) for x in self._find.get("daemons", [self._find.get("argument", self._find.get("comm"))])
        )


def processes_with(argument: str) -> list[int]:
    """Return the Python processes, except this one, with the whole `argument` in their command line."""
    word = argument.encode()
    return [
        int(entry)
        for entry in os.listdir("/proc")  # noqa: PTH208 - start-up time
        if entry.isdigit()
        and int(entry) != os.getpid()
        and word in _arguments(int(entry))
        # `env` and shells have the arguments of the programs that they start.
        and _comm(int(entry)).startswith("python")
    ]


def _pidfile(netns: str | None, daemon: str) -> str:
    return f"{FRR_DIR}/{netns}/{daemon}.pid"


def _restart(netns: str | None, pid: int) -> str:
    """Return the command that restarts a process, outside the holder's cgroup and priority."""
    words = shlex.join(word.decode() for word in _arguments(pid))
    inner = (
        "echo $$ > /sys/fs/cgroup/cgroup.procs; echo 0 > /proc/$$/oom_score_adj; "
        f"exec chrt --other 0 nsenter --net=/run/netns/{netns} {words}"
    )
    return f"sh -c {shlex.quote(inner)} </dev/null >/dev/null 2>&1"


def _name_of(pidfile: str) -> str:
    """Return the daemon that a pid file belongs to."""
    return os.path.basename(pidfile).removesuffix(".pid")  # noqa: PTH119 - start-up time


def _alive(path: str) -> bool:
    """Return whether the daemon of a pid file runs; False if another program has its pid by now."""
    number = _read(path)
    return bool(number) and _stat(int(number)) is not None and _comm(int(number)) == _name_of(path)


def _send(pid: int, started: int, number: signal.Signals) -> bool:
    """Send a signal to a process; return False if it has ended before."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if (_stat(pid) or ("", -1))[1] != started:
            return False
        signal.pidfd_send_signal(handle, number)
        deadline = time.monotonic() + _END_S
        while number == signal.SIGKILL and not select.select([handle], [], [], 0.5)[0]:
            heartbeat()
            if time.monotonic() > deadline:
                raise OSError(f"process {pid} still runs {_END_S:g} s after SIGKILL")
        return True
    finally:
        os.close(handle)


def _stat(pid: int) -> tuple[str, int] | None:
    """Return state and start time (clock ticks since boot); None for a zombie or no process."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], int(fields[19])) if fields and fields[0] not in "ZX" else None


def _comm(pid: int) -> str:
    return _read(f"/proc/{pid}/comm")


def _arguments(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - start-up time
            return file.read().split(b"\0")[:-1]
    except OSError:
        return []


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        return file.read().strip()
    return ""
