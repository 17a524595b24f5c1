"""Apply a run's routing scheme, verify it and remove it.

The scheme is applied after the initial fingerprint of the lab and removed before the final one: what remains of it
makes the lab DIRTY. Before the workload, a separate process asks each switch's kernel (`ip route get`) which port and
table it selects for sample packets: the process that applied the scheme does not check itself.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.experiment.fabric_file import Fabric
from harness.verdict import RoutingDecisions, RoutingReceipt
from inject.injector import Mutation
from inject.journal import Journal
from inject.routing.scheme_lease import LEASE_TTL_S, REMOVAL_TIMEOUT_S, SchemeLease
from testbed.lab import Lab
from testbed.node.routing.owned_numbers import GROUP, SHARED_TABLE
from testbed.observe import switch_routing
from testbed.observe.counters import Snapshot, flat_deltas
from testbed.packets.bth import ROCE_PORT
from testbed.routing.switch_tables import MARKING, SHARING, SchemeTables, SwitchTables, fidelity_of, scheme_tables

__all__ = [
    "MAX_SCHEME_LIFETIME_S",
    "ActiveScheme",
    "RouteProbe",
    "apply_scheme",
    "decision_mismatches",
    "least_packets",
    "missing_routes",
    "missing_rules",
    "not_removed",
]

MAX_SCHEME_LIFETIME_S = LEASE_TTL_S + REMOVAL_TIMEOUT_S
"""Longest time that a scheme may stay on the switches after the controller has died."""
_MAIN = 254
_SPORTS = range(0xC000, 0xC000 + 128)
_SHARE_ERROR = 0.1
"""Tolerance of a port's share of the decisions: more than four standard deviations of 512 draws with even odds."""
_LEAST_PACKETS = 100
"""Packets beyond the control traffic that show that the workload crossed the fabric."""
_CONTROL_PACKETS_PER_S = 3.0
"""Upper bound of the control packets that one port sends per second.

`timers bgp 1 3` sends one keepalive per second; the ACK of the neighbour's keepalive is at most another packet. The
third one covers router advertisements, neighbour discovery and ARP, which are rarer. An uplink without workload sent
60, 63 and 67 packets in three runs of 30 to 32 s on soft-mini (2.0 to 2.1 per second).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteProbe:
    """Sample packets for one prefix at one switch, and the decision that the scheme expects.

    `ports` are (port, expected share) pairs: one port, or the ports among which the source ports are spread.
    """

    switch: str
    prefix: str
    mark: int
    table: int
    ports: tuple[tuple[str, float], ...]
    sports: Sequence[int]
    compares_shares: bool = False


@dataclass(kw_only=True)
class ActiveScheme:
    """Routing scheme of a run, from its application on. `receipt` is complete after the `apply_scheme` block ends."""

    fabric: Fabric
    tables: SchemeTables
    lab: Lab
    leases: list[SchemeLease] = field(default_factory=list)
    armed: dict[str, Any] = field(default_factory=lambda: {"ok": False})
    decisions: RoutingDecisions = field(default_factory=lambda: RoutingDecisions(asked=0, agreed=0))
    marked: dict[str, int] | None = None
    carried_packets: int | None = None
    needed_packets: int = _LEAST_PACKETS
    doubts: list[str] = field(default_factory=list)
    cleared: dict[str, Any] = field(default_factory=lambda: {"ok": False})

    def check_end(self, before: Snapshot, after: Snapshot, *, seconds: float) -> None:
        """Check at the end of the workload that the scheme is still applied, and read the marked and carried packets.

        The rules are read from the kernels as well: another program on the switch may have removed them although the
        holder is alive.

        Args:
            before: counters before the workload.
            after: counters after it.
            seconds: time between the two readings.

        Raises:
            LabError: a machine could not answer.
        """
        for lease in self.leases:
            if not lease.is_applied():
                node = lease.planned.place.node
                self.doubts.append(f"{node}: the scheme was no longer applied at the end of the workload")
        counters = _counters_of_choice(self.lab, self.tables)
        self.carried_packets = _carried(counters, before, after)
        self.needed_packets = least_packets(len(counters), seconds)
        state_by_switch = switch_routing.read(self.lab, self.tables.switches).switches if self.tables.switches else {}
        self.doubts += missing_rules(self.tables, state_by_switch)
        self.doubts += missing_routes(self.tables, state_by_switch)
        if self.fabric.routing in MARKING:
            self.marked = {name: sum(state["marked"] or ()) for name, state in state_by_switch.items()}
            unmarked = [name for name, state in state_by_switch.items() if state["marked"] is None]
            self.doubts += [f"{name}: the scheme's marks were gone at the end of the workload" for name in unmarked]

    def receipt(self) -> RoutingReceipt:
        """Return the evidence for the scheme and, in `unproven`, each reason why it does not prove the scheme."""
        return RoutingReceipt(
            scheme=self.fabric.routing,
            fidelity=fidelity_of(self.fabric.routing),
            parameters=self.fabric.parameters,
            armed=self.armed,
            decisions=self.decisions,
            marked=self.marked,
            carried_packets=self.carried_packets,
            cleared=self.cleared,
            unproven=tuple(self._unproven()),
        )

    def _unproven(self) -> Iterator[str]:
        if self.armed.get("ok") is not True:
            yield f"not applied: {self.armed.get('error') or 'the readback does not show it'}"
        yield from self.decisions.wrong[:3]
        if not self.decisions.asked:
            yield "no decision of a switch was queried"
        yield from self.doubts
        if self.fabric.routing in MARKING and not sum((self.marked or {}).values()):
            yield "no switch marked a packet"
        if self.carried_packets is None or self.carried_packets < self.needed_packets:
            yield (
                f"only {self.carried_packets or 0} packets left by the ports the scheme chooses among "
                f"(at least {self.needed_packets} needed)"
            )
        if self.cleared.get("ok") is not True:
            yield f"not removed: {self.cleared.get('error') or 'the readback still shows part of the scheme'}"


@contextlib.contextmanager
def apply_scheme(
    lab: Lab, fabric: Fabric | None, journal: Journal, *, mutate: Mutation | None = None
) -> Iterator[ActiveScheme | None]:
    """Apply the scheme of `fabric`, yield it, and remove it at the end of the block, also after an error.

    Without `fabric` yield None.

    Raises:
        FaultError: a switch refuses the scheme; the message says why.
        LabError: the switches' machine does not answer, or another command has ended what is held on the lab.
    """
    if fabric is None:
        yield None
        return
    scheme = ActiveScheme(fabric=fabric, tables=scheme_tables(lab.topology, fabric.routing, fabric.as_routing), lab=lab)
    machines = dict.fromkeys(lab.carrier(name).name for name in scheme.tables.switches)
    scheme.leases = [SchemeLease(lab, scheme.tables, machine, journal, mutate=mutate) for machine in machines]
    try:
        for lease in scheme.leases:
            lease.apply()
        scheme.armed = _armed(scheme.leases)
        lab.scheme = scheme.tables
        with journal.doing("routing.decisions", scheme=fabric.routing) as outcome:
            scheme.decisions = _decisions(lab, scheme.tables)
            outcome |= {"asked": scheme.decisions.asked, "wrong": list(scheme.decisions.wrong)}
        yield scheme
    finally:
        lab.scheme = None
        released = [lease.release() for lease in scheme.leases]
        errors = [release.detail for release in released if not release.ok]
        scheme.cleared = {
            "ok": not errors,
            "by": "lease" if any(release.by == "lease" for release in released) else "holder",
            "at_ns": max((release.at_ns for release in released), default=None),
            "copied": sum(release.readback.get("copied", 0) for release in released),
            **({"error": "; ".join(errors)} if errors else {}),
        }
        if any(release.by == "lease" for release in released):
            scheme.doubts.append("the holder process ended before the run removed the scheme")


def _armed(leases: Sequence[SchemeLease]) -> dict[str, Any]:
    """Return the readback over all machines. For ecmp there is no machine and nothing to apply: `ok` is True."""
    return {
        "ok": all(lease.readback.get("whole") is True and lease.readback.get("applied") is True for lease in leases),
        "at_ns": max((lease.applied_ns or 0 for lease in leases), default=None),
        **{name: sum(lease.readback.get(name, 0) for lease in leases) for name in ("switches", "rules", "routes")},
    }


def _decisions(lab: Lab, tables: SchemeTables) -> RoutingDecisions:
    """Query every switch's kernel about sample packets of each prefix, and compare its decisions with the scheme's."""
    probes = list(_route_probes(lab, tables))
    wrong = decision_mismatches(probes, _query_kernels(lab, probes))
    if tables.scheme == "resilient":
        wrong += _wrong_groups(tables, switch_routing.read(lab, tables.switches).switches)
    if tables.scheme == "weighted":
        wrong += _wrong_weights(tables, switch_routing.read(lab, tables.switches).switches)
    return RoutingDecisions(asked=len(probes), agreed=max(0, len(probes) - len(wrong)), wrong=tuple(wrong))


def decision_mismatches(probes: Sequence[RouteProbe], answers: Sequence[Sequence[tuple[str | None, int]]]) -> list[str]:
    """Return one sentence for each probe whose kernel decisions differ from the scheme's.

    Shares are compared per switch and set of ports, over all prefixes that have these ports. Where they are not, each
    port must be selected at least once: a kernel with one next hop does no ECMP.

    Args:
        probes: what the kernels were queried about.
        answers: for each probe, the (port, table) that the kernel selected for each source port.
    """
    wrong = []
    counts: dict[tuple[str, tuple[tuple[str, float], ...], bool], Counter[str | None]] = {}
    for probe, decisions in zip(probes, answers, strict=True):
        ports = [port for port, _ in probe.ports]
        mark = f" with mark {probe.mark}" if probe.mark else ""
        elsewhere = [
            (port, table) for port, table in decisions or [(None, 0)] if table != probe.table or port not in ports
        ]
        if elsewhere:
            port, table = elsewhere[0]
            wrong.append(
                f"{probe.switch} to {probe.prefix}{mark}: kernel uses table {table}, port {port}; "
                f"the scheme expects table {probe.table}, port {' or '.join(ports)}"
            )
        elif len(ports) > 1:
            key = probe.switch, probe.ports, probe.compares_shares
            counts.setdefault(key, Counter()).update(port for port, _ in decisions)
    for (switch, shares, compares_shares), count in counts.items():
        for port, share in shares:
            part = count[port] / count.total()
            if abs(part - share) > _SHARE_ERROR if compares_shares else not count[port]:
                wrong.append(f"{switch}: {port} gets {part:.0%} of the sample packets; the scheme expects {share:.0%}")
    return wrong


def missing_rules(tables: SchemeTables, state_by_switch: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each switch that lacks rules of the scheme; `state_by_switch` is their readback."""
    missing = []
    for switch in tables.switches:
        expected = {(table, prefix, mark or None) for _, table, prefix, mark in tables.request(switch, None)["rules"]}
        installed = {(rule["table"], rule["to"], rule["mark"]) for rule in state_by_switch[switch]["rules"]}
        if absent := expected - installed:
            missing.append(
                f"{switch}: {len(absent)} of {len(expected)} rules of the scheme missing at the end of the workload"
            )
    return missing


def missing_routes(tables: SchemeTables, state_by_switch: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each switch whose scheme tables lack next hops that BGP has; packets then take BGP's."""
    missing = []
    for switch, switch_tables in tables.switches.items():
        by_table = state_by_switch[switch]["tables"]
        expected = [
            (table, prefix)
            for prefix, ports in switch_tables.hops.items()
            for table in _tables_of(
                tables.scheme, switch_tables, [p for p in ports if p in by_table["main"].get(prefix, ())]
            )
        ]
        absent = [(table, prefix) for table, prefix in expected if prefix not in by_table.get(str(table), {})]
        if absent:
            missing.append(
                f"{switch}: {len(absent)} of {len(expected)} routes of the scheme missing at the end of the workload"
            )
    return missing


def _tables_of(scheme: str, switch_tables: SwitchTables, ports: Sequence[str]) -> list[int]:
    """Return the scheme's tables that have a route to a prefix if BGP reaches it by these ports."""
    if scheme in SHARING:
        return [SHARED_TABLE] if ports else []
    return [switch_tables.table_by_port[port] for port in ports]


def _route_probes(lab: Lab, tables: SchemeTables) -> Iterator[RouteProbe]:
    if not tables.switches:  # ecmp: BGP's own table must decide on every switch that has a choice
        for switch, switch_tables in scheme_tables(lab.topology, "static-parity", tables.routing).switches.items():
            for prefix, hops in switch_tables.hops.items():
                shares = tuple((port, 1 / len(hops)) for port in hops)
                yield RouteProbe(switch=switch, prefix=prefix, mark=0, table=_MAIN, ports=shares, sports=_SPORTS[:8])
        return
    for switch, switch_tables in tables.switches.items():
        for prefix, hops in switch_tables.hops.items():
            yield from _probes_of_prefix(tables.scheme, switch, switch_tables, prefix, hops)


def _probes_of_prefix(
    scheme: str, switch: str, switch_tables: SwitchTables, prefix: str, hops: Sequence[str]
) -> Iterator[RouteProbe]:
    if scheme in MARKING:
        for port in hops:
            table = switch_tables.table_by_port[port]
            yield RouteProbe(
                switch=switch, prefix=prefix, mark=table, table=table, ports=((port, 1.0),), sports=_SPORTS[:1]
            )
    elif scheme in SHARING:
        whole = sum(switch_tables.weights[port] for port in hops) if scheme == "weighted" else len(hops)
        shares = tuple((port, (switch_tables.weights[port] if scheme == "weighted" else 1) / whole) for port in hops)
        yield RouteProbe(
            switch=switch, prefix=prefix, mark=0, table=SHARED_TABLE, ports=shares, sports=_SPORTS, compares_shares=True
        )
    else:
        port = switch_tables.static[prefix]
        table = switch_tables.table_by_port[port]
        yield RouteProbe(switch=switch, prefix=prefix, mark=0, table=table, ports=((port, 1.0),), sports=_SPORTS[:4])


def _query_kernels(lab: Lab, probes: Sequence[RouteProbe]) -> list[list[tuple[str | None, int]]]:
    """Query every machine once. Returns the (port, table) of each source port, in the order of the probes.

    Raises:
        LabError: a machine could not answer.
    """
    flows: dict[str, list[list[Any]]] = {}
    for probe in probes:
        source, port = _source(lab, probe)
        target = str(ipaddress.ip_network(probe.prefix)[1])
        mark = [probe.mark] if probe.mark else []
        flows.setdefault(probe.switch, []).extend(
            [source, target, port, sport, ROCE_PORT, *mark] for sport in probe.sports
        )
    by_switch: dict[str, list[tuple[str | None, int]]] = {}
    for machine, nodes in lab.carried(flows).items():
        request = {node: [namespace, flows[node]] for node, namespace in nodes.items()}
        answer = lab.ask(machine, {"do": "decisions", "flows": request})
        by_switch |= {node: [(port, table) for port, table in each] for node, each in answer["found"].items()}
    answers = []
    for probe in probes:
        mine = by_switch[probe.switch]
        answers.append(mine[: len(probe.sports)])
        by_switch[probe.switch] = mine[len(probe.sports) :]
    return answers


def _source(lab: Lab, probe: RouteProbe) -> tuple[str, str]:
    """Return the source address of a probe and the port at which its packets enter the switch.

    The source is a host at the switch. A switch without hosts gets a host outside the prefix, and a port that the probe
    does not expect as output where there is one.
    """
    used = {port for port, _ in probe.ports}
    for link in lab.topology.links_of(probe.switch):
        if link.rnic is not None:
            rnics = {rnic.name: rnic for rnic in lab.topology.host_by_name[link.b.node].rnics}
            return rnics[link.rnic].ip, link.a.netdev
    ports = [link.end(probe.switch).netdev for link in lab.topology.links_of(probe.switch)]
    prefix = ipaddress.ip_network(probe.prefix)
    away = next(host for host in lab.topology.hosts if ipaddress.ip_address(host.rnics[0].ip) not in prefix)
    return away.rnics[0].ip, next((port for port in ports if port not in used), ports[0])


def _wrong_groups(tables: SchemeTables, state_by_switch: Mapping[str, Mapping[str, Any]]) -> list[str]:
    wrong = []
    for switch, switch_tables in tables.switches.items():
        for number, (prefix, hops) in enumerate(switch_tables.hops.items()):
            group = state_by_switch[switch]["groups"].get(str(GROUP + number), {"ports": [], "buckets": 0})
            if sorted(group["ports"]) != sorted(hops) or group["buckets"] != tables.routing.buckets:
                wrong.append(
                    f"{switch} to {prefix}: its next-hop group has {group['buckets']} buckets over "
                    f"{', '.join(group['ports']) or 'no port'}; the scheme expects {tables.routing.buckets} over "
                    f"{', '.join(hops)}"
                )
    return wrong


def _wrong_weights(tables: SchemeTables, state_by_switch: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each route with other weights: shares of samples do not tell 4:3 from 1:1."""
    wrong = []
    for switch, switch_tables in tables.switches.items():
        routes = state_by_switch[switch]["tables"].get(str(SHARED_TABLE), {})
        for prefix, ports in switch_tables.hops.items():
            expected = {port: switch_tables.weights[port] for port in ports}
            installed = {
                name: int(weight or 1)
                for name, _, weight in (hop.partition(" weight ") for hop in routes.get(prefix, ()))
            }
            if installed != expected:
                wrong.append(
                    f"{switch} to {prefix}: its next hops have the weights {installed}; the scheme expects {expected}"
                )
    return wrong


def least_packets(ports: int, seconds: float) -> int:
    """Return how many packets must leave by `ports` ports within `seconds` to show that the workload crossed them.

    BGP alone sends a few packets per second and port, so that the minimum grows with the time between the readings.
    """
    return _LEAST_PACKETS + math.ceil(_CONTROL_PACKETS_PER_S * ports * seconds)


def _counters_of_choice(lab: Lab, tables: SchemeTables) -> set[str]:
    """Return the names (`node/name`) of the packet counters of all ports among which a switch chooses."""
    switches = tables.switches or scheme_tables(lab.topology, "static-parity", tables.routing).switches
    return {
        f"{name}/{port}.tx_packets"
        for name, switch_tables in switches.items()
        for hops in switch_tables.hops.values()
        for port in hops
    }


def _carried(counters: Collection[str], before: Snapshot, after: Snapshot) -> int | None:
    """Return the sum of the increments of `counters`; None: the second reading has none of them."""
    deltas = flat_deltas(before, after)
    sent = [deltas[name] for name in counters if name in deltas]
    return sum(sent) if sent else None


def not_removed(receipt: RoutingReceipt | None) -> tuple[str, ...]:
    """Return one sentence if the scheme may still be on the switches, which makes the lab DIRTY; otherwise nothing."""
    if receipt is None or receipt.cleared.get("ok") is True:
        return ()
    reason = receipt.cleared.get("error") or "its removal was not read back"
    return (f"routing scheme {receipt.scheme} not removed: {reason}; run `faultbed heal`",)
