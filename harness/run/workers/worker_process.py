"""A worker process: one lab of its own, and one task at a time.

A command that starts its workers itself sends each of them a line on stdin (`Start`), with the key of this sweep's
channel, which so is in no file, argument or environment. End of file on stdin means that the command is gone: the run
in progress restores its lab, and the worker ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import dask
import msgspec
from distributed import Security, Worker
from distributed.comm import get_address_host_port
from distributed.utils import get_ip

import faultbed
from faultbed.harness.record import code
from faultbed.harness.run.workers.main_thread import MainThread
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.errors import FaultbedError, UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.stopping import Deadline

__all__ = ["SETTINGS", "Channel", "Start", "main", "work"]

SETTINGS: Mapping[str, Any] = {
    "distributed.worker.http.routes": [],
    "distributed.scheduler.http.routes": [],
    "distributed.comm.timeouts.connect": "300s",
    "distributed.comm.timeouts.tcp": "300s",
}
"""Settings of Dask at both ends. No page is served to whoever asks; its HTTP server is stopped as well. A lab that runs
takes the CPUs for minutes, in which Dask's own 30 s would end a connection. An end that dies closes its sockets."""
_GONE_S = 30
"""How long a worker waits for its scheduler."""
_ORPHAN_S = 300.0
"""How long a worker waits for one of the same folder whose command is gone, and which ends its lab."""


class Channel(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a scheduler: its address, and certificate and key that both ends show each other.

    Each of the last three is PEM, or the path of a file with it. `authority` signs both ends; None: the certificate
    signs itself.
    """

    address: str
    certificate: str
    key: str
    authority: str | None = None

    def security(self) -> Security:
        """Return Dask's form of it: TLS alone, with certificates on both ends."""
        pair = {f"tls_{role}_{part}": getattr(self, name) for role in ("client", "scheduler", "worker")
                for part, name in (("cert", "certificate"), ("key", "key"))}  # fmt: skip
        return Security(require_encryption=True, tls_ca_file=self.authority or self.certificate, **pair)


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told at its start.

    Attributes:
        name: what messages call it; no two workers of a scheduler share one.
        channel: how it reaches the scheduler.
        home: folder of its state and of its lab.
        inventory: its lab; None: tasks need none.
        code: digest of the sources that planned the runs; None: each run is checked by itself.
        shared: a folder that the worker has to see, because runs are published there; None: there is none.
    """

    name: str
    channel: Channel
    home: str
    inventory: str | None
    code: str | None = None
    shared: str | None = None


def main() -> None:
    """Work until the scheduler or the command that started this process is gone."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        work(start)
    except FaultbedError as error:
        sys.stderr.write(f"{start.name}: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.ERROR)


def work(start: Start) -> None:
    """Work until the scheduler is gone.

    Raises:
        UsageError: this machine would make other runs, or another worker has the folder of its state.
        FaultbedError: the lab cannot be started.
        KeyboardInterrupt: a signal ended it; the run in progress has restored its lab, and the lab is ended.
    """
    os.environ["FAULTBED_HOME"] = start.home
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _interrupt)
    _refuse_other_machine(start)
    with _alone_in(Path(start.home)), _lab(start.inventory):
        _work(start)


def _refuse_other_machine(start: Start) -> None:
    """Refuse to start a lab on a machine whose runs would not count.

    Raises:
        UsageError: its sources of faultbed differ, or it does not see the folder of runs.
    """
    host = os.uname().nodename
    if start.code is not None and start.code != code.digest():
        here = f"{host}: faultbed {faultbed.__version__} has other sources than the command that started this worker"
        raise UsageError(f"{here}; install the same version on both")
    if start.shared is not None and not Path(start.shared).is_dir():
        raise UsageError(
            f"{host}: {start.shared} does not exist here, and runs are published in it; mount the folder of --out on "
            "all machines, or use --shard and --merge"
        )


def _work(start: Start) -> None:
    tasks = MainThread()
    server = threading.Thread(target=_serve, args=(start, tasks), daemon=True)
    server.start()
    tasks.run()
    server.join(_GONE_S)


def _serve(start: Start, tasks: MainThread) -> None:
    async def serve() -> None:
        address = start.channel.address
        with dask.config.set(SETTINGS):
            async with Worker(
                address, name=start.name, nthreads=1, resources={"lab": 1}, executor=tasks,
                security=start.channel.security(), protocol="tls", host=get_ip(*get_address_host_port(address)),
                dashboard=False, memory_limit=0, local_directory=str(Path(start.home) / "dask"),
                death_timeout=_GONE_S,
            ) as worker:  # fmt: skip
                worker.http_server.stop()
                await worker.finished()

    try:
        asyncio.run(serve())
    finally:
        tasks.shutdown()


def _end_with_stdin() -> None:
    # Not by the buffered reader: its lock, held by this thread, would abort a worker that ends by itself.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _alone_in(home: Path) -> Iterator[None]:
    """Hold the folder of this worker's state. A worker whose command was killed has the time to end its lab.

    Raises:
        UsageError: another worker has it.
    """
    home.mkdir(parents=True, exist_ok=True)
    with (home / "worker.lock").open("a+") as lock:
        deadline = Deadline(_ORPHAN_S)
        while not _is_locked(lock):
            lock.seek(0)
            if Path("/proc", lock.read().strip() or "0").exists() or deadline.is_over:
                raise UsageError(f"{home}: another worker has this folder; give each worker its own")
            threading.Event().wait(deadline.step_s)
        lock.truncate(0)
        lock.write(f"{os.getppid()}\n")
        lock.flush()
        yield


def _is_locked(file: TextIO) -> bool:
    """Lock a file, and return whether that was possible."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _lab(path: str | None) -> Iterator[None]:
    """Have a lab: end what a worker that was killed has left, start it, and end it with the worker."""
    if path is None:
        yield
        return
    inventory = lab_inventory.load(Path(path))
    backend = backend_of(inventory.kind)
    backend.down(inventory)
    try:
        backend.make_ready(inventory, _say)
        yield
    finally:
        backend.down(inventory)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
