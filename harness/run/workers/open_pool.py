"""The pool of workers that `--on` names. It needs the extra `scale`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
from distributed.utils import get_ip_interface

from faultbed.harness.record import code
from faultbed.harness.run.workers.local_workers import LocalWorkers
from faultbed.harness.run.workers.slurm_workers import SlurmWorkers
from faultbed.harness.run.workers.ssh_workers import SshWorkers, hosts_of
from faultbed.harness.run.workers.worker_places import Place
from faultbed.harness.run.workers.worker_pool import LOOPBACK, OwnPool, SharedPool
from faultbed.harness.run.workers.worker_process import Channel
from faultbed.testbed.directories import home_dir
from faultbed.testbed.errors import UsageError

__all__ = ["channel_to", "open_pool"]

_FILES = {"authority": "ca-file", "certificate": "cert", "key": "key"}


@contextlib.contextmanager
def open_pool(
    place: Place, *, inventory: Path | None, runs: Path, progress: Callable[[str], None]
) -> Iterator[OwnPool | SharedPool]:
    """Start the workers of a place, and end them afterwards.

    Args:
        place: where they are.
        inventory: the lab of each worker; None: tasks need none.
        runs: the folder of run directories, which all workers see. It is made if it is missing.
        progress: receives a line when a worker has died.

    Raises:
        UsageError: the place does not exist or refuses workers.
        Unreachable: a host does not answer.
    """
    if place.kind == "tls":
        with SharedPool(channel_to(str(place), role="client")) as shared:
            yield shared
        return
    host, home = _address_of(place.interface), home_dir() / "workers"
    inventory = None if inventory is None else inventory.absolute()
    if place.kind == "local":
        with OwnPool(LocalWorkers(count=int(place.where), home=home, inventory=inventory), progress) as own:
            yield own
        return
    runs.mkdir(parents=True, exist_ok=True)
    # A folder for this command alone: a worker that does not see it does not see the runs, either.
    with tempfile.TemporaryDirectory(dir=runs.absolute(), prefix=".workers-") as folder:
        launcher = (
            SshWorkers(
                hosts_of(place.where), home, inventory=inventory, shared=Path(folder), code=code.digest(), host=host
            )
            if place.kind == "ssh"
            else SlurmWorkers(
                place.where, place.jobs, inventory=inventory, folder=Path(folder), code=code.digest(), host=host
            )
        )
        with OwnPool(launcher, progress) as own:
            yield own


def channel_to(address: str, *, role: str, files: dict[str, Path | None] | None = None) -> Channel:
    """Return how to reach a scheduler that an operator has started.

    Args:
        address: `tls://HOST:PORT`.
        role: "client" or "worker": whose certificate Dask's configuration is asked for.
        files: paths of `authority`, `certificate` and `key` that go before Dask's configuration
            (`distributed.comm.tls`).

    Raises:
        UsageError: one of the files is not named, or does not exist.
    """
    paths = {}
    for name, key in _FILES.items():
        place = key if name == "authority" else f"{role}.{key}"
        path = (files or {}).get(name) or dask.config.get(f"distributed.comm.tls.{place}", None)
        if path is None or not Path(path).is_file():
            found = "is not set" if path is None else f"{path} does not exist"
            variable = f"DASK_DISTRIBUTED__COMM__TLS__{place.upper().replace('.', '__').replace('-', '_')}"
            raise UsageError(f"{address}: its TLS file {place}: {found}; set {variable} to the file's path")
        paths[name] = str(Path(path).absolute())
    return Channel(address=address, **paths)


def _address_of(interface: str | None) -> str:
    if interface is None:
        return LOOPBACK
    try:
        return str(get_ip_interface(interface))
    except ValueError as error:
        raise UsageError(f"--interface {interface}: {error}; name an interface of this machine") from error
