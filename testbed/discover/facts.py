"""The facts in a machine's answer to discovery: readers for what its tools print.

    ip, fdb, rdma     iproute2's JSON
    bgp               FRR: `show bgp ipv4 unicast summary json`
    lldp              `lldpctl -f json` (lldpd); a single entry is an object, several are a list
    gpu               `nvidia-smi --query-gpu=index,name,pci.bus_id --format=csv,noheader`
    ports             SONiC: `sonic-cfggen -d --var-json PORT`, ConfigDB's table of ports with their aliases
    device, pci       real paths below /sys/devices: each component is a bridge on the way to the device

LLDP, GPUs and PCI were written from the documentation of those tools: not yet run on hardware.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from faultbed.testbed.discover.answers import Answers
from faultbed.testbed.errors import LabError

__all__ = ["Gpu", "Interface", "LldpPeer", "Machine", "Namespace", "broadcast", "machine_of", "pci_path"]

_RAM = re.compile(r"\s*([0-9a-f]+)-([0-9a-f]+) : System RAM")
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_RAM_STEP_MIB = 16
_MIB = 1 << 20
_MAX_PREFIX = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """An Ethernet interface of a network namespace.

    `addresses` are IPv4 with prefix length, `addresses_v6` IPv6 without. `master` is the bridge or bond above it, and
    `below` the interface that a VLAN or MACVLAN is on.
    """

    name: str
    mac: str
    mtu: int
    addresses: tuple[str, ...]
    master: str | None
    kind: str | None
    addresses_v6: tuple[str, ...] = ()
    below: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LldpPeer:
    """The LLDP neighbour of an interface: its full system name, and the names of its port (id, description)."""

    system: str
    ports: frozenset[str]

    @property
    def description(self) -> str:
        """The neighbour in messages: `leaf7.example.net (Ethernet8, etp2)`."""
        return f"{self.system} ({', '.join(sorted(self.ports)) or 'no port named'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU by its index, product name and PCI address (`0000:19:00.0`)."""

    index: int
    product: str
    pcie: str

    @property
    def name_on_host(self) -> str:
        """The GPU's name in an inventory: `gpu0`."""
        return f"gpu{self.index}"

    @property
    def kind(self) -> str:
        """The GPU's kind in an inventory: `h100-sxm` for "NVIDIA H100 80GB HBM3" (only SXM modules are called HBM3)."""
        words = [word for word in self.product.lower().split() if word != "nvidia"]
        model = words[0] if words else "unknown"
        return f"{model}-sxm" if "hbm3" in words else "-".join(w for w in words if not re.fullmatch(r"[0-9]+gb", w))


@dataclass(kw_only=True)
class Namespace:
    """One network namespace.

    `loopbacks` are IPv4 addresses of lo outside 127/8, `gateways` default gateways by interface, `neighbours` MACs
    heard on an interface, `learned` MACs that a bridge has seen behind an interface. `asn` and `router_id` are BGP's;
    `peers` has the router ID of the BGP peer on an interface.
    """

    interfaces: dict[str, Interface] = field(default_factory=dict)
    loopbacks: tuple[str, ...] = ()
    gateways: dict[str, str] = field(default_factory=dict)
    neighbours: dict[str, set[str]] = field(default_factory=dict)
    learned: dict[str, set[str]] = field(default_factory=dict)
    asn: int | None = None
    router_id: str | None = None
    peers: dict[str, str] = field(default_factory=dict)
    hash_seed: int | None = None


@dataclass(kw_only=True)
class Machine:
    """One machine that answered.

    Attributes:
        own: the machine's own network namespace.
        hostname: the name that the machine itself reports.
        aliases: interface by SONiC alias.
        excluded_rnics: RNICs that do not belong to the back end, with the reason.
        ambiguous_lldp: interfaces that receive LLDP from several neighbours, because another device is between.
            `lldp` does not have them.
        namespaces: named network namespaces.
        rdma: (RNIC, interface) in the kernel's order.
        paths: path of each PCI device below /sys/devices, by its address.
        speeds_gbps: speed of each interface.
        ssh_netdev: interface that SSH uses.
    """

    name: str
    own: Namespace
    hostname: str | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    excluded_rnics: dict[str, str] = field(default_factory=dict)
    ambiguous_lldp: dict[str, tuple[str, ...]] = field(default_factory=dict)
    namespaces: dict[str, Namespace] = field(default_factory=dict)
    nos: str | None = None
    rdma: tuple[tuple[str, str], ...] = ()
    rnic_pcie: dict[str, str] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    speeds_gbps: dict[str, int] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    soft_gpus: tuple[str, ...] = ()
    lldp: dict[str, LldpPeer] = field(default_factory=dict)
    memory_mib: int = 0
    cpus: int = 0
    ssh_netdev: str | None = None
    bmc: str | None = None

    @property
    def is_soft(self) -> bool:
        """Whether its RNICs are software: none is a device of the PCI bus."""
        return bool(self.rdma) and not self.rnic_pcie

    @property
    def is_host(self) -> bool:
        """Whether it is a server: it has RNICs and no switch's operating system."""
        return bool(self.rdma) and self.nos is None

    @property
    def is_switch(self) -> bool:
        """Whether it speaks BGP and has no RNIC."""
        return not self.rdma and self.own.asn is not None


_TOOL_OF = {
    "ip": "ip -j (iproute2)", "bgp": "vtysh (FRR)", "sessions": "vtysh (FRR)", "rdma": "rdma -j link",
    "ports": "sonic-cfggen", "lldp": "lldpctl -f json",
}  # fmt: skip
"""The tool that prints each section that is JSON."""


def machine_of(name: str, answers: Answers) -> Machine:
    """Return the facts of one machine. What a tool does not print is missing and no error.

    Raises:
        LabError: a tool prints a structure of another kind than expected; the message names it.
    """
    own = answers.own
    machine = Machine(name=name, own=_namespace(name, own))
    machine.namespaces = {
        namespace: _namespace(f"{name}, namespace {namespace}", sections)
        for namespace, sections in answers.namespaces.items()
    }
    machine.nos = _nos(own.get("os", ""), speaks_bgp=machine.own.asn is not None)
    machine.hostname = own.get("hostname", "").strip() or None
    machine.ssh_netdev = _ssh_netdev(own.get("ssh", ""), machine.own)
    with _output_of("rdma", name):
        _add_rnics(machine, own.get("rdma", ""))
    machine.paths = {parts[-1]: parts for parts in map(pci_path, own.get("pci", "").split()) if parts}
    for line in own.get("device", "").splitlines():
        rnic, _, path = line.partition(" ")
        if parts := pci_path(path):
            machine.rnic_pcie[rnic] = parts[-1]
            machine.paths.setdefault(parts[-1], parts)
    for path, _, mbps in (line.partition(":") for line in own.get("speed", "").splitlines()):
        if mbps.strip().isdecimal():
            machine.speeds_gbps[path.split("/")[-2]] = int(mbps) // 1000
    with _output_of("ports", name):
        for dev, port in _object(own.get("ports", "")).items():
            machine.aliases[str(port.get("alias", dev))] = str(dev)
            # The speed that the kernel reports for a SONiC interface is not that of the ASIC's port; ConfigDB has that.
            if str(port.get("speed", "")).isdecimal():
                machine.speeds_gbps[str(dev)] = int(port["speed"]) // 1000
    machine.gpus = tuple(_gpus(own.get("gpu", "")))
    units = (line.rpartition("/")[2] for line in own.get("softgpu", "").split())
    machine.soft_gpus = tuple(sorted(unit.removeprefix("faultbed-").removesuffix(".service") for unit in units))
    lldp_peers: dict[str, set[LldpPeer]] = {}
    with _output_of("lldp", name):
        for dev, peer in _lldp(own.get("lldp", "")):
            lldp_peers.setdefault(dev, set()).add(peer)
    machine.lldp = {dev: peers.pop() for dev, peers in lldp_peers.items() if len(peers) == 1}
    machine.ambiguous_lldp = {
        dev: tuple(sorted(peer.description for peer in peers)) for dev, peers in lldp_peers.items() if len(peers) > 1
    }
    machine.memory_mib = _memory_mib(own.get("memory", ""))
    cpus = own.get("cpus", "").strip()
    machine.cpus = int(cpus) if cpus.isdecimal() else 0
    if bmc_address := re.search(r"^IP Address\s+: (\S+)", own.get("bmc", ""), re.MULTILINE):
        machine.bmc = None if bmc_address[1] == "0.0.0.0" else bmc_address[1]  # noqa: S104 (a BMC without an address)
    return machine


def _add_rnics(machine: Machine, body: str) -> None:
    """Add a machine's RNICs. Those that cannot belong to a back end go to `excluded_rnics` with the reason."""
    rnics = []
    carries_ssh = _below(machine.ssh_netdev, machine.own)
    for item in _items(body):
        rnic, dev = item["ifname"], item.get("netdev")
        if not isinstance(rnic, str) or not isinstance(dev, str | None):
            raise TypeError(f"no names: {rnic!r}, {dev!r}")
        rnic = rnic.partition("/")[0]  # up to 2018 iproute2 printed mlx5_0/1 here, with the port (rdma/link.c)
        port = machine.own.interfaces.get(str(dev))
        if not dev:
            machine.excluded_rnics[rnic] = (
                "it has no Ethernet interface: it is InfiniBand, a representor, or in another network namespace"
            )
        elif dev in carries_ssh:
            machine.excluded_rnics[rnic] = f"{carries_ssh[dev]}; it is therefore taken for the front end"
        elif port is not None and port.kind == "bond":
            machine.excluded_rnics[rnic] = f"{dev} is a bond, but an inventory has exactly one cable for each RNIC"
        else:
            rnics.append((rnic, str(dev)))
    machine.rdma = tuple(rnics)


@contextlib.contextmanager
def _output_of(section: str, place: str) -> Iterator[None]:
    """Convert an error of a reader into an error that names the tool whose output it could not read.

    Raises:
        LabError: the output does not have the structure that the reader expects.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise LabError(
            f"{place}: {_TOOL_OF[section]} prints output that cannot be read ({type(error).__name__}: {error}); "
            "run it by hand: its version may not be supported"
        ) from error


def _namespace(place: str, sections: Mapping[str, str]) -> Namespace:
    namespace = Namespace()
    with _output_of("ip", place):
        for item in _items(sections.get("ip", "")):
            if "ifname" in item and "link_type" in item:
                _add_interface(namespace, item)
            elif item.get("dst") == "default" and "gateway" in item and "dev" in item:
                namespace.gateways.setdefault(str(item["dev"]), str(item["gateway"]))
            elif "lladdr" in item:
                namespace.neighbours.setdefault(str(item["dev"]), set()).add(str(item["lladdr"]))
    for item in _items(sections.get("fdb", "")):
        if item.get("state") != "permanent" and "mac" in item and "ifname" in item:
            namespace.learned.setdefault(str(item["ifname"]), set()).add(str(item["mac"]))
    with _output_of("bgp", place):
        summary = _object(sections.get("bgp", ""))
        if "as" in summary:
            namespace.asn = int(summary["as"])
            namespace.router_id = summary.get("routerId")
    with _output_of("sessions", place):
        sessions = _object(sections.get("sessions", "")).items()
        namespace.peers = {dev: str(peer["remoteRouterId"]) for dev, peer in sessions if peer.get("remoteRouterId")}
    seed = sections.get("seed", "").strip()
    namespace.hash_seed = int(seed) if seed.isdecimal() else None
    return namespace


def _add_interface(namespace: Namespace, item: Mapping[str, Any]) -> None:
    addresses = tuple(
        f"{entry['local']}/{entry['prefixlen']}" for entry in item.get("addr_info", ()) if entry.get("family") == "inet"
    )
    if item["link_type"] == "loopback":
        namespace.loopbacks = tuple(x for x in addresses if not ipaddress.IPv4Interface(x).is_loopback)
    elif item["link_type"] == "ether":
        kind = item.get("linkinfo", {}).get("info_kind")
        namespace.interfaces[str(item["ifname"])] = Interface(
            name=str(item["ifname"]),
            mac=str(item["address"]),
            mtu=int(item["mtu"]),
            addresses=addresses,
            master=item.get("master"),
            kind=kind,
            addresses_v6=tuple(
                str(entry["local"]) for entry in item.get("addr_info", ()) if entry.get("family") == "inet6"
            ),
            below=item.get("link"),
        )


def _nos(body: str, *, speaks_bgp: bool) -> str | None:
    words = body.split()
    if "sonic" in words:
        return "sonic"
    if "cumulus-linux" in words:
        return "cumulus"
    return "frr" if speaks_bgp else None


def pci_path(path: str) -> tuple[str, ...]:
    """Split a path such as /sys/devices/pci0000:15/0000:18:00.0, root first; empty if it is not a PCI device."""
    parts = path.strip().split("/")
    if len(parts) < 5 or not parts[3].startswith("pci") or not _PCI.fullmatch(parts[-1]):  # noqa: PLR2004 (/sys/devices/)
        return ()
    return tuple(parts[3:])


def _gpus(body: str) -> Iterator[Gpu]:
    for line in body.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and words[0].isdecimal():  # noqa: PLR2004 (the requested fields)
            # nvidia-smi writes the PCI domain with eight digits, the kernel with four.
            domain, _, rest = words[2].lower().partition(":")
            if _PCI.fullmatch(pcie := f"{domain[-4:]}:{rest}"):
                yield Gpu(index=int(words[0]), product=words[1], pcie=pcie)


def _lldp(body: str) -> Iterator[tuple[str, LldpPeer]]:
    for interface in _listed(_object(body).get("lldp", {}).get("interface")):
        for netdev, neighbour in interface.items():
            port = neighbour.get("port", {})
            names = {str(_listed(port.get("id"))[0].get("value", "")) if port.get("id") else "", str(port.get("descr"))}
            # With a system name, that is the key; without one, lldpctl puts the chassis itself there.
            for system, chassis in neighbour.get("chassis", {}).items():
                if isinstance(chassis, dict) and "value" not in chassis:
                    yield netdev, LldpPeer(system=str(system), ports=frozenset(names - {"", "None"}))


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _memory_mib(body: str) -> int:
    """Return the machine's memory, rounded up: the firmware reserves a few hundred KiB and reports the rest."""
    ranges = [_RAM.match(line) for line in body.splitlines()]
    total = sum(int(match[2], 16) - int(match[1], 16) + 1 for match in ranges if match)
    return -(-total // (_RAM_STEP_MIB * _MIB)) * _RAM_STEP_MIB


def _ssh_netdev(body: str, namespace: Namespace) -> str | None:
    """Return the interface with the server's address of SSH_CONNECTION: client, its port, server, its port (ssh(1))."""
    words = body.split()
    if len(words) != 4:  # noqa: PLR2004 - see above
        return None
    # A link-local address has its interface behind it; a server that listens on :: names IPv4 clients ::ffff:a.b.c.d.
    text, _, scope = words[2].partition("%")
    if scope in namespace.interfaces:
        return scope
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    for interface in namespace.interfaces.values():
        if address in map(ipaddress.ip_address, (*_without_prefix(interface), *interface.addresses_v6)):
            return interface.name
    return None


def _without_prefix(interface: Interface) -> Iterator[str]:
    return (address.partition("/")[0] for address in interface.addresses)


def _below(netdev: str | None, namespace: Namespace) -> dict[str, str]:
    """Return the interfaces that carry the traffic of `netdev`: itself, members of its bond or bridge, a VLAN's parent.

    The value of each is a phrase that says how SSH traffic reaches it.
    """
    reached: dict[str, str] = {}
    waiting = [] if netdev is None else [(netdev, f"SSH uses {netdev}")]
    while waiting:
        name, why = waiting.pop()
        if name in reached:
            continue
        reached[name] = why
        members = [one.name for one in namespace.interfaces.values() if one.master == name]
        waiting += [(member, f"SSH uses {netdev}, which {member} carries") for member in members]
        interface = namespace.interfaces.get(name)
        # Without `link` (an old iproute2), a VLAN's name tells: ens1f0.10 is on ens1f0.
        parent = None if interface is None else interface.below
        if parent is None and interface is not None and interface.kind in (None, "vlan"):
            parent = next((known for known in namespace.interfaces if known == name.rpartition(".")[0]), None)
        if parent is not None:
            waiting.append((parent, f"SSH uses {netdev}, which {parent} carries"))
    return reached


def broadcast(address: str) -> str | None:
    """Return the broadcast address of an interface address's subnet; None: it has none (RFC 3021)."""
    network = ipaddress.IPv4Interface(address).network
    return None if network.prefixlen >= _MAX_PREFIX else str(network.broadcast_address)


def _object(body: str) -> dict[str, Any]:
    try:
        decoded = json.loads(body or "{}")
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _items(body: str) -> Iterator[dict[str, Any]]:
    """Yield every object of the JSON lists in a text; other text is skipped."""
    decoder, at = json.JSONDecoder(), 0
    while (at := body.find("[", at)) >= 0:
        try:
            decoded, at = decoder.raw_decode(body, at)
        except ValueError:
            at += 1
            continue
        except RecursionError:
            # Nothing that a tool prints is that deep, and to try each of its lists would take quadratic time.
            at = len(body) if (line_end := body.find("\n", at)) < 0 else line_end
            continue
        yield from (item for item in decoded if isinstance(item, dict))
