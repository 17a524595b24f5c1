"""Workers on other machines, over SSH."""

from __future__ import annotations

import contextlib
import re
import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import paramiko

from faultbed.harness.run.workers.local_workers import DOWN_S, PROCESS, down_command, how_ended
from faultbed.harness.run.workers.worker_pool import LOOPBACK, Ended
from faultbed.harness.run.workers.worker_process import Channel, Start
from faultbed.testbed.errors import CommandFailed, Unreachable, UsageError
from faultbed.testbed.inventory.lab_inventory import Management
from faultbed.testbed.lab import machine_address
from faultbed.testbed.remote.ssh import SshConnection, SshNode

__all__ = ["SshWorkers", "hosts_of"]

_HOST = re.compile(r"(?:([\w.-]+)@)?([\w.-]+)(?::([0-9]{1,5}))?")
_LOOK_S = 0.25
_STDERR_BYTES = 1 << 16
_KILLED = -1
"""paramiko's exit status of a program that a signal has ended, or of a connection that is gone."""


def hosts_of(text: str) -> tuple[Management, ...]:
    """Read `[USER@]HOST[:PORT],…`. A host may stand there more than once: it gets as many workers.

    Raises:
        UsageError: it is no list of hosts.
    """
    matches = [_HOST.fullmatch(word) for word in text.split(",")]
    hosts = [match.groups() for match in matches if match is not None]
    if len(hosts) < len(matches) or any(port is not None and not 0 < int(port) < 1 << 16 for *_, port in hosts):
        raise UsageError(f"--on ssh:{text}: no list of hosts; give [USER@]HOST[:PORT], separated by commas")
    return tuple(
        Management(
            netdev=None, mac=None, address=host, port=None if port is None else int(port), user=user,
            private_key_file=None,
        )
        for user, host, port in hosts
    )  # fmt: skip


class SshWorkers:
    """Starts a worker on each of some hosts. See `Launcher`.

    The hosts have the same paths as this machine: of the Python that runs faultbed, of the inventory, and of the folder
    of runs.

    Args:
        hosts: SSH settings, one for each worker. Host keys are pinned in `~/.ssh/known_hosts`.
        home: folder of the workers' state on each host.
        inventory: the lab of each worker; None: tasks need none.
        shared: the folder of runs.
        code: digest of the sources that planned the runs.
        host: the address of this machine on which the scheduler listens.

    Raises:
        Unreachable: a host does not answer, or its key is not pinned.
        UsageError: a host has no faultbed where this machine has it, or cannot reach the scheduler.
    """

    def __init__(
        self, hosts: Sequence[Management], home: Path, *, inventory: Path | None, shared: Path, code: str, host: str
    ) -> None:
        self.count, self.host = len(hosts), host
        self._home, self._inventory, self._shared, self._code = home, inventory, shared, code
        self._connections = [SshConnection(str(one.address), machine_address(str(one.address), one)) for one in hosts]
        for connection in self._connections:
            _refuse(connection, host)

    def start(self, number: int, channel: Channel) -> SshWorker:
        """Start a worker on host `number`, and send it its first line."""
        connection = self._connections[number]
        home = self._home / f"{connection.name}-{number}"
        session = connection.session()
        start = Start(
            name=f"{connection.name}/{number}", channel=channel, home=str(home), code=self._code,
            inventory=None if self._inventory is None else str(self._inventory), shared=str(self._shared),
        )  # fmt: skip
        try:
            session.exec_command(shlex.join(PROCESS))
            session.sendall(msgspec.json.encode(start) + b"\n")
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise Unreachable(f"{connection.name}: the SSH connection is gone ({error})") from error
        down = () if self._inventory is None else tuple(down_command(home, self._inventory))
        return SshWorker(connection=connection, session=session, down=down)


def _refuse(connection: SshConnection, scheduler: str) -> None:
    """Refuse a host that cannot work for this command.

    Raises:
        Unreachable: it does not answer.
        UsageError: faultbed is not there, or the scheduler listens where the host cannot reach it.
    """
    try:
        SshNode(connection.name, connection).run([*PROCESS[:1], "-c", "import faultbed.harness.run.workers"])
    except CommandFailed as error:
        why = str(error).splitlines()[-1]
        raise UsageError(
            f"{connection.name}: faultbed does not run there as {PROCESS[0]}: {why}; install the same version at the "
            "same path"
        ) from error
    if scheduler == LOOPBACK and not connection.is_loopback():
        raise UsageError(
            f"{connection.name}: workers there cannot reach a scheduler on {LOOPBACK}; add --interface NAME, the "
            "network interface of this machine that they reach"
        )


@dataclass(kw_only=True)
class SshWorker:
    """A worker on another machine. See `StartedWorker`. `down` is the command that ends its lab; empty: it has none."""

    connection: SshConnection
    session: paramiko.Channel
    down: Sequence[str]
    stderr: bytes = b""

    def ended(self) -> Ended | None:
        """Return how it ended; None: it works."""
        while self.session.recv_stderr_ready():
            self.stderr = (self.stderr + self.session.recv_stderr(_STDERR_BYTES))[-_STDERR_BYTES:]
        if not self.session.exit_status_ready():
            return None
        code = self.session.recv_exit_status()  # deadline: it is ready
        if code == _KILLED:
            return Ended(killed=True, code=code, why=f"{self.connection.name}: killed, or its connection is gone")
        lines = self.stderr.decode(errors="replace").splitlines()
        return how_ended(code, lines[-1] if lines else f"{self.connection.name}: ended without a message")

    def request_end(self) -> None:
        """Close its stdin."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self.session.shutdown_write()

    def join(self, timeout_s: float) -> None:
        """Wait for its end, then end its lab, and the worker with its connection."""
        end_s = time.monotonic() + timeout_s
        while (ended := self.ended()) is None and time.monotonic() < end_s:
            threading.Event().wait(_LOOK_S)
        self.session.close()
        if (ended is None or ended.killed) and self.down:
            with contextlib.suppress(CommandFailed, Unreachable):
                SshNode(self.connection.name, self.connection).run(self.down, timeout_s=DOWN_S, check=False)
        self.connection.close()
