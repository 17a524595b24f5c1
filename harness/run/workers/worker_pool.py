"""Workers and their scheduler in this process: tasks survive the death of any worker.

Dask repeats a task whose worker has died, and also a finished one whose result only that worker held. A task therefore
looks first whether its work is done already (`faultbed.harness.run.workers.run_tasks`).

All connections are TLS with one certificate, which is made for this pool and is known to no other program. Both ends
have to show it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import dask
from distributed import Client, Future, LocalCluster, Security
from distributed.scheduler import KilledWorker

from faultbed.harness.run.workers.worker_process import SETTINGS, Channel
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.errors import FaultbedError, LabError, UsageError
from faultbed.testbed.stopping import Deadline

__all__ = ["LOOPBACK", "Ended", "Launcher", "OwnPool", "SharedPool", "StartedWorker"]

LOOPBACK = "127.0.0.1"
_DEATHS = 10
"""How many workers may die of one task before it is given up, and each without any result before it stays dead."""
_END_S = 120
_CONNECT_S = 30
_LOOK_S = 0.25
_TOGETHER_S = 0.05
T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a worker ended: `killed` from outside, so that another one takes its place, or by itself, with `code`."""

    killed: bool
    code: int
    why: str


class StartedWorker(Protocol):
    """A worker that was started."""

    def ended(self) -> Ended | None:
        """Return how it ended; None: it works."""

    def request_end(self) -> None:
        """Let it restore its lab and end. It may have ended before."""

    def join(self, timeout_s: float) -> None:
        """Wait for its end after `request_end`; afterwards it is killed and its lab ended."""


class Launcher(Protocol):
    """What starts workers: processes, SSH or a batch system.

    Attributes:
        count: how many there are at a time.
        host: the address on which their scheduler listens.
    """

    count: int
    host: str

    def start(self, number: int, channel: Channel) -> StartedWorker:
        """Start worker `number`, also in place of one that was killed.

        Raises:
            FaultbedError: it cannot be started.
        """


class OwnPool:
    """A context with a scheduler in this process and the workers of a launcher. A worker that is killed is replaced.

    Args:
        launcher: starts the workers.
        progress: receives a line when a worker has died.
    """

    def __init__(self, launcher: Launcher, progress: Progress) -> None:
        self._launcher, self._progress = launcher, progress
        self._workers: list[StartedWorker] = []
        self._closing = threading.Event()
        self._broken: list[FaultbedError] = []
        self._deaths = 0

    def __enter__(self) -> Self:
        security = Security.temporary()
        with contextlib.ExitStack() as opened:
            opened.enter_context(dask.config.set({**SETTINGS, "distributed.scheduler.allowed-failures": _DEATHS}))
            options: dict[str, Any] = {"n_workers": 0, "processes": False, "silence_logs": 50, "protocol": "tls://"}
            without_page = {"dashboard_address": f"{LOOPBACK}:0", "scheduler_kwargs": {"dashboard": False}}
            cluster = opened.enter_context(
                LocalCluster(host=self._launcher.host, security=security, **options, **without_page)
            )
            cluster.scheduler.http_server.stop()
            self._client = opened.enter_context(Client(cluster, security=security, set_as_default=False))
            self._channel = Channel(
                address=cluster.scheduler_address, certificate=security.tls_client_cert, key=security.tls_client_key
            )
            opened.callback(self._end_workers)
            for number in range(self._launcher.count):
                self._workers.append(self._launcher.start(number, self._channel))
            self._watcher = threading.Thread(target=self._replace_dead, daemon=True)
            self._watcher.start()
            opened.callback(self._stop_watching)
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    @property
    def address(self) -> str:
        """Address of the scheduler."""
        return self._channel.address

    @property
    def workers(self) -> Sequence[StartedWorker]:
        """The workers, by number."""
        return self._workers

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> Generator[tuple[T, R | Exception], None, None]:
        """Do something with each item on some worker, and yield the results as they come, or the error of one.

        `work` may be called more than once with one item, also at the same time.
        """
        with contextlib.closing(_results(self._client, work, items, self._broken)) as results:
            for result in results:
                self._deaths = 0
                yield result

    def _stop_watching(self) -> None:
        self._closing.set()
        Deadline(_END_S).join(self._watcher)

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.request_end()
        for worker in self._workers:
            worker.join(_END_S)

    def _replace_dead(self) -> None:
        """Start a worker again that was killed. One that ended by itself would end again: it is reported.

        One that refuses to work, because its machine would make other runs, ends all: a part of the runs is no sweep.
        """
        alive, last_words = set(range(self._launcher.count)), {}
        while alive and not self._closing.wait(_LOOK_S):
            for number in sorted(alive):
                try:
                    ended = self._workers[number].ended()
                    if ended is not None and ended.killed and self._deaths < _DEATHS * self._launcher.count:
                        self._deaths += 1
                        self._progress(f"worker {number}: {ended.why}; its run is repeated")
                        self._workers[number] = self._launcher.start(number, self._channel)
                        continue
                except FaultbedError as error:
                    ended = Ended(killed=False, code=error.exit_code, why=str(error))
                if ended is None:
                    continue
                alive.remove(number)
                last_words[number] = f"worker {number}: {ended.why}"
                self._progress(f"worker {number}: ended with exit code {ended.code}; {ended.why}")
                if ended.code == ExitCode.USAGE:
                    self._broken.append(UsageError(ended.why))
        if not alive:
            self._broken.append(LabError("; ".join(last_words[number] for number in sorted(last_words))))


class SharedPool:
    """A context with a scheduler and workers that an operator has started (`faultbed worker`).

    Args:
        channel: how to reach the scheduler.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __enter__(self) -> Self:
        address = self._channel.address
        try:
            self._client = Client(address, security=self._channel.security(), set_as_default=False, timeout=_CONNECT_S)
        except (OSError, TimeoutError) as error:
            reason = str(error).splitlines()[0] if str(error) else "no answer"
            raise UsageError(
                f"--on {address}: {reason}; start the scheduler, and give its certificate authority, a certificate and "
                "its key"
            ) from error
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        if not any(worker["resources"].get("lab") for worker in workers):
            self._client.close()
            raise UsageError(f"--on {address}: it has no worker with a lab; start `faultbed worker {address}` for each")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> Generator[tuple[T, R | Exception], None, None]:
        """See `OwnPool.map`."""
        return _results(self._client, work, items, [])


def _results(
    client: Client, work: Callable[[T], R], items: Sequence[T], broken: Sequence[FaultbedError]
) -> Generator[tuple[T, R | Exception], None, None]:
    pending = {client.submit(work, item, resources={"lab": 1}, pure=False): item for item in items}
    done: queue.SimpleQueue[Future] = queue.SimpleQueue()
    for future in pending:
        future.add_done_callback(done.put)
    try:
        while pending:
            batch = _batch(done)
            if not batch and broken:
                raise broken[0]
            for future, outcome in _outcomes(client, batch):
                yield pending.pop(future), outcome
    finally:
        client.cancel(list(pending))


def _batch(done: queue.SimpleQueue[Future]) -> list[Future]:
    """Return the tasks that are done now, after a moment if there is none. Tasks that end together are one batch."""
    batch: list[Future] = []
    with contextlib.suppress(queue.Empty):
        batch.append(done.get(timeout=_LOOK_S))
        threading.Event().wait(_TOGETHER_S)
        while True:
            batch.append(done.get_nowait())
    return batch


def _outcomes(client: Client, batch: Sequence[Future]) -> Iterator[tuple[Future, Any]]:
    """Yield tasks that are done, each with its result or its error. Results are fetched together: one costs a reply.

    Raises:
        LabError: what becomes of a task is unknown, because the scheduler is gone.
    """
    if any(future.status not in ("finished", "error") for future in batch):
        raise LabError("the connection to the scheduler of the workers is lost; the same command goes on")
    finished = [future for future in batch if future.status == "finished"]
    yield from zip(finished, client.gather(finished), strict=True)
    for future in batch:
        if future.status == "error":
            error = future.exception()  # deadline: it is done
            if isinstance(error, KilledWorker):
                error = LabError(f"{_DEATHS} workers died of this run; look for what ends them in the kernel's log")
            yield future, error
