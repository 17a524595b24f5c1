"""Supervises a holder that runs beside QEMU on the controller's machine, as PID 1 does on a target.

    python -m faultbed.inject.node.guardian REVERT_FILE WATCHDOG_S

The guardian starts the holder as its child, which gets its stdin and stdout. When the holder ends for any reason, or is
silent for WATCHDOG_S (as after a SIGSTOP), the guardian runs the stored revert if there is one. If the guardian is
killed, the holder reverts. Both are in a session of their own, so that a terminal's Ctrl-C or hang-up reaches neither.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

from faultbed.testbed.node.holders import claim_file, locked

__all__ = ["main"]

START_S = 60.0
"""Deadline for the interpreter to start, on a machine that is busy with VMs."""
_REVERT_S = 30.0
"""How long a failed revert is retried, and how long to wait for another process that runs it."""


def main() -> int:
    """Supervise one holder until it ends; return its exit status, or 1 if the revert failed."""
    revert_file, watchdog_s = sys.argv[1], float(sys.argv[2])
    watch_r, watch_w = os.pipe()
    guard_r, guard_w = os.pipe()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    holder = subprocess.Popen(
        [sys.executable, "-m", "faultbed.inject.node.holder"],
        env={**os.environ, "FAULTBED_WATCH_FD": str(watch_w), "FAULTBED_GUARD_FD": str(guard_r)},
        pass_fds=(watch_w, guard_r),
    )
    for fd in (0, 1, watch_w, guard_r):
        os.close(fd)
    patience_s = START_S
    while True:
        readable, _, _ = select.select([watch_r], [], [], patience_s)
        patience_s = watchdog_s
        if not readable:
            holder.kill()
            break
        if not os.read(watch_r, 4096):
            break
    try:
        status = holder.wait(timeout=START_S)  # it was killed, or has closed its end of the pipe: it is ending
    except subprocess.TimeoutExpired:
        holder.kill()
        status = 1
    os.close(guard_w)
    return status if _revert(revert_file) else 1


def _revert(path: str) -> bool:
    """Run the stored revert, unless another process (`faultbed heal`) is running it or has run it."""
    deadline, claim = time.monotonic() + _REVERT_S, claim_file(path)
    while os.path.exists(path):  # noqa: PTH110 - as in the holder
        with contextlib.suppress(TimeoutError), locked(claim, within_s=_REVERT_S):
            if not os.path.exists(path):  # noqa: PTH110
                return True
            done = subprocess.run(  # deadline: its commands have their own; one that lets a host boot takes minutes
                ["/bin/sh", path], check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
            if done.returncode == 0:
                for leftover in (path, claim):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(leftover)  # noqa: PTH108
                return True
        if time.monotonic() > deadline:
            return False
        select.select([], [], [], 0.2)
    return True


if __name__ == "__main__":
    sys.exit(main())
