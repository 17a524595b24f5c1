"""An open lab: its topology, and a connection to each of its machines.

`open_lab` opens the lab of an inventory; a soft lab must be up (`faultbed.testbed.backends.soft.lifecycle`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import paramiko

from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import CommandFailed, FaultbedError, Unreachable, UsageError
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.inventory.lab_inventory import Inventory, Management
from faultbed.testbed.model.lab_kind import LabKind, traits_of
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.observe.kernel_messages import KernelMessages
from faultbed.testbed.observe.link_state import read_down_links
from faultbed.testbed.observe.watcher import Watcher, WatcherGone
from faultbed.testbed.remote import node_archive, warm_start
from faultbed.testbed.remote.remote_node import Channel, Node
from faultbed.testbed.remote.ssh import Address, SshConnection, SshNode
from faultbed.testbed.side_by_side import in_background, result_of
from faultbed.testbed.stopping import Deadline
from faultbed.testbed.tenancy.reservation import WHOLE_LAB

if TYPE_CHECKING:
    from faultbed.testbed.routing.switch_tables import SchemeTables

__all__ = [
    "Lab",
    "machine_address",
    "machine_addresses",
    "open_keeper",
    "open_lab",
    "open_machine",
]

ALIVE_TIMEOUT_S = 5.0
"""How long a machine has to run the shortest command, to show that the connection to it is alive."""
START_S = 120.0
"""How long a module has to start on a machine, with the installation of the node code."""
_SUDO = ("sudo", "-n", "--")


class Lab:
    """An open lab, for use as a context manager. Thread-safe: connections are shared and opened at first use."""

    def __init__(self, inventory: Inventory, addresses: Mapping[str, Address], *, accelerator: str | None) -> None:
        self.inventory_model = inventory
        self.accelerator = accelerator
        self._connections = {name: SshConnection(name, address) for name, address in addresses.items()}
        # Changes on machines need root; any other login user needs sudo without a password.
        self._prefixes = {name: () if address.user == "root" else _SUDO for name, address in addresses.items()}
        self._have_code: set[str] = set()
        self._cold: set[str] = set()
        """Machines without a warm parent that answers (`faultbed.testbed.remote.warm_start`)."""
        self._watchers: dict[str, Watcher] = {}
        self._started_ahead: dict[tuple[str, str], Future[Channel]] = {}
        self._lock = threading.Lock()
        self.guard: Callable[[], None] = lambda: None
        """Called before the lab is changed; raises if its lease is lost. Set by the holder of the lease."""
        self.reserved: tuple[str, ...] = (WHOLE_LAB,)
        """Names of hosts, switches and links that are reserved for this command (`testbed/tenancy/reservation.py`).

        Set by the holder of the lease.
        """
        self.held_by_others: Callable[[], tuple[str, ...]] = tuple
        """Names of hosts, switches and links that other commands have reserved now; set by the holder of the lease."""
        self.scheme: SchemeTables | None = None
        """Routing scheme that is applied to the switches, set by the code that applies it; None: BGP's own ECMP."""
        self.kernel_messages = KernelMessages()
        """The messages of the machines' kernel logs that watchers have sent."""

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
    def kind(self) -> LabKind:
        """The kind of lab."""
        return self.inventory_model.kind

    @property
    def topology(self) -> Topology:
        """The topology of the inventory."""
        return self.inventory_model.topology

    @property
    def inventory(self) -> Path:
        """The path of the inventory file."""
        return self.inventory_model.path

    @property
    def state_dir(self) -> Path:
        """The folder of the lab's state on the controller."""
        return lab_dir(self.name)

    def heartbeat(self) -> None:
        """Report progress, which refreshes the lab's lease; raises nothing."""
        with contextlib.suppress(FaultbedError):
            self.guard()

    def nodes(self) -> tuple[str, ...]:
        """Return the names of the machines that accept logins."""
        return tuple(self._connections)

    def node(self, name: str) -> Node:
        """Return a machine, or a switch (in a soft lab its commands run in its namespace).

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
        """Return the machine that carries a node: the carrier VM of a soft switch, otherwise the node itself."""
        carrier = self._carrier_name(name)
        return self.node(carrier or name)

    def netns(self, name: str) -> str | None:
        """Return the namespace of a soft switch on its carrier; None for a machine."""
        return self.inventory_model.netns.get(name)

    def qmp_socket(self, node: str) -> Path:
        """Return the socket at which fault holders command a VM's QEMU (`LabBackend.qmp_socket`)."""
        return backend_of(self.kind).qmp_socket(self.inventory_model, node)

    def vm_pid(self, node: str) -> int:
        """Return the process id of a VM's QEMU (`LabBackend.vm_pid`)."""
        return backend_of(self.kind).vm_pid(self.inventory_model, node)

    def nic_id(self, node: str, netdev: str) -> str:
        """Return the QEMU id of a VM's network device, for `set_link`.

        Raises:
            UsageError: the node is not a VM of a soft lab.
        """
        self.qmp_socket(node)
        return f"nic-{netdev}"

    def python(self, module: str) -> list[str]:
        """Return the command that runs a node-side module (`inject/node/holder.py`); `ensure_code` installs it."""
        return ["env", f"PYTHONPATH={node_archive.archive().folder}", "python3", "-m", module]

    def ensure_code(self, name: str) -> None:
        """Install the node code on the machine behind a node; checked once after the lab was opened."""
        machine = self.carrier(name)
        with self._lock:
            known = machine.name in self._have_code
        if not known:
            node_archive.ensure(machine)
            with self._lock:
                self._have_code.add(machine.name)

    def open_module(self, name: str, module: str, *words: str) -> Channel:
        """Start a node-side module on a node, or return the one that `started_ahead` has started there.

        Args:
            name: the node.
            module: name of the module.
            words: its arguments; a module with arguments is always started anew.

        Raises:
            Unreachable: the machine does not answer.
            LabError: the node code cannot be installed there.
        """
        with self._lock:
            started = None if words else self._started_ahead.pop((name, module), None)
        if started is not None:
            with contextlib.suppress(FaultbedError):  # if that start has failed, the module is started again below
                return result_of(started, Deadline(START_S), name)
        return self._open_module(name, module, *words)

    def _open_module(self, name: str, module: str, *words: str) -> Channel:
        forked = self._fork(name, module, *words)
        if forked is not None:
            return forked
        self.ensure_code(name)
        return self.node(name).open([*self.python(module), *words])

    def open_in_unit(
        self, name: str, module: str, *, unit: Sequence[str], by_interpreter: Callable[[Sequence[str]], Sequence[str]]
    ) -> Channel:
        """Start a node-side module as the main process of a transient unit on the machine behind a node.

        Args:
            name: the node.
            module: name of the module.
            unit: `systemd-run` with the unit's name and properties.
            by_interpreter: returns the whole command for a machine without a warm parent, from that of the module.

        Raises:
            Unreachable: the machine does not answer.
            LabError: the node code cannot be installed there.
        """
        machine = self.carrier(name)
        forked = self._fork(machine.name, module, unit=unit)
        if forked is not None:
            return forked
        self.ensure_code(name)
        return machine.open(by_interpreter(self.python(module)))

    def _fork(self, name: str, module: str, *words: str, unit: Sequence[str] = ()) -> Channel | None:
        """Start a module by the machine's warm parent; None: it has none, or did not answer."""
        with self._lock:
            is_cold = name in self._cold
        if is_cold or not self._may_be_warm(name):
            return None
        channel = warm_start.start_program(self._connections[name], [module, *words], unit=unit)
        if channel is None:
            with self._lock:
                self._cold.add(name)
        return channel

    def _may_be_warm(self, name: str) -> bool:
        """Return whether a node is a machine whose snapshot may have a warm parent; switches share their carrier's."""
        return traits_of(self.kind).has_snapshot and name in self._connections and not self._prefixes[name]

    def warm_parent(self, machine: str) -> dict[str, Any] | None:
        """Return what a machine's warm parent reports (`warm_start.prepare`); None: programs are started without one.

        Raises:
            Unreachable: the machine does not answer.
        """
        return warm_start.status(self._connections[machine]) if self._may_be_warm(machine) else None

    @contextlib.contextmanager
    def started_ahead(self, names: Iterable[str], module: str) -> Iterator[None]:
        """Start a node-side module on some nodes in the background, for `open_module` during the block.

        An interpreter takes seconds to start on an emulated machine. Modules that nobody has opened by the end of the
        block are ended.
        """
        keys = [(name, module) for name in dict.fromkeys(names)]
        with self._lock:
            for key in keys:
                name, _ = key
                self._started_ahead[key] = in_background(functools.partial(self._open_module, *key), f"start on {name}")
        try:
            yield
        finally:
            with self._lock:
                left = [(name, self._started_ahead.pop((name, module), None)) for name, module in keys]
            for name, started in left:
                if started is not None:
                    with contextlib.suppress(FaultbedError):
                        result_of(started, Deadline(START_S), name).close()

    def watcher(self, machine: str) -> Watcher:
        """Return the watcher of a machine, started at first use.

        Raises:
            Unreachable: the machine does not answer.
            LabError: the machine cannot run a watcher.
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

    def request(self, machine: str, request: Mapping[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Send a request to a machine's watcher; a watcher that has ended (a reboot, a kill) is started again.

        Raises:
            Unreachable: the machine does not answer.
            CommandFailed: no answer in time.
            LabError: the watcher reported that the request failed.
        """
        watcher = self.watcher(machine)
        try:
            return watcher.request(request, timeout_s=timeout_s)
        except WatcherGone:
            with self._lock:
                if self._watchers.get(machine) is watcher:
                    del self._watchers[machine]
            watcher.close()
            return self.watcher(machine).request(request, timeout_s=timeout_s)

    def kernel_log(self, machine: str) -> list[str]:
        """Return what a machine's kernel has logged since the last call; the first call starts to record.

        A watcher sends each message at once, so that those from before a reboot are known. If the machine has rebooted
        or its watcher was killed, the next watcher continues where the last one ended. Messages from the moment in
        which the machine or the management network dies can be lost.

        Raises:
            LabError: the machine does not answer, or its log may not be read.
        """
        request = {"do": "kernel_log", **self.kernel_messages.read_up_to(machine)}
        self.kernel_messages.keep(machine, self.request(machine, request))
        return self.kernel_messages.take(machine)

    def carried(self, nodes: Iterable[str]) -> dict[str, dict[str, str | None]]:
        """Group nodes by the machine that carries them: machine → node → its namespace there (None: no namespace)."""
        machines: dict[str, dict[str, str | None]] = {}
        for name in nodes:
            machines.setdefault(self._carrier_name(name) or name, {})[name] = self.netns(name)
        return machines

    def down_links(self, nodes: Iterable[str], *, timeout_s: float) -> frozenset[str]:
        """Return the names of the links that any of these nodes reports as down; unreachable nodes are skipped."""
        return read_down_links(self, nodes, timeout_s=timeout_s)

    def forget_connections(self) -> None:
        """Close all connections, which are dead after a reset; the next use opens new ones."""
        self.kernel_messages.forget()
        with self._lock:
            watchers, self._watchers = self._watchers, {}
        for watcher in watchers.values():
            watcher.close()
        for connection in self._connections.values():
            connection.close()
        with self._lock:
            self._have_code.clear()
            self._cold.clear()

    def forget(self, machine: str) -> None:
        """Close the connection to one machine, which is dead after its reboot; the next use opens a new one."""
        with self._lock:
            watcher = self._watchers.pop(machine, None)
            self._have_code.discard(machine)
            self._cold.discard(machine)
        if watcher is not None:
            watcher.close()
        self._connections[machine].close()

    def forget_dead(self, machine: str) -> None:
        """Close the connection to a machine that has rebooted, unless the machine answers over it.

        If it answers, the connection was opened after the reboot, and a job that has restarted there may use it.
        """
        try:
            self.node(machine).run(["true"], timeout_s=ALIVE_TIMEOUT_S)
        except (CommandFailed, Unreachable):
            self.forget(machine)

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
    access = backend_of(model.kind).access(model)
    return Lab(model, access.addresses, accelerator=access.accelerator)


def open_keeper(inventory: Inventory) -> Node:
    """Return the machine that keeps a rack lab's shared files: its jump host, or else its first machine.

    Raises:
        Unreachable: its host key is not pinned.
    """
    return open_machine(*(inventory.jump or next(iter(inventory.management.items()))))


def open_machine(name: str, management: Management) -> Node:
    """Return a machine with these SSH settings, which need not be in an inventory.

    Raises:
        Unreachable: its host key is not pinned.
    """
    return SshNode(name, SshConnection(name, machine_address(name, management)))


def machine_address(name: str, management: Management) -> Address:
    """Return how to reach a machine with these SSH settings and its pinned host key.

    Raises:
        Unreachable: its host key is not pinned.
    """
    return machine_addresses({name: management})[name]


def machine_addresses(machines: Mapping[str, Management]) -> dict[str, Address]:
    """Return how to reach each machine, by name, with its pinned host key.

    Raises:
        Unreachable: host keys are not pinned; the message names all of these machines.
    """
    known = paramiko.HostKeys()
    path = Path("~/.ssh/known_hosts").expanduser()
    if path.exists():
        known.load(str(path))
    addresses, missing = {}, []
    for name, management in machines.items():
        host, port = management.address or name, management.port or 22
        entry = host if port == 22 else f"[{host}]:{port}"  # noqa: PLR2004 (SSH's port)
        keys = known.lookup(entry)
        if not keys or "ssh-ed25519" not in keys:
            missing.append(name if name == entry else f"{name} ({entry})")
            continue
        addresses[name] = Address(
            host=host,
            port=port,
            user=management.user or "root",
            identity=Path(management.private_key_file or "~/.ssh/id_ed25519").expanduser(),
            host_key=f"ssh-ed25519 {keys['ssh-ed25519'].get_base64()}",
        )
    if missing:
        raise Unreachable(
            f"{path} has no ssh-ed25519 host key of {', '.join(missing)}; verify each key on the machine's console and "
            "add it, because faultbed trusts no key on first use"
        )
    return addresses
