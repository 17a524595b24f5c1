"""Find all mistakes in an inventory: `faultbed inventory check`.

`faultbed.testbed.inventory.lab_inventory.load` stops at the first mistake; the audit reports all of them. It also
reports mistakes that would only show on the running lab: an MTU that shrinks along a path, an address outside the IP
plan, a QoS profile that pauses the wrong priority, two machines on one outlet. Pure, except that `audit` reads the
inventory and `unreachable` opens connections.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import math
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faultbed.testbed.inventory.ansible_listing import listing
from faultbed.testbed.inventory.audit_finding import InventoryFinding, repeated_values
from faultbed.testbed.inventory.consistency import Entries, build_topology
from faultbed.testbed.inventory.lab_inventory import Inventory, entries_of, lab_wide_vars
from faultbed.testbed.inventory.rates import shapes_of, with_speeds
from faultbed.testbed.inventory.rules.access_paths import check_access_paths
from faultbed.testbed.inventory.rules.fabric_rules import check_fabric
from faultbed.testbed.inventory.rules.role_variables import misspelt
from faultbed.testbed.inventory.rules.unsupported_parts import check_parts
from faultbed.testbed.inventory.schema import GoldenVars, LabVars, Mistakes, QosVars
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.side_by_side import on_each
from faultbed.testbed.suggestions import first_of

__all__ = ["InventoryFinding", "audit", "unreachable"]

ROCE_HEADERS_BYTES = 40 + 8 + 12 + 16 + 4
"""Headers of an RDMA write: IPv6 (larger than IPv4), UDP, BTH, RETH and ICRC (InfiniBand annex A17)."""
RDMA_MTU_BYTES = 4096
_PRIORITIES = range(8)
_ALPHAS = range(-8, 8)
_PCIE_GTS, _PCIE_WIDTHS = (2.5, 5.0, 8.0, 16.0, 32.0, 64.0), (1, 2, 4, 8, 16, 32)
_DSCPS = range(64)
_VLANS = range(1, 4095)
"""IEEE 802.1Q reserves 0 (priority tag without a VLAN) and 4095."""
_SEEDS = 2**32
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce", "send-recv")
"""The names that faultbed.testbed.preflight.busbw gives to the collectives of nccl-tests."""
_REACH_TIMEOUT_S = 5.0
_ALL_S = 300.0
"""Deadline of the check of all devices. A large lab has some hundred addresses, of which 32 are checked at once."""
_REDFISH_PORT, _IPMI_PORT = 443, 623
_PDU_PORTS = (443, 80, 22, 23)
_PRESENCE_PING = bytes([6, 0, 0xFF, 6, 0, 0, 0x11, 0xBE, 0x80, 0, 0, 0])
"""RMCP header (version 6, no sequence, class ASF), ASF's enterprise number, message type 80h."""


def audit(path: Path) -> list[InventoryFinding]:
    """Return all findings of an inventory file.

    Raises:
        ConfigError: the file cannot be read, or is not a faultbed inventory.
    """
    mistakes = Mistakes(collect=True)
    answer = listing(path)
    entries = entries_of(path, answer, mistakes)
    names: set[str] = set()
    if not mistakes.collected:
        with mistakes.part():
            lab_wide_vars(path, entries)
        topology = build_topology(entries, mistakes)
        names = set(topology.target_names())
    if not mistakes.collected:
        lab = lab_wide_vars(path, entries)
        with mistakes.part():
            shapes_of(with_speeds(topology, lab, path), lab, path)
    mistaken = [
        InventoryFinding(
            place=raised.place, what=raised.what, do="correct this value, or the other one that the message names"
        )
        for raised in mistakes.collected
    ]
    # The further rules are meaningful only for an inventory without contradictions.
    if mistaken:
        return mistaken
    variables: Mapping[str, Mapping[str, Any]] = answer["_meta"]["hostvars"]
    further = [*_further_findings(entries), *_safety(entries, names), *check_access_paths(entries, variables)]
    if not traits_of(next(iter(entries.placed()))[1].kind).is_emulated:
        further += misspelt(variables)
    return sorted(further, key=lambda finding: finding.place)


def unreachable(inventory: Inventory) -> list[InventoryFinding]:
    """Return a finding for each device that does not answer: machines (SSH), BMCs (Redfish or IPMI), PDUs (any port).

    A soft lab has no such findings, because its ports are not in the file.
    """
    if traits_of(inventory.kind).is_emulated:
        return []
    findings = on_each(_endpoints(inventory), _unanswered, timeout_s=_ALL_S, at_once=32)
    return [finding for finding in findings if finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    """An address to try: one of `ports` must accept a TCP connection or, with `rmcp`, answer an IPMI presence ping."""

    place: str
    address: str
    ports: tuple[int, ...]
    do: str
    rmcp: bool = False


def _endpoints(inventory: Inventory) -> Iterator[_Endpoint]:
    for name, path in [*inventory.management.items(), *([inventory.jump] if inventory.jump else [])]:
        yield _Endpoint(
            place=f"{name}.ansible_host",
            address=path.address or name,
            ports=(path.port or 22,),
            do="check the machine's power and its management cable, or correct the address",
        )
    for name, bmc in inventory.bmcs.items():
        ipmi = bmc.protocol == "ipmi"
        yield _Endpoint(
            place=f"hosts.{name}.bmc.address",
            address=bmc.address,
            ports=(_IPMI_PORT if ipmi else _REDFISH_PORT,),
            do="check its cable, its VLAN and its service (Redfish or IPMI), or correct address and protocol",
            rmcp=ipmi,
        )
    for pdu in inventory.pdus:
        yield _Endpoint(
            place=f"all.pdus[{pdu.name}].address",
            address=pdu.address,
            ports=_PDU_PORTS,
            do="check its cable and its VLAN, or correct the address",
        )


def _unanswered(endpoint: _Endpoint) -> InventoryFinding | None:
    last_error = ""
    for port in endpoint.ports:
        try:
            if endpoint.rmcp:
                _ping_rmcp(endpoint.address, port)
            else:
                socket.create_connection((endpoint.address, port), timeout=_REACH_TIMEOUT_S).close()
        except OSError as error:
            last_error = str(error)
        else:
            return None
    ports = " or ".join(map(str, endpoint.ports))
    return InventoryFinding(
        place=endpoint.place, what=f"{endpoint.address} port {ports} does not answer: {last_error}", do=endpoint.do
    )


def _ping_rmcp(address: str, port: int) -> None:
    """Send an ASF presence ping, which needs no login (ASF 2.0, 3.2.4.1). Raise OSError if no answer arrives."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(_REACH_TIMEOUT_S)
        sock.connect((address, port))
        sock.send(_PRESENCE_PING)
        sock.recv(64)


def _further_findings(entries: Entries) -> Iterator[InventoryFinding]:
    _, lab = next(iter(entries.placed()))
    yield from _mtu_chain(entries, lab)
    yield from _speeds(entries)
    yield from _affinity(entries)
    yield from _networks(lab)
    yield from _ip_plan(entries, lab)
    yield from check_fabric(entries)
    yield from check_parts(entries)
    yield from _dscp_map(lab)
    yield from _busbw(lab)
    if not 0 <= lab.ecmp_hash_seed < _SEEDS:
        do = "give 0 (none) to 4294967295"
        yield InventoryFinding(
            place="all.ecmp_hash_seed", what=f"{lab.ecmp_hash_seed} does not fit into 32 bits", do=do
        )
    if lab.qos is not None:
        yield from _qos(lab, lab.qos)
        yield from _classes(lab, lab.qos)
        yield from _trust(entries, lab.qos)
        yield from _buffer(lab.qos)
    if lab.golden is not None:
        yield from _golden(lab.golden)


def _safety(entries: Entries, names: set[str]) -> Iterator[InventoryFinding]:
    _, lab = next(iter(entries.placed()))
    if lab.safety is None:
        return
    for index, pattern in enumerate(lab.safety.may_disrupt):
        if not fnmatch.filter(names, pattern):
            problem = f'"{pattern}" matches no target of this lab'
            do = "write target names as in `faultbed inject`, such as host1:*"
            yield InventoryFinding(place=f"all.safety.may_disrupt[{index}]", what=problem, do=do)
    if not 0 < lab.safety.longest_fault_s < math.inf:
        problem = f"{lab.safety.longest_fault_s:g} s does not limit how long a fault lasts"
        yield InventoryFinding(place="all.safety.longest_fault_s", what=problem, do="give seconds, above 0")
    if not 0 <= lab.safety.min_spacing_s < math.inf:
        problem = f"{lab.safety.min_spacing_s:g} s is not a time between faults"
        yield InventoryFinding(place="all.safety.min_spacing_s", what=problem, do="give seconds, 0 or more")
    for field in ("most_links", "most_hosts", "most_switches"):
        most = getattr(lab.safety, field)
        if most is not None and most < 1:
            problem = f"{most} would allow no fault at all"
            yield InventoryFinding(
                place=f"all.safety.{field}",
                what=problem,
                do="give 1 or more; to protect targets, use may_disrupt",
            )


def _mtu_chain(entries: Entries, lab: LabVars) -> Iterator[InventoryFinding]:
    """Yield a finding for each MTU that is too small for an RDMA MTU of 4096, or for RNICs that send through it."""
    needed = RDMA_MTU_BYTES + ROCE_HEADERS_BYTES
    rnic_mtu = {(name, rnic.name): rnic.mtu or lab.mtu for name, host in entries.hosts.items() for rnic in host.rnics}
    largest = max(rnic_mtu.values(), default=lab.mtu)
    for (name, rnic), mtu in rnic_mtu.items():
        if mtu < needed:
            yield InventoryFinding(
                place=f"hosts.{name}.rnics[{rnic}].mtu",
                what=f"{mtu} bytes are too few for an RDMA MTU of {RDMA_MTU_BYTES}, which takes {needed} with headers",
                do=f"set faultbed_mtu to at least {needed} (soft labs use 4200, racks 9000)",
            )
        if traits_of(lab.kind).is_emulated and mtu != lab.mtu:
            yield _soft_mtu(f"hosts.{name}.rnics[{rnic}].mtu")
    for name, (role, switch) in entries.switches.items():
        for index, port in enumerate(switch.ports):
            at, mtu = f"{role}.{name}.ports[{index}].mtu", port.mtu or lab.mtu
            if traits_of(lab.kind).is_emulated and mtu != lab.mtu:
                yield _soft_mtu(at)
                continue
            sent_bytes = rnic_mtu.get((port.peer, port.rnic or ""), largest)
            if mtu < sent_bytes:
                yield InventoryFinding(
                    place=at,
                    what=f"{mtu} bytes, but packets from {port.peer} may have {sent_bytes}",
                    do=f"set it to {sent_bytes} or more, on both ends of the cable",
                )
            elif port.rnic is None and (far := _far_mtu(entries, name, port.peer, lab.mtu)) != mtu:
                yield InventoryFinding(
                    place=at,
                    what=f"{mtu} bytes, but {port.peer}'s end of the cable has {far}",
                    do="give both ends the same MTU",
                )


def _soft_mtu(place: str) -> InventoryFinding:
    return InventoryFinding(
        place=place,
        what="a soft lab has one MTU for its whole back end",
        do="remove it here and set faultbed_mtu",
    )


def _far_mtu(entries: Entries, name: str, peer: str, default: int) -> int:
    _, switch = entries.switches[peer]
    return next(port.mtu or default for port in switch.ports if port.peer == name)


def _speeds(entries: Entries) -> Iterator[InventoryFinding]:
    ends: dict[frozenset[str], list[tuple[str, int]]] = defaultdict(list)
    for name, host in entries.hosts.items():
        for rnic in host.rnics:
            if rnic.speed_gbps:
                cable = frozenset({rnic.switch, f"{name}:{rnic.name}"})
                ends[cable].append((f"hosts.{name}.rnics[{rnic.name}].speed_gbps", rnic.speed_gbps))
    for name, (role, switch) in entries.switches.items():
        for index, port in enumerate(switch.ports):
            if port.speed_gbps:
                cable = frozenset({name, f"{port.peer}:{port.rnic}" if port.rnic else port.peer})
                ends[cable].append((f"{role}.{name}.ports[{index}].speed_gbps", port.speed_gbps))
    for placed_speeds in ends.values():
        if len({speed for _, speed in placed_speeds}) > 1:
            (near, near_gbps), (far, far_gbps) = placed_speeds
            yield InventoryFinding(
                place=near, what=f"{near_gbps} Gb/s, but {far} is {far_gbps}", do="give both ends one speed"
            )


def _affinity(entries: Entries) -> Iterator[InventoryFinding]:
    for name, host in entries.hosts.items():
        known = {gpu.name for gpu in host.gpus}
        for rnic in host.rnics:
            if rnic.gpu is not None and rnic.gpu not in known:
                yield InventoryFinding(
                    place=f"hosts.{name}.rnics[{rnic.name}].gpu",
                    what=f'no GPU "{rnic.gpu}" on this host',
                    do=f"choose one of: {', '.join(sorted(known)) or 'none; leave gpu out'}",
                )


def _networks(lab: LabVars) -> Iterator[InventoryFinding]:
    parsed: list[tuple[int, ipaddress.IPv4Network]] = []
    for index, network in enumerate(lab.networks):
        try:
            prefix = ipaddress.IPv4Network(network.prefix)
        except ValueError as error:
            yield InventoryFinding(
                place=f"all.networks[{index}].prefix", what=str(error), do="write it as 10.77.0.0/16"
            )
            continue
        for other_index, other in parsed:
            if prefix.overlaps(other):
                yield InventoryFinding(
                    place=f"all.networks[{index}].prefix",
                    what=f"{prefix} overlaps {other} (all.networks[{other_index}])",
                    do="give each use a prefix of its own",
                )
        parsed.append((index, prefix))
        if network.vlan is not None and network.vlan not in _VLANS:
            yield InventoryFinding(
                place=f"all.networks[{index}].vlan", what=f"{network.vlan} is not a VLAN", do="give 1 to 4094"
            )
    vlans = ((f"all.networks[{i}].vlan", str(x.vlan)) for i, x in enumerate(lab.networks) if x.vlan is not None)
    yield from repeated_values(vlans, "VLAN", "each network")


def _ip_plan(entries: Entries, lab: LabVars) -> Iterator[InventoryFinding]:
    """Yield a finding for each address outside the prefixes of its use in the IP plan, if the use has any."""
    plan: dict[str, list[ipaddress.IPv4Network]] = defaultdict(list)
    for network in lab.networks:
        try:
            plan[network.use].append(ipaddress.IPv4Network(network.prefix))
        except ValueError:
            continue  # reported by _networks
    for place, use, address in _addresses(entries):
        try:
            ip = ipaddress.IPv4Interface(address).ip
        except ValueError:
            yield InventoryFinding(place=place, what=f'not an address "{address}"', do="write an IPv4 address")
            continue
        if plan.get(use) and not any(ip in prefix for prefix in plan[use]):
            yield InventoryFinding(
                place=place,
                what=f"{ip} is in no {use} network of the IP plan ({', '.join(map(str, plan[use]))})",
                do="correct the address, or the plan in faultbed_networks",
            )


def _addresses(entries: Entries) -> Iterator[tuple[str, str, str]]:
    for name, host in entries.hosts.items():
        yield f"hosts.{name}.front_end.address", "front-end", host.front_end.address
        for rnic in host.rnics:
            yield f"hosts.{name}.rnics[{rnic.name}].address", "back-end", rnic.address
        if host.bmc is not None:
            yield f"hosts.{name}.bmc.address", "bmc", host.bmc.address
    for name, (role, switch) in entries.switches.items():
        yield f"{role}.{name}.loopback", "loopback", switch.loopback


def _dscp_map(lab: LabVars) -> Iterator[InventoryFinding]:
    for index, line in enumerate(lab.dscp_map):
        at = f"all.dscp_map[{index}]"
        if line.dscp not in _DSCPS:
            yield InventoryFinding(place=f"{at}.dscp", what=f"{line.dscp} is not a DSCP", do="give 0 to 63 (RFC 2474)")
        if line.priority not in _PRIORITIES:
            yield InventoryFinding(place=f"{at}.priority", what=f"{line.priority} is not a priority", do="give 0 to 7")
    yield from repeated_values(
        ((f"all.dscp_map[{i}].dscp", str(x.dscp)) for i, x in enumerate(lab.dscp_map)), "DSCP", "each"
    )


def _busbw(lab: LabVars) -> Iterator[InventoryFinding]:
    for index, line in enumerate(lab.busbw):
        if line.collective not in _COLLECTIVES:
            problem = f'no collective "{line.collective}", so this line is never compared with a run'
            do = f"choose one of {', '.join(_COLLECTIVES)}"
            yield InventoryFinding(place=f"all.busbw[{index}].collective", what=problem, do=do)
        if line.ranks < 2 or line.size_bytes < 1 or not 0 < line.at_least_gbytes_per_s < math.inf:  # noqa: PLR2004
            problem = f"{line.ranks} ranks, {line.size_bytes} bytes, {line.at_least_gbytes_per_s:g} GB/s is no bound"
            do = "give 2 ranks or more, a size above 0 and a rate above 0"
            yield InventoryFinding(place=f"all.busbw[{index}]", what=problem, do=do)


def _qos(lab: LabVars, qos: QosVars) -> Iterator[InventoryFinding]:
    priority = {line.dscp: line.priority for line in lab.dscp_map}
    for field, dscp in (("roce_dscp", qos.roce_dscp), ("cnp_dscp", qos.cnp_dscp)):
        if dscp not in priority:
            problem = f"DSCP {dscp} is not in faultbed_dscp_map, so switches put it in priority 0"
            yield InventoryFinding(place=f"all.qos.{field}", what=problem, do="add a line for it to the map")
    roce, cnp = priority.get(qos.roce_dscp), priority.get(qos.cnp_dscp)
    if roce is not None and qos.pfc_priorities and roce not in qos.pfc_priorities:
        yield InventoryFinding(
            place="all.qos.pfc_priorities",
            what=f"RoCE is in priority {roce}, but PFC pauses only {qos.pfc_priorities}",
            do=f"add {roce}, or map DSCP {qos.roce_dscp} to one of those priorities",
        )
    if cnp is not None and cnp in qos.pfc_priorities:
        yield InventoryFinding(
            place="all.qos.cnp_dscp",
            what=f"CNPs are in priority {cnp}, which PFC pauses, so that congestion would delay them",
            do="map the CNP DSCP to a priority of its own, with strict scheduling",
        )
    for priority_paused in qos.pfc_priorities:
        if priority_paused not in _PRIORITIES:
            problem = f"{priority_paused} is not a priority"
            yield InventoryFinding(place="all.qos.pfc_priorities", what=problem, do="give 0 to 7")
    if qos.dcqcn and qos.ecn is None:
        yield InventoryFinding(
            place="all.qos.ecn",
            what="DCQCN is on, but no switch marks ECN, so that no sender slows down",
            do="give ecn with min_kib, max_kib and max_percent, or turn dcqcn off",
        )
    if qos.ecn is not None and not 0 < qos.ecn.min_kib < qos.ecn.max_kib:
        problem = f"min_kib is {qos.ecn.min_kib}, max_kib {qos.ecn.max_kib}"
        yield InventoryFinding(place="all.qos.ecn", what=problem, do="give both above 0, and min_kib below max_kib")
    if qos.ecn is not None and not 0 < qos.ecn.max_percent <= 100:  # noqa: PLR2004 (percent)
        yield InventoryFinding(place="all.qos.ecn.max_percent", what=f"{qos.ecn.max_percent} %", do="give 1 to 100")


def _classes(lab: LabVars, qos: QosVars) -> Iterator[InventoryFinding]:
    """Check which traffic shares a priority, and which priorities pause."""
    priority = {line.dscp: line.priority for line in lab.dscp_map}
    roce, cnp, unmarked = priority.get(qos.roce_dscp), priority.get(qos.cnp_dscp), priority.get(0, 0)
    if cnp is not None and cnp == roce and cnp not in qos.pfc_priorities:
        yield InventoryFinding(
            place="all.qos.cnp_dscp",
            what=f"CNPs and RoCE data share priority {cnp}, so that CNPs wait behind data",
            do="map the CNP DSCP to a priority of its own, with strict scheduling",
        )
    if cnp is not None and cnp == unmarked != roce:
        yield InventoryFinding(
            place="all.qos.cnp_dscp",
            what=f"CNPs and unmarked traffic (DSCP 0) share priority {cnp}, so that CNPs wait behind it",
            do="map the CNP DSCP to a priority of its own, with strict scheduling",
        )
    if unmarked in qos.pfc_priorities:
        yield InventoryFinding(
            place="all.qos.pfc_priorities",
            what=f"unmarked traffic (DSCP 0) is in priority {unmarked}, which PFC pauses, so that TCP would pause RoCE",
            do=f"map DSCP 0 to another priority, or remove {unmarked}",
        )
    if qos.pfc_watchdog_ms is not None and qos.pfc_watchdog_ms <= 0:
        problem = f"{qos.pfc_watchdog_ms} ms: the watchdog would take every pause for a storm"
        do = "give 100 or more, or leave it out to have no watchdog"
        yield InventoryFinding(place="all.qos.pfc_watchdog_ms", what=problem, do=do)


def _trust(entries: Entries, qos: QosVars) -> Iterator[InventoryFinding]:
    """Check that every switch can classify packets as the profile says: routed ports of SONiC have no VLAN tag."""
    switches = [name for name, (_, switch) in entries.switches.items() if switch.nos == "sonic"]
    if qos.trust == "pcp" and switches:
        yield InventoryFinding(
            place="all.qos.trust",
            what=f"pcp, but no packet has a VLAN tag on the routed ports of SONiC switches ({first_of(switches, 3)})",
            do="use dscp",
        )


def _buffer(qos: QosVars) -> Iterator[InventoryFinding]:
    buffer = qos.buffer
    if buffer is None:
        return
    if not qos.pfc_priorities:
        problem = "sizes of lossless buffers are given, but PFC pauses no priority"
        yield InventoryFinding(place="all.qos.buffer", what=problem, do="give pfc_priorities, or remove buffer")
    if min(buffer.xon_kib, buffer.xoff_kib) <= 0:
        problem = f"xon_kib is {buffer.xon_kib}, xoff_kib (headroom) {buffer.xoff_kib}"
        yield InventoryFinding(
            place="all.qos.buffer",
            what=problem,
            do="give both above 0: without headroom, packets are lost after a pause",
        )
    for field, alpha in (("alpha", buffer.alpha), ("egress_alpha", buffer.egress_alpha)):
        if alpha not in _ALPHAS:
            yield InventoryFinding(
                place=f"all.qos.buffer.{field}", what=f"{alpha} is not an alpha", do="give -8 to 7, as in dynamic_th"
            )


def _golden(golden: GoldenVars) -> Iterator[InventoryFinding]:
    if golden.pcie_speed_gts is not None and golden.pcie_speed_gts not in _PCIE_GTS:
        problem = f"{golden.pcie_speed_gts:g} GT/s is not a PCIe speed"
        yield InventoryFinding(
            place="all.golden.pcie_speed_gts", what=problem, do="give 32 (generation 5), 16 (generation 4)"
        )
    if golden.pcie_width is not None and golden.pcie_width not in _PCIE_WIDTHS:
        yield InventoryFinding(
            place="all.golden.pcie_width", what=f"{golden.pcie_width} lanes", do="give 1, 2, 4, 8, 16 or 32"
        )
