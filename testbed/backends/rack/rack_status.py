"""A rack lab as it is now: who answers SSH, whose host key is pinned, and whether the lab is marked DIRTY from here.

Nobody logs in: a machine is asked for no more than its SSH server's greeting.
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
    """One machine: `ssh` tells whether its SSH server greets at `at`, `pinned` whether its host key is known here.

    `why` says what is in the way when one of them is not so.
    """

    name: str
    role: str
    at: str
    ssh: bool
    pinned: bool
    why: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RackStatus:
    """A rack lab as seen from here. `state` is `up`, or `broken` when a machine is silent or its key not pinned.

    `dirty` has the reasons of the DIRTY mark, which is this controller's: empty when there is none. `unfinished` names
    the commands of this controller that are at work, or were when they were killed.
    """

    name: str
    state: str
    machines: tuple[MachineStatus, ...]
    dirty: tuple[str, ...]
    unfinished: tuple[str, ...] = ()


def status(inventory: Inventory, *, patience_s: float = PATIENCE_S) -> RackStatus:
    """How a lab is, looked up now; who does not greet within `patience_s` is told as silent."""
    ways = dict([*inventory.management.items(), *([inventory.jump] if inventory.jump else [])])
    hosts, switches = inventory.topology.host_by_name, inventory.topology.switch_by_name

    def look(name: str) -> MachineStatus:
        role = "host" if name in hosts else str(switches[name].role) if name in switches else "jump"
        return _look(name, role, ways[name], patience_s)

    with ThreadPoolExecutor(max_workers=_MANY) as pool:
        machines = tuple(pool.map(look, ways))
    return RackStatus(
        name=inventory.name,
        state="up" if all(machine.ssh and machine.pinned for machine in machines) else "broken",
        machines=machines,
        dirty=dirty.reasons(lab_dir(inventory.name)),
        unfinished=dirty.unfinished(lab_dir(inventory.name)),
    )


def _look(name: str, role: str, way: Management, patience_s: float) -> MachineStatus:
    host, port = way.address or name, way.port or _SSH_PORT
    silence, unpinned = _silence(host, port, patience_s), None
    try:
        open_machine(name, way)
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
    """Why no SSH server greets there; None when one does."""
    try:
        with socket.create_connection((host, port), timeout=patience_s) as connection:
            connection.settimeout(patience_s)
            said = connection.recv(4)
    except OSError as error:
        return f"{host} port {port} does not answer: {error}"
    return None if said.startswith(b"SSH-") else f"{host} port {port} is no SSH server: it says {said!r}"
