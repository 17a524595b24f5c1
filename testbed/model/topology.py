"""The topology of a lab: zones, racks, switches, hosts, RNICs, GPUs and the links between them.

Frozen data and pure functions; nothing here talks to a machine. Terms are those of the literature: an RTSW is a rack
switch, a CTSW a spine, an ATSW the aggregation above zones (Meta, SIGCOMM 2024, "RDMA over Ethernet for Distributed AI
Training at Meta Scale").

Names of things, as users type them (`Topology.resolve`):

    host1               a host                     rtsw1              a switch
    host1:rxe0          an RNIC of a host          rtsw1:ctsw1        the link between two switches, rtsw1's end
    host1:gpu0          a GPU of a host            rtsw1:host1:rxe0   the switch port that faces that RNIC
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

from faultbed.testbed.errors import UsageError
from faultbed.testbed.suggestions import nearest

# The key of a soft lab's snapshot contains the `repr` of its topology (faultbed.testbed.backends.soft.snapshot_key). A
# field has `repr=False` if it has no effect on a soft lab, or if the key contains its effect elsewhere
# (`Inventory.shapes`).
__all__ = ["Gpu", "Host", "Link", "Port", "Rnic", "Switch", "SwitchRole", "Target", "Topology"]

SwitchRole = Literal["rtsw", "ctsw", "atsw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rnic:
    """An RDMA network interface of a host, on the back-end fabric.

    `address` is the interface address with its prefix length (`10.77.1.1/31`); the RoCEv2 GID is `::ffff:` plus it.
    `pcie` is its PCI address (`0000:18:00.0`), `gpu` the name of the GPU below the same PCIe switch and `driver` its
    kernel driver; each is None if the inventory does not give it.
    """

    name: str
    netdev: str
    mac: str
    address: str
    pcie: str | None = field(default=None, repr=False)
    gpu: str | None = field(default=None, repr=False)
    driver: str | None = field(default=None, repr=False)

    @property
    def ip(self) -> str:
        """The address without its prefix length."""
        return str(ipaddress.ip_interface(self.address).ip)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of a host. In a soft lab `kind` is `soft`: a compute process in a cgroup of its own."""

    name: str
    kind: str
    pcie: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A server in a rack. Its front end is a TCP interface, never an RDMA path. Addresses have a prefix length."""

    name: str
    zone: str
    rack: str
    rnics: tuple[Rnic, ...]
    gpus: tuple[Gpu, ...]
    front_end_netdev: str
    front_end_mac: str
    front_end_address: str

    @property
    def front_end_ip(self) -> str:
        """The front-end address without its prefix length."""
        return str(ipaddress.ip_interface(self.front_end_address).ip)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A switch of the fabric. `rack` is set for an RTSW only; `carrier` names the VM that carries a soft switch.

    `nos` is the operating system of a switch that is a machine: `sonic`, `frr`, `cumulus`, or one without support.
    """

    name: str
    role: SwitchRole
    zone: str
    rack: str | None
    asn: int
    loopback: str
    carrier: str | None
    nos: str | None = field(default=None, repr=False)

    @property
    def is_linux(self) -> bool:
        """Whether it is a namespace of a soft lab's VM, or a Linux machine with FRR."""
        return self.carrier is not None or self.nos in ("frr", "cumulus")

    @property
    def forwards_in_kernel(self) -> bool:
        """Whether its Linux kernel forwards each packet. If an ASIC forwards them, the kernel sees none of them."""
        return self.is_linux and self.nos != "cumulus"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One end of a link: the node, its interface, and the interface's MAC and address (None: BGP unnumbered).

    `lanes` (of the ASIC), `breakout`, `fec`, `autoneg` and `cable_m` are required of a switch's port; None: not given.

    `mtu` (bytes) and `speed_gbps` are the values that the inventory requires; None: it gives none. `queue_kib` and
    `delay_us` are the queue and the delay of what the port sends; None: those of its tier apply.
    """

    node: str
    netdev: str
    mac: str
    address: str | None
    mtu: int | None = field(default=None, repr=False)
    speed_gbps: float | None = field(default=None, repr=False)
    lanes: tuple[int, ...] | None = field(default=None, repr=False)
    breakout: str | None = field(default=None, repr=False)
    fec: str | None = field(default=None, repr=False)
    autoneg: bool | None = field(default=None, repr=False)
    cable_m: int | None = field(default=None, repr=False)
    queue_kib: int | None = field(default=None, repr=False)
    delay_us: int | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A cable. `a` is the rack switch of a host link, or the lower tier's switch of an uplink; `b` is the other end."""

    a: Port
    b: Port
    rnic: str | None
    """Name of the RNIC at the `b` end of a host link; None for a link between switches."""

    @property
    def name(self) -> str:
        """`rtsw1:ctsw1`, or `rtsw1:host1:rxe0` for a host link."""
        return ":".join([self.a.node, self.b.node, *([self.rnic] if self.rnic else [])])

    @property
    def is_uplink(self) -> bool:
        """Whether both ends are switches."""
        return self.rnic is None

    def end(self, node: str) -> Port:
        """Return the end of this link that is on `node`."""
        return self.a if self.a.node == node else self.b

    def other(self, node: str) -> Port:
        """Return the end of this link that is not on `node`."""
        return self.b if self.a.node == node else self.a


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The target of a fault or an end of a flow, resolved from its name.

    `kind` is `host`, `switch`, `rnic`, `gpu` or `port`; `port` and `link` are set for `port` and (its host end) `rnic`.
    """

    text: str
    kind: Literal["host", "switch", "rnic", "gpu", "port"]
    node: str
    rnic: Rnic | None = None
    gpu: Gpu | None = None
    port: Port | None = None
    link: Link | None = None


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A whole lab. Names are unique over hosts and switches."""

    hosts: tuple[Host, ...]
    switches: tuple[Switch, ...]
    links: tuple[Link, ...]

    @cached_property
    def host_by_name(self) -> dict[str, Host]:
        """Hosts by name."""
        return {host.name: host for host in self.hosts}

    @cached_property
    def switch_by_name(self) -> dict[str, Switch]:
        """Switches by name."""
        return {switch.name: switch for switch in self.switches}

    @property
    def zones(self) -> tuple[str, ...]:
        """Zone names, sorted."""
        return tuple(sorted({h.zone for h in self.hosts} | {s.zone for s in self.switches}))

    @property
    def racks(self) -> tuple[str, ...]:
        """Rack names, sorted."""
        return tuple(sorted({host.rack for host in self.hosts}))

    @property
    def uplinks(self) -> tuple[Link, ...]:
        """Links between switches."""
        return tuple(link for link in self.links if link.is_uplink)

    @property
    def rnic_names(self) -> tuple[str, ...]:
        """Names of all RNICs (`host1:rxe0`), in the order of the inventory."""
        return tuple(f"{host.name}:{rnic.name}" for host in self.hosts for rnic in host.rnics)

    def links_of(self, node: str) -> tuple[Link, ...]:
        """Return the links with an end on `node`, in the order of the inventory."""
        return tuple(link for link in self.links if node in (link.a.node, link.b.node))

    def rnic_link(self, host: str, rnic: str) -> Link:
        """Return the link of an RNIC.

        Raises:
            UsageError: there is no such RNIC.
        """
        for link in self.links:
            if link.b.node == host and link.rnic == rnic:
                return link
        raise UsageError(f"no RNIC {host}:{rnic} in this lab{self._near(f'{host}:{rnic}')}")

    def target_names(self) -> Iterator[str]:
        """Yield the name of every target. An uplink has two names, one from each end."""
        for host in self.hosts:
            yield host.name
            yield from (f"{host.name}:{rnic.name}" for rnic in host.rnics)
            yield from (f"{host.name}:{gpu.name}" for gpu in host.gpus)
        for switch in self.switches:
            yield switch.name
        for link in self.links:
            yield link.name
            if link.is_uplink:
                yield f"{link.b.node}:{link.a.node}"

    def crosses(self, path: Sequence[str], link: Link) -> bool | None:
        """Return whether packets that cross the nodes of a path cross a link; None: it is unknown.

        An empty path means that the path is unknown. It is also unknown which of several parallel links packets take.
        """
        if not path:
            return None
        ends = {link.a.node, link.b.node}
        if ends not in [set(pair) for pair in pairwise(path)]:
            return False
        parallel = [other for other in self.links_of(link.a.node) if {other.a.node, other.b.node} == ends]
        return True if len(parallel) == 1 else None

    def resolve(self, text: str) -> Target:
        """Return the target of a name. The RNIC may be left out of a host link's name if that is unambiguous.

        Raises:
            UsageError: unknown or ambiguous; the message names the nearest or the possible names.
        """
        first, *rest = text.split(":")
        if first in self.host_by_name:
            return self._resolve_on_host(text, self.host_by_name[first], rest)
        if first in self.switch_by_name:
            return self._resolve_on_switch(text, first, rest)
        raise UsageError(f'no target "{text}" in this lab{self._near(text)}')

    def _resolve_on_host(self, text: str, host: Host, rest: list[str]) -> Target:
        if not rest:
            return Target(text=text, kind="host", node=host.name)
        if len(rest) == 1:
            for rnic in host.rnics:
                if rnic.name == rest[0]:
                    link = self.rnic_link(host.name, rnic.name)
                    return Target(text=text, kind="rnic", node=host.name, rnic=rnic, port=link.b, link=link)
            for gpu in host.gpus:
                if gpu.name == rest[0]:
                    return Target(text=text, kind="gpu", node=host.name, gpu=gpu)
        raise UsageError(f'no target "{text}" in this lab{self._near(text)}')

    def _resolve_on_switch(self, text: str, switch: str, rest: list[str]) -> Target:
        if not rest:
            return Target(text=text, kind="switch", node=switch)
        matches = [
            link
            for link in self.links_of(switch)
            if link.other(switch).node == rest[0] and (len(rest) == 1 or rest[1:] == [link.rnic])
        ]
        if len(matches) > 1:
            raise UsageError(
                f'"{text}" names {len(matches)} links of {switch}: say which, {" or ".join(x.name for x in matches)}'
            )
        if not matches:
            raise UsageError(f'no link "{text}" in this lab{self._near(text)}')
        return Target(text=text, kind="port", node=switch, port=matches[0].end(switch), link=matches[0])

    def _near(self, text: str) -> str:
        near = nearest(text, self.target_names())
        return f"; did you mean {near}?" if near else f"; it has {', '.join(sorted(self.target_names())[:12])}, ..."
