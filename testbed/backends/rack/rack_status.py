"""The status of a rack lab: which machines answer SSH, whose host keys are pinned, and whether the lab is DIRTY.

No login takes place: only the banner of each SSH server is read.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import Unreachable
from faultbed.testbed.inventory.lab_inventory import Inventory, Management
from faultbed.testbed.lab import open_machine
from faultbed.testbed.side_by_side import on_each
from faultbed.testbed.tenancy import dirty

__all__ = ["MachineStatus", "RackStatus", "status"]

PATIENCE_S = 5.0
_MAX_CONNECTIONS = 32
_SSH_PORT = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStatus:
    """The status of one machine; `at` is its address.

    `ssh` says whether an SSH server answers at that address, `pinned` whether this controller has its host key. If one
    of the two is false, `why` is the reason.
    """

    name: str
    role: str
    at: str
    ssh: bool
    pinned: bool
    why: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RackStatus:
    """The status of a rack lab. `state` is `up`, or `broken` if a machine does not answer or is not pinned.

    `dirty` has the reasons of this controller's DIRTY mark; empty if there is none. `unfinished` names the commands of
    this controller that are changing the lab, or were when they were killed.
    """

    name: str
    state: str
    machines: tuple[MachineStatus, ...]
    dirty: tuple[str, ...]
    unfinished: tuple[str, ...] = ()


def status(inventory: Inventory, *, patience_s: float = PATIENCE_S) -> RackStatus:
    """Query every machine. A machine that sends no SSH banner within `patience_s` is reported with `ssh` false."""
    management_by_name = dict([*inventory.management.items(), *([inventory.jump] if inventory.jump else [])])
    hosts, switches = inventory.topology.host_by_name, inventory.topology.switch_by_name

    def query(name: str) -> MachineStatus:
        role = "host" if name in hosts else str(switches[name].role) if name in switches else "jump"
        return _machine_status(name, role, management_by_name[name], patience_s)

    rounds = 1 + len(management_by_name) // _MAX_CONNECTIONS
    all_s = 3 * patience_s * rounds
    machines = tuple(on_each(management_by_name, query, timeout_s=all_s, at_once=_MAX_CONNECTIONS))
    return RackStatus(
        name=inventory.name,
        state="up" if all(machine.ssh and machine.pinned for machine in machines) else "broken",
        machines=machines,
        dirty=dirty.reasons(lab_dir(inventory.name)),
        unfinished=dirty.unfinished(lab_dir(inventory.name)),
    )


def _machine_status(name: str, role: str, management: Management, patience_s: float) -> MachineStatus:
    host, port = management.address or name, management.port or _SSH_PORT
    no_answer, unpinned = _why_no_ssh(host, port, patience_s), None
    try:
        open_machine(name, management)
    except Unreachable as error:
        unpinned = str(error)
    return MachineStatus(
        name=name,
        role=role,
        at=host if port == _SSH_PORT else f"{host}:{port}",
        ssh=no_answer is None,
        pinned=unpinned is None,
        why=no_answer or unpinned,
    )


def _why_no_ssh(host: str, port: int, patience_s: float) -> str | None:
    """Return why no SSH server answers at an address, or None if a server answers."""
    try:
        with socket.create_connection((host, port), timeout=patience_s) as connection:
            connection.settimeout(patience_s)
            banner = connection.recv(4)
    except OSError as error:
        return f"{host} port {port} does not answer: {error}"
    return None if banner.startswith(b"SSH-") else f"{host} port {port} is not an SSH server: it sent {banner!r}"
