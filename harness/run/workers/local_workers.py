"""Workers as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from faultbed.harness.run.workers.worker_pool import LOOPBACK, Ended
from faultbed.harness.run.workers.worker_process import Channel, Start

__all__ = ["DOWN_S", "PROCESS", "LocalWorkers", "down_command", "how_ended"]

PROCESS = (sys.executable, "-m", "faultbed.harness.run.workers.worker_process")
DOWN_S = 300.0
"""How long it may take to end the lab of a worker that was killed."""


def down_command(home: Path, inventory: Path) -> list[str]:
    """Return the command that ends the lab of a worker that could not do so itself."""
    words = (sys.executable, "-m", "faultbed.harness.console", "--lab", str(inventory), "down")
    return ["env", f"FAULTBED_HOME={home}", *words]


def how_ended(code: int, last_line: str) -> Ended:
    """Return how a process ended. `code` is negative if a signal killed it, as that of `subprocess`."""
    return Ended(killed=code < 0, code=code, why=f"killed by signal {-code}" if code < 0 else last_line)


@dataclass(kw_only=True)
class LocalWorkers:
    """Starts `count` worker processes, each with a folder of its own below `home`. See `Launcher`."""

    count: int
    home: Path
    inventory: Path | None
    host: str = LOOPBACK

    def start(self, number: int, channel: Channel) -> LocalWorker:
        """Start a process, and send it its first line."""
        self.home.mkdir(parents=True, exist_ok=True)
        home, log = self.home / str(number), self.home / f"worker-{number}.log"
        with log.open("ab") as stderr:
            process = subprocess.Popen(
                PROCESS, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
            )
        start = Start(
            name=f"worker {number}", channel=channel, home=str(home),
            inventory=None if self.inventory is None else str(self.inventory),
        )  # fmt: skip
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(BrokenPipeError):  # it was killed; `ended` says so
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()
        command = () if self.inventory is None else tuple(down_command(home, self.inventory))
        return LocalWorker(process=process, log=log, down=command)


@dataclass(kw_only=True)
class LocalWorker:
    """A worker process. See `StartedWorker`. `down` is the command that ends its lab; empty: it has none."""

    process: subprocess.Popen[bytes]
    log: Path
    down: Sequence[str]

    def ended(self) -> Ended | None:
        """Return how it ended; None: it works."""
        code = self.process.poll()
        if code is None:
            return None
        self.request_end()
        return how_ended(code, self._last_line())

    def request_end(self) -> None:
        """Close its stdin."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def join(self, timeout_s: float) -> None:
        """Wait for its end, then kill it and end its lab."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        code, quiet = self.process.returncode, subprocess.DEVNULL
        if (code is None or code < 0) and self.down:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(self.down, env=os.environ, stdout=quiet, stderr=quiet, check=False, timeout=DOWN_S)

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else f"no message in {self.log}"
