"""Worker processes on this machine, and their scheduler in this process: tasks survive the death of any worker.

Dask repeats a task whose worker has died, and also a finished one whose result only that worker held. A task therefore
looks first whether its work is done already (`faultbed.harness.run.workers.run_tasks`).

All connections are TLS with one certificate, which is made for this pool, is known to no other program, and is in no
file. Both ends have to show it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import dask
import msgspec
from distributed import Client, LocalCluster, Security, wait
from distributed.scheduler import KilledWorker

from faultbed.harness.run.workers.worker_process import WITHOUT_HTTP, Channel, Start
from faultbed.testbed.errors import LabError
from faultbed.testbed.stopping import Deadline

__all__ = ["LocalPool"]

_DEATHS = 10
"""How many workers may die of one task before it is given up."""
_END_S = 120
_DOWN_S = 300.0
"""How long a worker may take to restore its lab and end it."""
_LOOK_S = 0.25
T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[str], None]


class LocalPool:
    """A context with `count` worker processes on this machine. A worker that dies is replaced, with the same lab.

    Args:
        count: number of workers.
        home: folder with a folder for the state of each worker.
        inventory: the lab of each worker; None: tasks need none.
        progress: receives a line when a worker has died.
    """

    def __init__(self, count: int, home: Path, *, inventory: Path | None, progress: Progress) -> None:
        self._count, self._home, self._inventory, self._progress = count, home, inventory, progress
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = threading.Event()
        self._broken: list[str] = []

    def __enter__(self) -> Self:
        security = Security.temporary()
        self._settings = dask.config.set({**WITHOUT_HTTP, "distributed.scheduler.allowed-failures": _DEATHS})
        self._settings.__enter__()
        self._cluster = LocalCluster(
            n_workers=0, protocol="tls://", host="127.0.0.1", security=security, processes=False, silence_logs=50,
            dashboard_address="127.0.0.1:0", scheduler_kwargs={"dashboard": False},
        )  # fmt: skip
        self._cluster.scheduler.http_server.stop()
        self._client = Client(self._cluster, security=security, set_as_default=False)
        self._channel = Channel(
            address=self._cluster.scheduler_address, certificate=security.tls_client_cert, key=security.tls_client_key
        )
        self._processes = [self._start(number) for number in range(self._count)]
        self._watcher = threading.Thread(target=self._replace_dead, daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        Deadline(_END_S).join(self._watcher)
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for number, process in enumerate(self._processes):
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            if process.returncode is None or process.returncode < 0:
                self._end_lab(number)
        self._client.close()
        self._cluster.close()
        self._settings.__exit__(kind, error, trace)

    @property
    def address(self) -> str:
        """Address of the scheduler."""
        return self._channel.address

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [process.pid for process in self._processes]

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[T, R | Exception]]:
        """Do something with each item on some worker, and yield the results as they come, or the error of one.

        `work` may be called more than once with one item, also at the same time.
        """
        pending = {self._client.submit(work, item, resources={"lab": 1}, pure=False): item for item in items}
        while pending:
            try:
                with self._client.as_current():
                    done = wait(list(pending), timeout=_LOOK_S, return_when="FIRST_COMPLETED").done
            except TimeoutError:
                if self._broken:
                    raise LabError("; ".join(self._broken)) from None
                continue
            for future in done:
                item, error = pending.pop(future), future.exception()  # deadline: it is done
                if isinstance(error, KilledWorker):
                    error = LabError(f"{_DEATHS} workers died of this run; look for what ends them in the kernel's log")
                yield item, future.result() if error is None else error  # deadline: it is done

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        self._home.mkdir(parents=True, exist_ok=True)
        with self._log(number).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "faultbed.harness.run.workers.worker_process"], stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
            )  # fmt: skip
        start = Start(
            name=f"worker {number}", channel=self._channel, home=str(self._home / str(number)),
            inventory=None if self._inventory is None else str(self._inventory),
        )  # fmt: skip
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        process.stdin.flush()
        return process

    def _log(self, number: int) -> Path:
        return self._home / f"worker-{number}.log"

    def _replace_dead(self) -> None:
        """Start a worker again that was killed. One that ended by itself would end again: it is reported."""
        alive = set(range(self._count))
        while not self._closing.wait(_LOOK_S):
            for number in sorted(alive):
                process = self._processes[number]
                code = process.poll()
                if code is not None and process.stdin is not None:
                    process.stdin.close()
                if code is not None and code < 0:
                    self._progress(f"worker {number}: killed by signal {-code}; its run is repeated")
                    self._processes[number] = self._start(number)
                elif code is not None:
                    alive.remove(number)
                    self._progress(f"worker {number}: ended with exit code {code}; {self._last_line(number)}")
            if not alive:
                self._broken = [f"worker {number}: {self._last_line(number)}" for number in range(self._count)]
                return

    def _last_line(self, number: int) -> str:
        lines = self._log(number).read_text(errors="replace").splitlines()
        return lines[-1] if lines else f"no message in {self._log(number)}"

    def _end_lab(self, number: int) -> None:
        """End the lab of a worker that was killed and could not do so itself."""
        if self._inventory is not None:
            main = "from faultbed.harness.console import main; main()"
            environment = os.environ | {"FAULTBED_HOME": str(self._home / str(number))}
            command = [sys.executable, "-c", main, "--lab", str(self._inventory), "down"]
            quiet = subprocess.DEVNULL
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, env=environment, stdout=quiet, stderr=quiet, check=False, timeout=_DOWN_S)
