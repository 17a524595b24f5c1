"""The checks of preflight, as data: each has a name, a source, the expected state and advice. All pure.

A check yields a `PreflightFinding` for each problem. A problem with several consequences (a link that is down also
costs its RNIC the GID) is reported by each check that sees one, because each has its own advice. What a check could
not determine is reported as `Unchecked` with the reason: it counts neither as right nor as wrong.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.inventory.rates import Shape
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.model.topology import Link, Port, Topology
from faultbed.testbed.node.kernel_files import gid_of
from faultbed.testbed.preflight.collect import FAR_ADDRESS, Facts

__all__ = [
    "CHECKS",
    "Check",
    "PreflightFinding",
    "State",
    "Unchecked",
    "expected_next_hops",
    "run_checks",
    "unchecked_parts",
]

State = Mapping[str, Facts]
"""Facts of every machine and switch, by name."""

FAULT_UNIT = "faultbed-fault-"
"""Prefix of the units of fault holders (inject/leases/channels.py); other faultbed units belong to the guest."""

_QUEUES = frozenset({"pfifo", "noqueue"})
_NO_LIMIT = "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightFinding:
    """One problem: the value that check `check` observed at `where`, the expected value, and what to do."""

    check: str
    where: str
    observed: str
    expected: str
    do: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchecked:
    """A part of a check that could not be done, and why. If no part could be done, `where` is the name of the lab."""

    check: str
    where: str
    why: str


def _all_determined(_inventory: Inventory, _state: State) -> Iterator[tuple[str, str]]:
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: what it reads (`method`), the `expected` state, and what to `do` about a problem.

    `problems` yields (where, observed, expected). `undetermined` yields (where, why) for each part of the check that
    could not be done. `labs` are the kinds of lab on which it runs; `inapplicable_why` is the reason for the others.
    """

    name: str
    method: str
    expected: str
    do: str
    problems: Callable[[Inventory, State], Iterator[tuple[str, str, str]]]
    undetermined: Callable[[Inventory, State], Iterator[tuple[str, str]]] = _all_determined
    labs: tuple[str, ...] = ("soft", "rack")
    inapplicable_why: str = ""


def run_checks(inventory: Inventory, state: State, checks: Sequence[Check] | None = None) -> list[PreflightFinding]:
    """Return the findings of the checks (default: `CHECKS`), in their order."""
    return [
        PreflightFinding(check=check.name, where=where, observed=observed, expected=expected, do=check.do)
        for check in (CHECKS if checks is None else checks)
        if inventory.kind in check.labs
        for where, observed, expected in check.problems(inventory, state)
    ]


def unchecked_parts(inventory: Inventory, state: State, checks: Sequence[Check] | None = None) -> list[Unchecked]:
    """Return what the checks (default: `CHECKS`) could not determine, in their order."""
    unknown = []
    for check in CHECKS if checks is None else checks:
        if inventory.kind in check.labs:
            parts = check.undetermined(inventory, state)
            unknown += [Unchecked(check=check.name, where=where, why=why) for where, why in parts]
        else:
            unknown.append(Unchecked(check=check.name, where=inventory.name, why=check.inapplicable_why))
    return unknown


def _ports(inventory: Inventory) -> Iterator[tuple[str, Port]]:
    """Yield every end of every cable, as (where, port)."""
    for link in inventory.topology.links:
        for port in (link.a, link.b):
            yield f"{port.node}:{port.netdev}", port


def _link(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for where, port in _ports(inventory):
        interface = state[port.node].interfaces.get(port.netdev)
        if interface is None:
            yield where, "no such interface", "up, with carrier"
        elif not interface.up or not interface.carrier:
            yield where, "down" if not interface.up else "up, but no carrier", "up, with carrier"
    for host in inventory.topology.hosts:
        interface = state[host.name].interfaces.get(host.front_end_netdev)
        if interface is None or not interface.carrier:
            yield f"{host.name}:{host.front_end_netdev}", "missing or without carrier", "up, with carrier"


def _mac(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for where, port in _ports(inventory):
        interface = state[port.node].interfaces.get(port.netdev)
        if interface is not None and interface.mac != port.mac:
            yield where, interface.mac, port.mac


def _mtu(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for link in inventory.topology.links:
        mtus = {}
        for port in (link.a, link.b):
            interface = state[port.node].interfaces.get(port.netdev)
            if interface is not None:
                mtus[f"{port.node}:{port.netdev}"] = (interface.mtu, port)
        for where, (mtu, port) in mtus.items():
            expected = port.mtu or inventory.mtu
            on_host = link.rnic is not None and port is link.b
            enough = mtu >= expected if not traits_of(inventory.kind).is_emulated and not on_host else mtu == expected
            if not enough:
                other = ", ".join(f"{end} has {size}" for end, (size, _) in mtus.items() if end != where)
                yield where, f"{mtu}; {other}", str(expected)


def _address(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for where, port in _ports(inventory):
        interface = state[port.node].interfaces.get(port.netdev)
        if interface is not None and port.address is not None and interface.addresses != {port.address}:
            yield where, ", ".join(sorted(interface.addresses)) or "none", port.address


def _rdma(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for host in inventory.topology.hosts:
        for rnic in host.rnics:
            observed = state[host.name].rdma.get(rnic.name)
            if observed != ("ACTIVE", rnic.netdev):
                shown = f"{observed[0]} on {observed[1]}" if observed else "no such RDMA device"
                yield f"{host.name}:{rnic.name}", shown, f"ACTIVE on {rnic.netdev}"


def _gid(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for host in inventory.topology.hosts:
        for rnic in host.rnics:
            expected = gid_of(rnic.ip)
            facts = state[host.name]
            if expected not in facts.gids.get(rnic.name, set()):
                has_other = any(
                    device == rnic.name and gid == expected for (device, *_), gid in facts.gid_entries.items()
                )
                shown = "in the GID table, but not as RoCE v2" if has_other else "not in the GID table"
                yield f"{host.name}:{rnic.name}", shown, f"::ffff:{rnic.ip} as RoCE v2"


def _queue(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for where, port in _ports(inventory):
        interface = state[port.node].interfaces.get(port.netdev)
        if interface is None:
            continue
        expected = inventory.shapes.get(port.node, {}).get(port.netdev)
        if expected is not None:
            if interface.shape != expected:
                observed = (
                    _shape_words(interface.shape) if interface.shape else f"{interface.queue}, no rate and no delay"
                )
                yield where, observed, _shape_words(expected)
        elif interface.queue not in _QUEUES:
            yield where, interface.queue, " or ".join(sorted(_QUEUES))


def _shape_words(shape: Shape) -> str:
    rate = f"{shape.rate_bps / 1e6:g} Mb/s" if shape.rate_bps else "no rate"
    return f"{rate}, {shape.delay_us} us, queue of {shape.packets} packets"


def _hash(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for switch in inventory.topology.switches:
        expected = {
            "net.ipv4.ip_forward": "1",
            "net.ipv4.fib_multipath_hash_policy": "1",
            "net.ipv4.fib_multipath_hash_seed": str(inventory.hash_seed(switch.name)),
        }
        for name, value in expected.items():
            observed = state[switch.name].sysctls.get(name, "missing")
            if observed != value:
                yield switch.name, f"{name} = {observed}", value


def _route(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    topology = inventory.topology
    for host in topology.hosts:
        for rnic in host.rnics:
            port = topology.rnic_link(host.name, rnic.name).a
            expected = (rnic.netdev, str(port.address).partition("/")[0])
            observed = state[host.name].route_by_source.get(rnic.ip)
            if observed != expected:
                shown = f"by {observed[0]} to {observed[1]}" if observed else "nowhere"
                yield f"{host.name}:{rnic.name} ({rnic.ip})", f"sends {shown}", f"by {expected[0]} to {expected[1]}"


def _sessions(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for link in inventory.topology.uplinks:
        for port in (link.a, link.b):
            observed = _session(inventory.topology, state[port.node].sessions, port, link.other(port.node))
            if observed != "Established":
                yield f"{port.node}:{port.netdev}", f"BGP session {observed}", "Established"


def _session(topology: Topology, sessions: Mapping[str, str], near: Port, far: Port) -> str:
    """Return the state of an uplink's BGP session.

    Its peer's name is the interface (unnumbered), the far end's address (numbered), or the far switch's loopback.
    """
    loopback = topology.switch_by_name[far.node].loopback.partition("/")[0]
    names = (near.netdev, str(far.address).partition("/")[0], loopback)
    return next((sessions[name] for name in names if name in sessions), "missing")


def _ecmp(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for switch in inventory.topology.switches:
        for prefix, count in expected_next_hops(inventory.topology, switch.name).items():
            observed = state[switch.name].next_hops.get(prefix, 0)
            if observed != count:
                yield switch.name, f"{observed} next hops for {prefix}", str(count)


def expected_next_hops(topology: Topology, switch: str) -> dict[str, int]:
    """Return the expected number of next hops by far prefix: first hops of shortest paths over the switches.

    A switch rejects routes that passed its own ASN, so that it has none to switches with that ASN (RFC 4271, 9.1.2).
    """
    own = _distances(topology, switch)
    asn = topology.switch_by_name[switch].asn
    from_peer = {
        link.other(switch).node: _distances(topology, link.other(switch).node) for link in _up(topology, switch)
    }
    counts: dict[str, int] = {}
    for target, hops in own.items():
        if hops and topology.switch_by_name[target].asn != asn:
            count = sum(distances.get(target) == hops - 1 for distances in from_peer.values())
            counts[topology.switch_by_name[target].loopback.removesuffix("/32")] = count
            for link in topology.links_of(target):
                address = link.end(target).address
                if address is not None and not link.is_uplink:
                    counts[str(ipaddress.IPv4Interface(address).network)] = count
    return counts


def _up(topology: Topology, switch: str) -> list[Link]:
    return [link for link in topology.links_of(switch) if link.is_uplink]


def _distances(topology: Topology, start: str) -> dict[str, int]:
    hops, order = {start: 0}, [start]
    for name in order:
        for link in _up(topology, name):
            neighbour = link.other(name).node
            if neighbour not in hops:
                hops[neighbour] = hops[name] + 1
                order.append(neighbour)
    return hops


def _clock(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    bound_s = traits_of(inventory.kind).clock_bound_s
    for name, facts in state.items():
        # The time that the command may have taken is no skew.
        if facts.wall_s is not None and abs(facts.offset_s) - facts.offset_error_s > bound_s:
            yield (
                name,
                f"{facts.offset_s:+.3f} s (± {facts.offset_error_s:.3f})",
                f"within {bound_s:g} s of the controller's clock",
            )


def _clock_undetermined(inventory: Inventory, state: State) -> Iterator[tuple[str, str]]:
    """Report clocks whose skew is uncertain because of SSH's round trip; `time` reads each host's own estimate."""
    bound_s = traits_of(inventory.kind).clock_bound_s
    for name, facts in state.items():
        if facts.wall_s is not None and facts.offset_error_s > bound_s:
            unknown_s = math.ceil(facts.offset_error_s * 100) / 100
            yield name, f"SSH is too slow to show a skew of less than {unknown_s:g} s"


def _leftovers(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for name, facts in state.items():
        for revert in facts.reverts:
            yield name, f"a stored revert {revert}", "none"
        for unit, active in facts.units.items():
            if unit.startswith(FAULT_UNIT):
                yield name, f"{unit} ({active})", "no unit of a fault"
        for table in facts.nft_tables:
            # Hosts of a rack have tables of other programs; a soft node has none.
            if not traits_of(inventory.kind).has_snapshot and not table.partition(" ")[2].startswith("faultbed"):
                continue
            yield name, f"nftables table {table}", "none"


def _leftovers_undetermined(_inventory: Inventory, state: State) -> Iterator[tuple[str, str]]:
    for name, facts in state.items():
        for tool in facts.failed:
            yield name, f"{tool} failed, so leftovers of that kind are unknown"


def _gpu(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for host in inventory.topology.hosts:
        for gpu in host.gpus:
            unit, facts = f"faultbed-{gpu.name}.service", state[host.name]
            if facts.units.get(unit) != "active":
                yield f"{host.name}:{gpu.name}", f"{unit} is {facts.units.get(unit, 'missing')}", "active"
            limit = facts.cpu_max.get(unit, _NO_LIMIT)
            if limit.split()[0] != _NO_LIMIT:
                yield f"{host.name}:{gpu.name}", f"cpu.max {limit}", "no limit"


CHECKS: tuple[Check, ...] = (
    Check(
        name="link",
        method="`ip -j address` on both ends of every cable, and of the front end",
        expected="every interface exists, is up and has a carrier",
        do="check cable and optics; on a soft lab run `faultbed heal`, then `faultbed reset`",
        problems=_link,
    ),
    Check(
        name="mac",
        method="`ip -j address`: the MAC of every port",
        expected="as in the inventory; a difference means that a cable, or the inventory, belongs to another machine",
        do="correct the inventory, or the cabling",
        problems=_mac,
    ),
    Check(
        name="mtu",
        method="`ip -j address` on both ends of every cable",
        expected="as in the inventory for each RNIC and port, or else faultbed_mtu (switches of racks: at least that)",
        do="set the MTU of that port; `faultbed up --fresh` provisions a soft lab again",
        problems=_mtu,
    ),
    Check(
        name="address",
        method="`ip -j address`: the IPv4 addresses of RNICs and host ports",
        expected="exactly as in the inventory",
        do="provision again, or correct the inventory",
        problems=_address,
    ),
    Check(
        name="rdma",
        method="`rdma -j link show`",
        expected="every RNIC exists, is ACTIVE and on its netdev",
        do="load the driver; a port that is DOWN has no carrier",
        problems=_rdma,
    ),
    Check(
        name="gid",
        method="/sys/class/infiniband/*/ports/*/gids and gid_attrs/types",
        expected="every RNIC has the RoCEv2 GID of its IPv4 address",
        do="set the address; if it was set after the device was created, take the link down and up",
        problems=_gid,
    ),
    Check(
        name="queue",
        method="`tc -j qdisc show` on both ends of every cable",
        expected="rate, delay and queue of the inventory; without rates, a plain deep queue that drops nothing",
        do="run `faultbed heal`, then `faultbed reset`; or at a port without rates `tc qdisc del dev PORT root`",
        problems=_queue,
        labs=("soft",),
        inapplicable_why="the switches of a rack queue in their ASIC, which no qdisc shows",
    ),
    Check(
        name="hash",
        method="`sysctl net.ipv4` in every switch",
        expected="forwarding, ECMP by layer 4 (ip-sysctl.rst) and the lab's hash seed",
        do="set the sysctl; with layer-3 hashing, all QPs between two hosts share one uplink",
        problems=_hash,
        labs=("soft",),
        inapplicable_why="the switches of a rack hash in their ASIC, not in a kernel",
    ),
    Check(
        name="route",
        method=f"`ip -j route get {FAR_ADDRESS} from RNIC` on every host",
        expected="packets from an RNIC's address leave by that RNIC, to its own switch port",
        do="restore the rule and the table of that RNIC (`ip rule`, `ip route show table 100...`)",
        problems=_route,
    ),
    Check(
        name="bgp",
        method="`show bgp ipv4 unicast summary json` in every switch",
        expected="every uplink's session is Established",
        do="check `show bgp neighbors` on both ends",
        problems=_sessions,
    ),
    Check(
        name="ecmp",
        method="`ip -j route`: next hops of every far prefix in the kernel's table",
        expected="as many as there are shortest paths in the topology",
        do="look for a missing session or uplink, or a static route that hides the others",
        problems=_ecmp,
    ),
    Check(
        name="clock",
        method="`date`, between two readings of the controller's clock",
        expected="soft lab: within 30 s; rack: within 1 ms plus the time that the reading took",
        do="set the clock (`date -s`, chrony, PTP); journals and certificates depend on it",
        problems=_clock,
        undetermined=_clock_undetermined,
    ),
    Check(
        name="leftovers",
        method="stored reverts in /run/faultbed/faults, units faultbed-fault-*, nftables tables",
        expected="none",
        do="run `faultbed heal`, which reverts what a fault left behind",
        problems=_leftovers,
        undetermined=_leftovers_undetermined,
    ),
    Check(
        name="soft-gpu",
        method="`systemctl list-units`, cpu.max of its cgroup",
        expected="active and without a limit",
        do="start it with `systemctl start`, or run `faultbed heal`",
        problems=_gpu,
        labs=("soft",),
        inapplicable_why="the GPUs of a rack are not processes in a cgroup",
    ),
)
