"""A lab to work with: its topology, and a way to each of its machines.

`open_lab` takes an inventory and gives a `Lab`; a soft lab must be up (`testbed.backends.soft.lifecycle`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import paramiko
import yaml

from testbed.backends.soft import serial_console
from testbed.backends.soft.lab_state import LabState, read_snapshot, read_state, sockets_of
from testbed.directories import lab_dir
from testbed.errors import FaultbedError, LabError, Unreachable, UsageError
from testbed.inventory import lab_inventory as inventory_module
from testbed.inventory.lab_inventory import Inventory, Management
from testbed.model.topology import Topology
from testbed.observe.watcher import Watcher, WatcherGone
from testbed.remote import node_archive
from testbed.remote.remote_node import Node
from testbed.remote.ssh import Address, SshConnection, SshNode
from testbed.tenancy.reservation import WHOLE_LAB

if TYPE_CHECKING:
    from testbed.routing.switch_tables import SchemeTables

__all__ = ["Lab", "open_keeper", "open_lab", "open_machine", "runtime_inventory", "write_runtime_inventory"]

SOFT_USER = "root"
_SUDO = ("sudo", "-n", "--")


class Lab:
    """An open lab, for use as a context manager. Thread-safe: connections are shared and opened at first use."""

    def __init__(self, inventory: Inventory, addresses: Mapping[str, Address], *, accelerator: str | None) -> None:
        self.inventory_model = inventory
        self.accelerator = accelerator
        self._connections = {name: SshConnection(name, address) for name, address in addresses.items()}
        # What a lab does on its machines needs root; who logs in as somebody else has sudo without a password there.
        self._prefixes = {name: () if address.user == "root" else _SUDO for name, address in addresses.items()}
        self._have_code: set[str] = set()
        self._watchers: dict[str, Watcher] = {}
        self._lock = threading.Lock()
        self.guard: Callable[[], None] = lambda: None
        """Asked before the lab is touched; raises when it is not ours (any more). What holds the lab sets it."""
        self.ours: tuple[str, ...] = (WHOLE_LAB,)
        """Names of hosts, switches and links that are ours, as in `testbed.tenancy.reservation`.

        What holds the lab sets it.
        """
        self.others: Callable[[], tuple[str, ...]] = tuple
        """Names of what commands of other processes work on now, as in `ours`; what holds the lab sets it."""
        self.scheme: SchemeTables | None = None
        """Routing scheme that is applied to the switches; None: BGP's own ECMP. What applies it sets it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The lab's name."""
        return self.inventory_model.name

    @property
    def kind(self) -> Literal["soft", "rack"]:
        """`soft` or `rack`."""
        return self.inventory_model.kind

    @property
    def topology(self) -> Topology:
        """What the lab is made of."""
        return self.inventory_model.topology

    @property
    def inventory(self) -> Path:
        """The inventory file."""
        return self.inventory_model.path

    @property
    def state_dir(self) -> Path:
        """Where the lab's state is kept on the controller."""
        return lab_dir(self.name)

    def heartbeat(self) -> None:
        """Tell that work comes forward, so that what holds the lab refreshes its lease; raises nothing."""
        with contextlib.suppress(FaultbedError):
            self.guard()

    def nodes(self) -> tuple[str, ...]:
        """Names of the machines: those that one can log in to."""
        return tuple(self._connections)

    def node(self, name: str) -> Node:
        """A machine, or a switch (whose commands then run in its namespace, in a soft lab).

        Raises:
            UsageError: there is no such node.
        """
        if name in self._connections:
            return SshNode(name, self._connections[name], prefix=self._prefixes[name])
        netns = self.netns(name)
        carrier = self._carrier_name(name)
        if netns is None or carrier is None:
            known = [*self._connections, *self.topology.switch_by_name]
            raise UsageError(f'no node "{name}" in {self.name}: it has {", ".join(known)}')
        return SshNode(name, self._connections[carrier], prefix=("ip", "netns", "exec", netns))

    def carrier(self, name: str) -> Node:
        """The machine that carries a node: the carrier VM of a soft switch, the node itself otherwise."""
        carrier = self._carrier_name(name)
        return self.node(carrier or name)

    def netns(self, name: str) -> str | None:
        """The namespace of a soft switch on its carrier; None for what is a machine of its own."""
        return self.inventory_model.netns.get(name)

    def qmp_socket(self, node: str) -> Path:
        """QEMU's QMP socket for fault holders.

        Raises:
            UsageError: the node is not a VM of a soft lab.
        """
        if self.kind != "soft" or node not in self._connections:
            raise UsageError(f"{node} is not a VM of a soft lab: nothing of QEMU's to talk to")
        return sockets_of(self.state_dir) / f"{node}.holder"

    def vm_pid(self, node: str) -> int:
        """Process id of QEMU for a VM of a soft lab.

        Raises:
            UsageError: the node is not a VM of a soft lab.
            LabError: the lab is no longer up.
        """
        self.qmp_socket(node)
        state = read_state(self.state_dir)
        if state is None or node not in state.vms:
            raise LabError(f"{self.name} is not up any more: nothing runs {node}")
        return state.vms[node].pid

    def nic_id(self, node: str, netdev: str) -> str:
        """The QEMU id of a VM's network device, for `set_link`."""
        self.qmp_socket(node)
        return f"nic-{netdev}"

    def python(self, module: str) -> list[str]:
        """The command that runs a node-side module (`inject.node.holder`); `ensure_code` puts the code there."""
        return ["env", f"PYTHONPATH={node_archive.archive().folder}", "python3", "-m", module]

    def ensure_code(self, name: str) -> None:
        """Make sure that the machine behind a node has the node code; asked once for each open lab."""
        machine = self.carrier(name)
        with self._lock:
            known = machine.name in self._have_code
        if not known:
            node_archive.ensure(machine)
            with self._lock:
                self._have_code.add(machine.name)

    def watcher(self, machine: str) -> Watcher:
        """The watcher of a machine, started at first use.

        Raises:
            Unreachable: the machine does not answer.
            LabError: it cannot run one.
        """
        with self._lock:
            known = self._watchers.get(machine)
        if known is None:
            new = Watcher(self, machine)
            with self._lock:
                known = self._watchers.setdefault(machine, new)
            if known is not new:
                new.close()
        return known

    def ask(self, machine: str, request: Mapping[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Ask a machine's watcher; one that has ended meanwhile (a reboot, a kill) is started again.

        Raises:
            Unreachable: the machine does not answer.
            CommandFailed: no answer in time.
            LabError: it could not tell.
        """
        asked = self.watcher(machine)
        try:
            return asked.ask(request, timeout_s=timeout_s)
        except WatcherGone:
            with self._lock:
                if self._watchers.get(machine) is asked:
                    del self._watchers[machine]
            asked.close()
            return self.watcher(machine).ask(request, timeout_s=timeout_s)

    def carried(self, nodes: Iterable[str]) -> dict[str, dict[str, str | None]]:
        """Nodes by the machine that carries them, each with its namespace there (None: the machine itself)."""
        machines: dict[str, dict[str, str | None]] = {}
        for name in nodes:
            machines.setdefault(self._carrier_name(name) or name, {})[name] = self.netns(name)
        return machines

    def forget_connections(self) -> None:
        """Close all connections; the next use opens new ones. After a reset the old ones lead nowhere."""
        with self._lock:
            watchers, self._watchers = self._watchers, {}
        for watcher in watchers.values():
            watcher.close()
        for connection in self._connections.values():
            connection.close()
        with self._lock:
            self._have_code.clear()

    def forget(self, machine: str) -> None:
        """Close what leads to one machine; the next use opens it anew. After its reboot the old ones lead nowhere."""
        with self._lock:
            watcher = self._watchers.pop(machine, None)
            self._have_code.discard(machine)
        if watcher is not None:
            watcher.close()
        self._connections[machine].close()

    def close(self) -> None:
        """Close all connections."""
        self.forget_connections()

    def _carrier_name(self, name: str) -> str | None:
        switch = self.topology.switch_by_name.get(name)
        return switch.carrier if switch else None


def open_lab(inventory: Path | Inventory) -> Lab:
    """Open a lab.

    Raises:
        ConfigError: the inventory is wrong.
        LabError: the lab is a soft one and not up.
    """
    model = inventory if isinstance(inventory, Inventory) else inventory_module.load(inventory)
    if model.kind == "rack":
        return Lab(model, _rack_addresses(model), accelerator=None)
    folder = lab_dir(model.name)
    state = read_state(folder) if folder.exists() else None
    if state is None:
        raise LabError(f"{model.name} is not up: `faultbed --lab {model.path} up` starts it")
    return Lab(model, _soft_addresses(model, state, folder), accelerator=state.accelerator)


def runtime_inventory(folder: Path) -> Path:
    """The second inventory of a running soft lab: where each machine answers."""
    return folder / "runtime.yml"


def write_runtime_inventory(inventory: Inventory, folder: Path, ports: Mapping[str, int]) -> None:
    """Write `runtime_inventory` for Ansible; it names files of keys, never keys."""
    options = (
        f"-o StrictHostKeyChecking=yes -o UserKnownHostsFile={folder / 'known_hosts'} -o GlobalKnownHostsFile=/dev/null"
    )
    hosts = {
        name: {
            "ansible_host": "127.0.0.1",
            "ansible_port": port,
            "ansible_user": SOFT_USER,
            "ansible_ssh_private_key_file": str(folder / "id_ed25519"),
            "ansible_ssh_common_args": f"{options} -o IdentitiesOnly=yes",
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        for name, port in ports.items()
    }
    head = (
        f"# Where the machines of {inventory.name} answer now. Written by `faultbed up`, removed by `faultbed down`.\n"
    )
    runtime_inventory(folder).write_text(head + yaml.safe_dump({"all": {"hosts": hosts}}))


def _soft_addresses(inventory: Inventory, state: LabState, folder: Path) -> dict[str, Address]:
    snapshot = read_snapshot(folder)
    if snapshot is None:
        raise LabError(
            f"{folder} has no snapshot.json, so the host keys are not known: `faultbed down --purge`, then up"
        )
    return {
        name: Address(
            host="127.0.0.1",
            port=state.vms[name].ssh_port,
            user=SOFT_USER,
            identity=folder / "id_ed25519",
            host_key=snapshot.host_keys[name],
            remedy=functools.partial(_remedy_of_a_vm, folder / "vms" / name / serial_console.FILE),
        )
        for name in inventory.machines
    }


def _remedy_of_a_vm(path: Path) -> str:
    usual = "`faultbed status` tells whether its VM lives, `faultbed reset` starts it again"
    return serial_console.panic_told(path) or usual


def open_keeper(inventory: Inventory) -> Node:
    """The machine of a rack lab that keeps what all its users share: its jump host, or else its first machine.

    Raises:
        Unreachable: its host key is not pinned.
    """
    return open_machine(*(inventory.jump or next(iter(inventory.management.items()))))


def open_machine(name: str, management: Management) -> Node:
    """A machine that is reached over SSH, whether or not it is in any inventory.

    Raises:
        Unreachable: its host key is not pinned.
    """
    return SshNode(name, SshConnection(name, _rack_address(name, management)))


def _rack_addresses(inventory: Inventory) -> dict[str, Address]:
    return {name: _rack_address(name, management) for name, management in inventory.management.items()}


def _rack_address(name: str, management: Management) -> Address:
    known = paramiko.HostKeys()
    path = Path("~/.ssh/known_hosts").expanduser()
    if path.exists():
        known.load(str(path))
    host, port = management.address or name, management.port or 22
    keys = known.lookup(host if port == 22 else f"[{host}]:{port}")  # noqa: PLR2004 (SSH's port)
    if not keys or "ssh-ed25519" not in keys:
        raise Unreachable(
            f"{name}: no ssh-ed25519 host key of {host} in {path}: look at the key on its console and add it; "
            "faultbed trusts no key at first sight"
        )
    return Address(
        host=host,
        port=port,
        user=management.user or "root",
        identity=Path(management.private_key_file or "~/.ssh/id_ed25519").expanduser(),
        host_key=f"ssh-ed25519 {keys['ssh-ed25519'].get_base64()}",
    )
