"""The schema of faultbed's variables in an Ansible inventory, and the error messages for mistakes in them.

Every variable is `faultbed_<field>` of one of the structs below; unknown ones are refused. Variables with other names
(`ansible_*`, the user's own) are ignored. A place in an inventory is written `<group>.<host>.<field>...`, as in
`hosts.host1.rnics[0].address`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from faultbed.testbed.errors import ConfigError
from faultbed.testbed.finite import wrong_number
from faultbed.testbed.model.lab_kind import LabKind
from faultbed.testbed.suggestions import hint

__all__ = [
    "PREFIX",
    "BmcVars",
    "BufferVars",
    "BusbwVars",
    "CarrierVars",
    "DscpVars",
    "EcnVars",
    "FrontEndPortVars",
    "FrontEndVars",
    "GoldenVars",
    "GpuVars",
    "HostVars",
    "IgnoredMessageVars",
    "JumpVars",
    "LabVars",
    "ManagementVars",
    "Mistake",
    "Mistakes",
    "NetworkVars",
    "OutletVars",
    "PduVars",
    "PortVars",
    "QosVars",
    "RnicVars",
    "SafetyVars",
    "SwitchVars",
    "TierVars",
    "TiersVars",
    "Vars",
    "VmVars",
    "decode",
    "mistake",
    "near",
]

PREFIX = "faultbed_"


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all structs here: unknown keys are rejected. Subclasses inherit that from msgspec, but not `kw_only`."""


class BmcVars(_Strict, frozen=True, kw_only=True):
    """A machine's baseboard management controller; its credentials are never in an inventory."""

    address: str
    protocol: Literal["redfish", "ipmi"] = "redfish"
    system: str | None = None
    """The name below /redfish/v1/Systems, such as System.Embedded.1; without it, the BMC's only system is used."""
    cacert: str | None = None
    """Path, on the machine that faultbed runs on, of the certificate authority that signs the BMC's certificate."""


class PduVars(_Strict, frozen=True, kw_only=True):
    """A switched power distribution unit of the lab."""

    name: str
    address: str
    outlets: int


class OutletVars(_Strict, frozen=True, kw_only=True):
    """A PDU's outlet, counted from 1, that feeds a machine."""

    pdu: str
    outlet: int


class NetworkVars(_Strict, frozen=True, kw_only=True):
    """One line of the IP plan: what the addresses of `prefix` are for. Without `vlan`, each port is routed."""

    use: Literal["management", "bmc", "front-end", "back-end", "loopback", "storage"]
    prefix: str
    vlan: int | None = None


class DscpVars(_Strict, frozen=True, kw_only=True):
    """One line of the DSCP map: packets of `dscp` travel in `priority` (802.1p, 0 to 7)."""

    dscp: int
    priority: int
    use: str


class EcnVars(_Strict, frozen=True, kw_only=True):
    """WRED/ECN of the RoCE queue: no mark below `min_kib`, up to `max_percent` of the packets at `max_kib`."""

    min_kib: int
    max_kib: int
    max_percent: int


class BufferVars(_Strict, frozen=True, kw_only=True):
    """Buffers of a lossless priority on a switch port.

    `xon_kib` is reserved; the port ends a pause when no more than that is in use. The headroom, `xoff_kib`, must hold
    what still arrives after the port has sent a pause. `alpha` and `egress_alpha` are exponents: 2 to that power, times
    the pool's free space, is the most that the priority may use. The pools are those of the platform.
    """

    xon_kib: int
    xoff_kib: int
    alpha: int = 0
    egress_alpha: int = 3
    ingress_pool: str = "ingress_lossless_pool"
    egress_pool: str = "egress_lossless_pool"


class QosVars(_Strict, frozen=True, kw_only=True):
    """The QoS of RoCE in the lab. RNICs and switches are configured from this one profile.

    RNICs mark data with `roce_dscp` and congestion notification packets with `cnp_dscp`. PFC pauses the priorities in
    `pfc_priorities`. Without `buffer`, a switch keeps the lossless profiles that its platform derives from port speed
    and cable length.
    """

    profile: str
    trust: Literal["dscp", "pcp"] = "dscp"
    roce_dscp: int
    cnp_dscp: int
    pfc_priorities: list[int]
    dcqcn: bool
    ecn: EcnVars | None = None
    pfc_watchdog_ms: int | None = None
    buffer: BufferVars | None = None


class BusbwVars(_Strict, frozen=True, kw_only=True):
    """Lower bound of the busbw of a collective with `ranks` ranks and `size_bytes` or more.

    Busbw is that of nccl-tests, in GB/s of 10^9 bytes.
    """

    ranks: int
    size_bytes: int
    at_least_gbytes_per_s: float
    collective: str = "all-reduce"


class GoldenVars(_Strict, frozen=True, kw_only=True):
    """Required versions and PCIe links of every host. Preflight compares those that are given.

    `rnic_firmware` is by board (`board_id` in sysfs). The others are one value for all hosts: PCIe speed (GT/s) and
    width (lanes) of the RNICs, version of the GPUs' driver and of their VBIOS.
    """

    rnic_firmware: dict[str, str] = {}
    pcie_speed_gts: float | None = None
    pcie_width: int | None = None
    gpu_driver: str | None = None
    gpu_vbios: str | None = None


class IgnoredMessageVars(_Strict, frozen=True, kw_only=True):
    """Messages of kernels and switch daemons that are known and no problem, until the end of a day.

    Attributes:
        pattern: a regular expression that is found in the message's text, which begins after its level.
        reason: what is known about the message.
        until: the last day on which it is ignored.
        machines: patterns of names of the machines it is about; empty: all.
    """

    pattern: str
    reason: str
    until: dt.date
    machines: list[str] = []

    def __post_init__(self) -> None:
        """Refuse an entry that says nothing, or would hide everything."""
        try:
            hides_all = re.search(self.pattern, "") is not None
        except re.error as error:
            raise ValueError(f"pattern: {self.pattern!r} is no regular expression: {error}; correct it") from None
        if hides_all:
            raise ValueError(f"pattern: {self.pattern!r} matches every message; name the words that identify it")
        if not self.reason.strip():
            raise ValueError("reason: it is empty; write what is known of the message")


class SafetyVars(_Strict, frozen=True, kw_only=True):
    """Faults that the owner of a lab allows. A rack lab without these settings allows none, a soft lab allows all.

    Attributes:
        may_disrupt: patterns of target names (`host1:*`, `rtsw1:host1:*`).
        longest_fault_s: longest window of a fault.
        irreversible: kinds that cannot be reverted, or that may spread beyond their target (`congestion.pfc-storm`),
            are refused, need a confirmation, or are allowed.
        power_cycle: a BMC's power cycle is never planned, or only after heal has failed.
        most_links: how many links may be disturbed at the same time; None: 1 on a rack lab, any number on a soft lab.
        most_hosts: how many hosts may be disturbed at the same time; None as for `most_links`.
        most_switches: how many switches may be disturbed at the same time; None as for `most_links`.
        all_uplinks: whether all uplinks of a rack switch may be disturbed at the same time; None: not on a rack lab.
        min_spacing_s: time between the end of a fault and the begin of the next one; 0: faults may overlap.
    """

    may_disrupt: list[str] = []
    longest_fault_s: float = 60.0
    irreversible: Literal["never", "confirm", "allow"] = "confirm"
    power_cycle: Literal["never", "after-heal"] = "never"
    most_links: int | None = None
    most_hosts: int | None = None
    most_switches: int | None = None
    all_uplinks: Literal["never", "allow"] | None = None
    min_spacing_s: float = 0.0


class ManagementVars(_Strict, frozen=True, kw_only=True):
    """The interface that only SSH uses."""

    netdev: str
    mac: str


class VmVars(_Strict, frozen=True, kw_only=True):
    """Memory and CPUs of a soft lab's VM."""

    memory_mib: int
    vcpus: int = 1


class FrontEndVars(_Strict, frozen=True, kw_only=True):
    """A host's TCP interface; `address` has a prefix length."""

    netdev: str
    mac: str
    address: str


class RnicVars(_Strict, frozen=True, kw_only=True):
    """An RNIC: its RDMA name, its netdev, the switch it is cabled to and that switch's address on the link.

    `pcie` is its PCI address (`0000:18:00.0`), `gpu` the GPU below the same PCIe switch, `driver` its kernel driver
    (`mlx5_core`). Without `mtu` (bytes), the lab's MTU applies.
    """

    name: str
    netdev: str
    mac: str
    address: str
    gateway: str
    switch: str
    mtu: int | None = None
    speed_gbps: int | None = None
    pcie: str | None = None
    gpu: str | None = None
    driver: str | None = None


class GpuVars(_Strict, frozen=True, kw_only=True):
    """A GPU by its name on the host; `pcie` is its PCI address."""

    name: str
    kind: str
    pcie: str | None = None


class TierVars(_Strict, frozen=True, kw_only=True):
    """Values of all links of a tier, unless a port has its own.

    `taper` is the capacity of the links below a switch of the tier, divided by that of its uplinks. It determines the
    speed of uplinks that have none; otherwise it is compared with their speed. `queue_kib` and `delay_us` are the queue
    and the delay of a switch port of a soft lab; they are not divided by `rate_scale`.
    """

    speed_gbps: float | None = None
    taper: float | None = None
    queue_kib: int | None = None
    delay_us: int | None = None


class TiersVars(_Strict, frozen=True, kw_only=True):
    """Tiers of links by their lower end: host to rack switch, rack switch to spine, spine to aggregation."""

    host: TierVars | None = None
    rtsw: TierVars | None = None
    ctsw: TierVars | None = None


class PortVars(_Strict, frozen=True, kw_only=True):
    """A switch port. A host port has `rnic` and `address`; an uplink has an address if its BGP session is numbered.

    Preflight compares lanes, breakout, FEC, autonegotiation and cable length with the switch where they are given:
    `lanes` are the ASIC's, `breakout` is written as in SONiC (`2x400G`), `cable_m` is in metres. `queue_kib` and
    `delay_us` are the queue and the delay of what it sends, on a soft lab with a `rate_scale`.
    """

    netdev: str
    mac: str
    peer: str
    rnic: str | None = None
    address: str | None = None
    mtu: int | None = None
    speed_gbps: int | None = None
    lanes: list[int] | None = None
    breakout: str | None = None
    fec: Literal["rs", "fc", "none"] | None = None
    autoneg: bool | None = None
    cable_m: int | None = None
    queue_kib: int | None = None
    delay_us: int | None = None


class FrontEndPortVars(_Strict, frozen=True, kw_only=True):
    """A carrier's end of the front-end wire of host `peer`."""

    netdev: str
    mac: str
    peer: str


class LabVars(_Strict, frozen=True, kw_only=True):
    """Values for the whole lab. `mtu` is that of the back end, in bytes.

    A soft lab with a `rate_scale` shapes its switch ports: speeds are divided by it (20000 makes 400 Gb/s 20 Mb/s).
    """

    schema: int
    name: str
    kind: LabKind
    mtu: int = 4200
    ecmp_hash_seed: int = 0
    rate_scale: float | None = None
    tiers: TiersVars | None = None
    networks: list[NetworkVars] = []
    dscp_map: list[DscpVars] = []
    qos: QosVars | None = None
    pdus: list[PduVars] = []
    safety: SafetyVars | None = None
    busbw: list[BusbwVars] = []
    golden: GoldenVars | None = None
    ignored_messages: list[IgnoredMessageVars] = []


class HostVars(LabVars, frozen=True, kw_only=True):
    """A host's variables."""

    zone: str
    rack: str
    front_end: FrontEndVars
    rnics: list[RnicVars]
    gpus: list[GpuVars] = []
    management: ManagementVars | None = None
    bmc: BmcVars | None = None
    power: list[OutletVars] = []
    vm: VmVars | None = None


class SwitchVars(LabVars, frozen=True, kw_only=True):
    """A switch's variables. A soft switch has a `carrier` and the name of its network namespace there.

    Faultbed supports SONiC, FRR and Cumulus Linux without NVUE; `faultbed inventory check` says what works with the
    other values of `nos`.
    """

    zone: str
    asn: int
    loopback: str
    ports: list[PortVars]
    rack: str | None = None
    carrier: str | None = None
    netns: str | None = None
    nos: Literal["sonic", "frr", "cumulus", "nvue", "eos", "nxos", "junos", "fboss"] | None = None
    management: ManagementVars | None = None
    power: list[OutletVars] = []


class CarrierVars(LabVars, frozen=True, kw_only=True):
    """The variables of a VM that carries soft switches and the front end."""

    vm: VmVars
    front_end_ports: list[FrontEndPortVars] = []
    management: ManagementVars | None = None


class JumpVars(LabVars, frozen=True, kw_only=True):
    """The variables of a rack lab's jump host: only those of the whole lab."""


_TEMPLATE = re.compile(r"\{[{%#]")
"""The beginning of a Jinja template."""
Vars = TypeVar("Vars", HostVars, SwitchVars, CarrierVars, JumpVars)


def decode(hostvars: Mapping[str, Any], kind: type[Vars], *, file: Path, place: str) -> Vars:
    """Return our variables of one inventory host as a struct.

    Raises:
        ConfigError: one is missing, unknown or of a wrong type, is NaN, infinite or too large, or is a template; the
            message names `file` and the place within.
    """
    ours = {key.removeprefix(PREFIX): value for key, value in hostvars.items() if key.startswith(PREFIX)}
    if wrong := wrong_number(ours):
        raise mistake(file, f"{place}.{wrong[0]}", wrong[1])
    for path, text in _strings(ours, ""):
        if _TEMPLATE.search(text):  # in our playbooks Ansible would resolve it, and run the commands in it
            raise mistake(
                file, f"{place}{path}", f'a template is not resolved here; write the value instead of "{text}"'
            )
    try:
        return msgspec.convert(ours, kind)
    except msgspec.ValidationError as error:
        raise _config_error(str(error), kind=kind, ours=ours, file=file, place=place) from None


class Mistake(ConfigError):
    """Something wrong at one place of an inventory."""

    def __init__(self, file: Path, place: str, problem: str) -> None:
        super().__init__(f"{file}: {place}: {problem}")
        self.place = place
        self.what = problem


def mistake(file: Path, place: str, problem: str) -> Mistake:
    """Return an error in the common form `FILE: PLACE: WHAT`."""
    return Mistake(file, place, problem)


class Mistakes:
    """The mistakes in an inventory: the first is raised, or all are collected (`faultbed inventory check`)."""

    def __init__(self, *, collect: bool = False) -> None:
        self._collect = collect
        self.collected: list[Mistake] = []

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Check one part of the inventory in a `with` block. A collected mistake ends only this block."""
        try:
            yield
        except Mistake as error:
            if not self._collect:
                raise
            self.collected.append(error)


def near(word: str, known: list[str]) -> str:
    """Return the end of a message about an unknown word: the nearest known word, or all of them."""
    return f"; {hint(word, known)}"


def _config_error(message: str, *, kind: type[Any], ours: Mapping[str, Any], file: Path, place: str) -> ConfigError:
    """Convert a msgspec message (`Expected `int`, got `str` - at `$.vm.memory_mib``) to the form of `mistake`."""
    problem, _, tail = message.partition(" - at `$")
    path = tail.rstrip("`")
    location = f"{place}{path}"
    if match := re.fullmatch(r"Object missing required field `(\w+)`", problem):
        name = match[1] if path else PREFIX + match[1]
        return mistake(file, location, f"{name} is missing")
    if match := re.fullmatch(r"Object contains unknown field `(.+)`", problem):
        known = list(_struct_at(kind, path).__struct_fields__)
        if path:
            return mistake(file, location, f'unknown key "{match[1]}"{near(match[1], known)}')
        name = PREFIX + match[1]
        return mistake(file, location, f"unknown variable {name}{near(name, [PREFIX + word for word in known])}")
    value = _value_at(ours, path)
    if problem.startswith("Invalid enum value"):
        allowed = [str(word) for word in _type_at(kind, path).values]
        return mistake(file, location, f'"{value}" is not allowed{near(str(value), allowed)}')
    shown = "" if isinstance(value, dict | list) else f' "{value}"'
    if problem.startswith("Expected `str") and isinstance(value, int | float):
        shown += "; put it in quotes, or YAML reads it as a number"  # YAML 1.1 reads 10:20:30:40:50:59 in base 60
    if isinstance(value, dict) and any(str(key).startswith("__ansible_") for key in value):
        shown = "; tags of Ansible (!vault, !unsafe) are not resolved here, write the value itself"
    return mistake(file, location, f"{problem[0].lower()}{problem[1:].replace('`', '')}{shown}")


def _strings(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield every string of decoded YAML, keys too, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _strings(str(key), path)
            yield from _strings(part, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _strings(part, f"{path}[{index}]")


def _steps(path: str) -> list[str]:
    return re.findall(r"\w+|\[\.\.\.\]|\[\d+\]", path)


def _struct_at(kind: type[Any], path: str) -> type[Any]:
    """Return the struct type that a message path leads to."""
    result: type[Any] = _type_at(kind, path).cls
    return result


def _type_at(kind: type[Any], path: str) -> Any:
    """Return msgspec's description of the type that a message path leads to."""
    schema_type: Any = msgspec.inspect.type_info(kind)
    for step in _steps(path):
        if step.startswith("["):
            schema_type = (
                schema_type.value_type if isinstance(schema_type, msgspec.inspect.DictType) else schema_type.item_type
            )
        else:
            schema_type = next(field.type for field in schema_type.fields if field.encode_name == step)
        if isinstance(schema_type, msgspec.inspect.UnionType):
            schema_type = next(
                member for member in schema_type.types if not isinstance(member, msgspec.inspect.NoneType)
            )
    return schema_type


def _value_at(ours: Any, path: str) -> Any:
    for step in _steps(path):
        if step == "[...]":  # msgspec does not report under which key of a mapping
            return {}
        ours = ours[int(step[1:-1])] if step.startswith("[") else ours[step]
    return ours
