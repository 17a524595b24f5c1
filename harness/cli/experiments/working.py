"""The command that makes runs for a sweep that another command leads: worker."""

from __future__ import annotations

import os
from pathlib import Path

import click

from faultbed.harness.cli.context import Session, pass_session
from faultbed.harness.run.workers.worker_places import parse_place
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.directories import home_dir
from faultbed.testbed.errors import UsageError
from faultbed.testbed.extras import extra
from faultbed.testbed.model.lab_kind import traits_of

__all__ = ["COMMANDS"]

_PATH = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("scheduler", metavar="tls://SCHEDULER:PORT")
@click.option("--name", default="0", show_default=True, help="Name of this worker, if the machine has several.")
@click.option("--tls-ca-file", "authority", type=_PATH, help="Certificate that signs both ends (default: Dask's).")
@click.option("--tls-cert", "certificate", type=_PATH, help="Certificate of this worker (default: Dask's).")
@click.option("--tls-key", "key", type=_PATH, help="Its key (default: Dask's).")
@click.option("--code", hidden=True, help="Digest of the sources that planned the runs.")
@click.option("--shared", hidden=True, help="A folder that this machine has to see.")
@click.option("--no-lab", is_flag=True, hidden=True, help="Have no lab, for tasks that need none.")
# A batch system's script (dask-jobqueue) gives these to every worker of Dask: one task at a time has its own memory.
@click.option("--nthreads", hidden=True)
@click.option("--memory-limit", hidden=True)
@click.option("--death-timeout", hidden=True)
@pass_session
def worker(
    session: Session,
    *,
    scheduler: str,
    name: str,
    authority: Path | None,
    certificate: Path | None,
    key: Path | None,
    code: str | None,
    shared: str | None,
    no_lab: bool,
    nthreads: str | None,
    memory_limit: str | None,
    death_timeout: str | None,
) -> int:
    """Start a lab, and make the runs that a scheduler gives it until the scheduler ends or this command is stopped.

    SCHEDULER is Dask's (`dask scheduler --protocol tls`); `faultbed sweep --on tls://SCHEDULER:PORT` gives it the runs.
    Both ends show a certificate. The lab of --lab is a new one, below FAULTBED_HOME, and is ended with the command.
    """
    del nthreads, memory_limit, death_timeout
    if parse_place(scheduler).kind != "tls":
        raise UsageError(f"{scheduler}: no scheduler; give tls://HOST:PORT")
    inventory = None if no_lab else session.inventory()
    if inventory is not None and not traits_of(inventory.kind).has_snapshot:
        raise UsageError(f"{inventory.name}: has machines of its own, and a worker starts its lab; use --shard there")
    with extra("scale", "`faultbed worker`"):
        from faultbed.harness.run.workers.open_pool import channel_to  # noqa: PLC0415 - an optional package
        from faultbed.harness.run.workers.worker_process import Start, work  # noqa: PLC0415 - an optional package
    files = {"authority": authority, "certificate": certificate, "key": key}
    host = os.uname().nodename
    start = Start(
        name=f"{host}/{name}", channel=channel_to(scheduler, role="worker", files=files), code=code, shared=shared,
        home=str(home_dir() / "workers" / f"{host}-{name}"),
        inventory=None if inventory is None else str(inventory.path.absolute()),
    )  # fmt: skip
    work(start)
    return ExitCode.PASS


COMMANDS = (worker,)
