"""What PID 1 is to a holder on a target, for a holder that runs beside QEMU on the controller's machine.

    python -m inject.node.guardian REVERT_FILE WATCHDOG_S

Starts the holder as its child, with this process's stdin and stdout; when the holder ends in any way, or has been
silent for WATCHDOG_S (SIGSTOP), runs the stored revert if there is one. The holder in turn reverts when this process
is killed: each watches the other, and both live in a session of their own, so that a terminal's Ctrl-C or hang-up
reaches neither.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

from testbed.node.holders import claim_file, locked

__all__ = ["main"]

START_S = 60.0
"""How long the interpreter may take to start, on a machine that is busy with VMs."""
_REVERT_S = 30.0


def main() -> int:
    """Guard one holder to its end; returns its exit status, or 1 when the revert failed."""
    revert_file, watchdog_s = sys.argv[1], float(sys.argv[2])
    watch_r, watch_w = os.pipe()
    guard_r, guard_w = os.pipe()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    holder = subprocess.Popen(
        [sys.executable, "-m", "inject.node.holder"],
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
    status = holder.wait()
    os.close(guard_w)
    return status if _revert(revert_file) else 1


def _revert(path: str) -> bool:
    """Run the stored revert, unless another process (`faultbed heal`) does or has done it."""
    deadline, claim = time.monotonic() + _REVERT_S, claim_file(path)
    while os.path.exists(path):  # noqa: PTH110 - one way of doing it with the holder's file
        with contextlib.suppress(TimeoutError), locked(claim, within_s=_REVERT_S):
            if not os.path.exists(path):  # noqa: PTH110
                return True
            done = subprocess.run(["/bin/sh", path], check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            if done.returncode == 0:
                for each in (path, claim):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(each)  # noqa: PTH108
                return True
        if time.monotonic() > deadline:
            return False
        select.select([], [], [], 0.2)
    return True


if __name__ == "__main__":
    sys.exit(main())
