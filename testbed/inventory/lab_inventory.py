"""An Ansible inventory as the model of a lab.

`load` lets Ansible read the inventory (`faultbed.testbed.inventory.ansible_listing`), so groups and group variables
follow Ansible's rules. The result is decoded strictly (`faultbed.testbed.inventory.schema`) and cross-checked
(`faultbed.testbed.inventory.consistency`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faultbed.testbed.errors import ConfigError
from faultbed.testbed.inventory.ansible_listing import digest_of, listing
from faultbed.testbed.inventory.consistency import Entries, build_topology
from faultbed.testbed.inventory.rates import Shape, shapes_of, with_speeds
from faultbed.testbed.inventory.schema import (
    PREFIX,
    BmcVars,
    BusbwVars,
    CarrierVars,
    FrontEndPortVars,
    GoldenVars,
    HostVars,
    IgnoredMessageVars,
    JumpVars,
    LabVars,
    ManagementVars,
    Mistakes,
    PduVars,
    QosVars,
    SafetyVars,
    SwitchVars,
    Vars,
    VmVars,
    decode,
    mistake,
)
from faultbed.testbed.model.lab_kind import LabKind, traits_of
from faultbed.testbed.model.topology import SwitchRole, Topology

__all__ = ["Carrier", "Inventory", "Management", "entries_of", "lab_wide_vars", "load"]

SCHEMA = 1
_LAB_NAME = re.compile(r"\w[\w.-]*")  # files and reservations are named after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Management:
    """The management access of a machine; in a soft lab only `netdev` and `mac` are known before it runs."""

    netdev: str | None
    mac: str | None
    address: str | None
    port: int | None
    user: str | None
    private_key_file: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """A VM that carries `switches` as network namespaces, and the front end's bridge."""

    name: str
    switches: tuple[str, ...]
    front_end_ports: tuple[FrontEndPortVars, ...]


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """A lab as its inventory describes it.

    `management` has every node with a login: hosts, carriers, and switches that are machines. `jump` is the jump host
    of a rack lab (name and access), which faults and comparisons ignore. `vms` has the resources of each soft machine,
    `netns` the namespace of each soft switch; `mtu` is the back end's. `shapes` says how a soft lab's switches shape
    their ports, by switch and port: the speeds of the topology divided by `rate_scale`. `qos` and `priority_of_dscp`
    are a rack lab's profile and DSCP map, `safety` the faults that its owner allows, `bmcs` the hosts' baseboard
    management controllers, `pdus` the lab's power distribution units, `busbw` the lower bounds of collectives, `golden`
    the versions that hosts must have, `ignored_messages` the log messages that are no problem. `digest` is the SHA-256
    of the file and of the variables beside it that it uses.
    """

    path: Path
    name: str
    kind: LabKind
    topology: Topology
    carriers: tuple[Carrier, ...]
    management: Mapping[str, Management]
    vms: Mapping[str, VmVars]
    netns: Mapping[str, str]
    mtu: int
    ecmp_hash_seed: int
    rate_scale: float | None = None
    shapes: Mapping[str, Mapping[str, Shape]] = field(default_factory=dict)
    jump: tuple[str, Management] | None = None
    qos: QosVars | None = None
    priority_of_dscp: Mapping[int, int] = field(default_factory=dict)
    safety: SafetyVars | None = None
    bmcs: Mapping[str, BmcVars] = field(default_factory=dict)
    busbw: tuple[BusbwVars, ...] = ()
    pdus: tuple[PduVars, ...] = ()
    golden: GoldenVars | None = None
    ignored_messages: tuple[IgnoredMessageVars, ...] = ()
    digest: str = field(default="", compare=False)

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of the nodes with a login, hosts first."""
        return tuple(self.management)

    def hash_seed(self, switch: str) -> int:
        """Return the ECMP hash seed of a switch: the lab's, or one per tier in a soft lab with three tiers.

        With a common seed, a spine gets only flows with certain hash values. The same hash then maps all of them to
        the same uplink, and the other uplinks stay empty.
        """
        switches = self.topology.switches
        if not traits_of(self.kind).is_emulated or not any(switch.role == "atsw" for switch in switches):
            return self.ecmp_hash_seed
        tier = ("rtsw", "ctsw", "atsw").index(self.topology.switch_by_name[switch].role)
        return (self.ecmp_hash_seed + tier) % 2**32

    @property
    def may_lose_all_uplinks(self) -> bool:
        """Whether all uplinks of a rack switch may be affected at once (`faultbed_safety.all_uplinks`; soft: yes)."""
        setting = self.safety.all_uplinks if self.safety else None
        return (setting or ("allow" if traits_of(self.kind).has_snapshot else "never")) == "allow"


def load(path: Path) -> Inventory:
    """Read an inventory.

    Raises:
        ConfigError: the file is missing, not YAML, not a faultbed inventory, or invalid; the message names the place.
    """
    answer = listing(path)
    entries = entries_of(path, answer)
    lab = lab_wide_vars(path, entries)
    topology = with_speeds(build_topology(entries), lab, path)
    return Inventory(
        path=path,
        digest=digest_of(path, answer),
        name=lab.name,
        kind=lab.kind,
        topology=topology,
        carriers=tuple(
            Carrier(
                name=name,
                switches=tuple(
                    switch_name for switch_name, (_, switch) in entries.switches.items() if switch.carrier == name
                ),
                front_end_ports=tuple(carrier.front_end_ports),
            )
            for name, carrier in entries.carriers.items()
        ),
        management=_management(entries, answer),
        vms={name: node.vm for name, node in (entries.hosts | entries.carriers).items() if node.vm is not None},
        netns={name: switch.netns for name, (_, switch) in entries.switches.items() if switch.netns},
        mtu=lab.mtu,
        ecmp_hash_seed=lab.ecmp_hash_seed,
        rate_scale=lab.rate_scale,
        shapes=shapes_of(topology, lab, path),
        qos=lab.qos,
        priority_of_dscp={line.dscp: line.priority for line in lab.dscp_map},
        safety=lab.safety,
        busbw=tuple(lab.busbw),
        pdus=tuple(lab.pdus),
        golden=lab.golden,
        ignored_messages=tuple(lab.ignored_messages),
        bmcs={name: host.bmc for name, host in entries.hosts.items() if host.bmc is not None},
        jump=next(((name, _management_of(None, answer, name)) for name in entries.jumps), None),
    )


def entries_of(path: Path, answer: Mapping[str, Any], mistakes: Mistakes | None = None) -> Entries:
    """Return our variables of every node of a listing, by group.

    Raises:
        ConfigError: a variable is unknown or invalid. If `mistakes` collects, invalid nodes are excluded instead.
    """
    parts = mistakes or Mistakes()
    hostvars: dict[str, dict[str, Any]] = answer["_meta"]["hostvars"]
    missing = [f"no group `{group}`" for group in ("hosts", "switches") if not _members(answer, group)]
    ours = {key for variables in hostvars.values() for key in variables if key.startswith(PREFIX)}
    missing += [f"no variable {PREFIX}{name}" for name in ("schema", "name", "kind") if PREFIX + name not in ours]
    if missing:
        raise ConfigError(f"{path}: not a faultbed inventory: {', '.join(missing)}; inventory/soft.yml shows one")
    groups: dict[str, str] = {}
    for group in ("hosts", "rtsw", "ctsw", "atsw", "carriers", "jump"):
        for name in _members(answer, group):
            if name in groups:
                raise mistake(path, f"{group}.{name}", f"{name} is in the group {groups[name]} too; remove it from one")
            groups[name] = group
    for name in _members(answer, "switches"):
        if name not in groups:
            raise mistake(path, f"switches.{name}", "a switch must be in one of the groups rtsw, ctsw, atsw")
    roles: dict[str, SwitchRole] = {"rtsw": "rtsw", "ctsw": "ctsw", "atsw": "atsw"}

    def decoded(group: str, kind: type[Vars]) -> dict[str, Vars]:
        decoded_nodes = {}
        for name in _members(answer, group):
            with parts.part():
                decoded_nodes[name] = decode(hostvars.get(name, {}), kind, file=path, place=f"{group}.{name}")
        return decoded_nodes

    return Entries(
        file=path,
        hosts=decoded("hosts", HostVars),
        switches={
            name: (role, switch) for group, role in roles.items() for name, switch in decoded(group, SwitchVars).items()
        },
        carriers=decoded("carriers", CarrierVars),
        jumps=decoded("jump", JumpVars),
    )


def _members(answer: Mapping[str, Any], group: str) -> list[str]:
    """Return the names of a group's hosts and of its children's, in the order of the file."""
    members = answer.get(group, {})
    names = list(members.get("hosts", []))
    for child in members.get("children", []):
        names += [name for name in _members(answer, child) if name not in names]
    return names


def lab_wide_vars(path: Path, entries: Entries) -> LabVars:
    """Return the lab-wide variables, which must be the same on every node.

    Raises:
        ConfigError: they differ, or one is invalid; the message names the place.
    """
    nodes: list[tuple[str, LabVars]] = [(place, node) for place, node in entries.placed()]
    first_place, first = nodes[0]
    if first.schema != SCHEMA:
        raise mistake(path, f"{first_place}.schema", f"this version reads schema {SCHEMA}, not {first.schema}")
    if not _LAB_NAME.fullmatch(first.name):
        problem = f'not a lab\'s name "{first.name}": letters, digits, "_", "." and "-", a letter or digit first'
        raise mistake(path, f"{first_place}.name", problem)
    for place, node in nodes[1:]:
        for name in LabVars.__struct_fields__:
            expected, actual = getattr(first, name), getattr(node, name)
            if expected != actual:
                raise mistake(
                    path,
                    f"{place}.{name}",
                    f'"{actual}" here but "{expected}" for {first_place}: set it once, in `all`',
                )
    return first


def _management(entries: Entries, answer: Mapping[str, Any]) -> dict[str, Management]:
    nodes: dict[str, HostVars | SwitchVars | CarrierVars] = {
        **entries.hosts,
        **{name: switch for name, (_, switch) in entries.switches.items() if switch.carrier is None},
        **entries.carriers,
    }
    return {name: _management_of(node.management, answer, name) for name, node in nodes.items()}


def _management_of(management: ManagementVars | None, answer: Mapping[str, Any], name: str) -> Management:
    variables: Mapping[str, Any] = answer["_meta"]["hostvars"].get(name, {})
    return Management(
        netdev=management.netdev if management else None,
        mac=management.mac if management else None,
        address=variables.get("ansible_host"),
        port=variables.get("ansible_port"),
        user=variables.get("ansible_user"),
        private_key_file=variables.get("ansible_ssh_private_key_file"),
    )
