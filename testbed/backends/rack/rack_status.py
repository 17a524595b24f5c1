"""The status of a rack lab: which machines answer SSH, whose host keys are pinned, and whether the lab is DIRTY.

It does not log in: it only reads the banner of each machine's SSH server.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from testbed.directories import lab_dir
from testbed.errors import Unreachable
from testbed.inventory.lab_inventory import Inventory, Management
from testbed.lab import open_machine
from testbed.tenancy import dirty

__all__ = ["MachineStatus", "RackStatus", "status"]

PATIENCE_S = 5.0
_MANY = 32
_SSH_PORT = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStatus:
    """One machine: `ssh` says whether an SSH server answers at `at`, `pinned` whether its host key is known here.

    `why` is the reason if one of them is false.
    """

    name: str
    role: str
    at: str
    ssh: bool
    pinned: bool
    why: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RackStatus:
    """A rack lab as seen from here. `state` is `up`, or `broken` if a machine does not answer or is not pinned.

    `dirty` has the reasons of this controller's DIRTY mark; empty if there is none. `unfinished` names the commands of
    this controller that are changing the lab, or were when they were killed.
    """

    name: str
    state: str
    machines: tuple[MachineStatus, ...]
    dirty: tuple[str, ...]
    unfinished: tuple[str, ...] = ()


def status(inventory: Inventory, *, patience_s: float = PATIENCE_S) -> RackStatus:
    """Query the state of every machine. One that sends no SSH banner within `patience_s` is reported as silent."""
    settings = dict([*inventory.management.items(), *([inventory.jump] if inventory.jump else [])])
    hosts, switches = inventory.topology.host_by_name, inventory.topology.switch_by_name

    def query(name: str) -> MachineStatus:
        role = "host" if name in hosts else str(switches[name].role) if name in switches else "jump"
        return _machine_status(name, role, settings[name], patience_s)

    with ThreadPoolExecutor(max_workers=_MANY) as pool:
        machines = tuple(pool.map(query, settings))
    return RackStatus(
        name=inventory.name,
        state="up" if all(machine.ssh and machine.pinned for machine in machines) else "broken",
        machines=machines,
        dirty=dirty.reasons(lab_dir(inventory.name)),
        unfinished=dirty.unfinished(lab_dir(inventory.name)),
    )


def _machine_status(name: str, role: str, management: Management, patience_s: float) -> MachineStatus:
    host, port = management.address or name, management.port or _SSH_PORT
    silence, unpinned = _silence(host, port, patience_s), None
    try:
        open_machine(name, management)
    except Unreachable as error:
        unpinned = str(error)
    return MachineStatus(
        name=name,
        role=role,
        at=host if port == _SSH_PORT else f"{host}:{port}",
        ssh=silence is None,
        pinned=unpinned is None,
        why=silence or unpinned,
    )


def _silence(host: str, port: int, patience_s: float) -> str | None:
    """Return why no SSH server answers there; None if one does."""
    try:
        with socket.create_connection((host, port), timeout=patience_s) as connection:
            connection.settimeout(patience_s)
            banner = connection.recv(4)
    except OSError as error:
        return f"{host} port {port} does not answer: {error}"
    return None if banner.startswith(b"SSH-") else f"{host} port {port} is not an SSH server: it sent {banner!r}"
