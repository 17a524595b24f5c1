"""A run's routing scheme: applied to the switches, checked with their kernels as oracle, removed, and its receipt.

The scheme is applied after the fingerprint that the run's end is compared with, and removed before that comparison: a
scheme that is left behind makes the lab DIRTY. Before the workload each switch's kernel reports for sample packets the
port and the table that decides (`ip route get`), by another process than the one that applied the scheme.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.experiment.fabric_file import Fabric
from harness.verdict import RoutingDecisions, RoutingReceipt
from inject.injector import Mutation
from inject.journal import Journal
from inject.routing.hold import PATIENCE_S, TTL_S, Hold
from testbed.lab import Lab
from testbed.node.routing.owned_numbers import GROUP, SHARED_TABLE
from testbed.observe import switch_routing
from testbed.observe.counters import Snapshot, flat_deltas
from testbed.packets.bth import ROCE_PORT
from testbed.routing.switch_tables import MARKING, SHARING, SchemeTables, SwitchTables, fidelity_of, scheme_tables

__all__ = ["LONGEST_LEASE_S", "Applied", "Question", "applied", "missing_rules", "not_removed", "wrong_decisions"]

LONGEST_LEASE_S = TTL_S + PATIENCE_S
"""How long after the controller's death a scheme may still be on the switches."""
_MAIN = 254
_SPORTS = range(0xC000, 0xC000 + 128)
_SHARE_ERROR = 0.1
"""How far a port's share of the decisions may be from its weight: four standard deviations of 512 even draws."""
_LEAST_PACKETS = 100
"""Packets that prove traffic: of keepalives an uplink sends a few a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Packets of one kind at a switch, and what its kernel should decide about them.

    `ports` are (port, share): one port for all, or shares among the source ports that are tried.
    """

    switch: str
    prefix: str
    mark: int
    table: int
    ports: tuple[tuple[str, float], ...]
    sports: Sequence[int]
    compares_shares: bool = False


@dataclass(kw_only=True)
class Applied:
    """A run's scheme while it is applied. `receipt` is complete once the block of `applied` has ended."""

    fabric: Fabric
    tables: SchemeTables
    lab: Lab
    holds: list[Hold] = field(default_factory=list)
    armed: dict[str, Any] = field(default_factory=lambda: {"ok": False})
    decisions: RoutingDecisions = field(default_factory=lambda: RoutingDecisions(asked=0, agreed=0))
    marked: dict[str, int] | None = None
    carried_packets: int | None = None
    doubts: list[str] = field(default_factory=list)
    cleared: dict[str, Any] = field(default_factory=lambda: {"ok": False})

    def check_end(self, before: Snapshot, after: Snapshot) -> None:
        """Check before the scheme is removed that it is still there, and read what was marked and carried.

        A holder that still lives does not show that its rules do: something else on the switch may have removed them.

        Args:
            before: counters before the workload.
            after: counters after it.

        Raises:
            LabError: a machine could not answer.
        """
        for hold in self.holds:
            if not hold.is_held():
                self.doubts.append(f"{hold.planned.place.node} no longer held the scheme when the workload had ended")
        self.carried_packets = _carried(self.lab, self.tables, before, after)
        state_by_switch = switch_routing.read(self.lab, self.tables.switches).switches if self.tables.switches else {}
        self.doubts += missing_rules(self.tables, state_by_switch)
        if self.fabric.routing in MARKING:
            self.marked = {name: sum(state["marked"] or ()) for name, state in state_by_switch.items()}

    def receipt(self) -> RoutingReceipt:
        """Return what is known about the scheme, and why that does not prove it, if it does not."""
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
        if self.carried_packets is None or self.carried_packets < _LEAST_PACKETS:
            yield f"{self.carried_packets or 0} packets left by ports among which it chooses: nothing shows the scheme"
        if self.cleared.get("ok") is not True:
            yield f"not removed: {self.cleared.get('error') or 'something of it is left'}"


@contextlib.contextmanager
def applied(
    lab: Lab, fabric: Fabric | None, journal: Journal, *, mutate: Mutation | None = None
) -> Iterator[Applied | None]:
    """Apply a scheme, yield it, and remove it at the end of the block, however that ends. Without `fabric` yield None.

    Raises:
        FaultError: a switch refuses the scheme; the message says why.
        LabError: the switches' machine does not answer, or another command has ended what is held on the lab.
    """
    if fabric is None:
        yield None
        return
    scheme = Applied(fabric=fabric, tables=scheme_tables(lab.topology, fabric.routing, fabric.as_routing), lab=lab)
    machines = dict.fromkeys(lab.carrier(name).name for name in scheme.tables.switches)
    scheme.holds = [Hold(lab, scheme.tables, machine, journal, mutate=mutate) for machine in machines]
    try:
        for hold in scheme.holds:
            hold.hold()
        scheme.armed = _armed(scheme.holds)
        lab.scheme = scheme.tables
        with journal.doing("routing.decisions", scheme=fabric.routing) as outcome:
            scheme.decisions = _decisions(lab, scheme.tables)
            outcome |= {"asked": scheme.decisions.asked, "wrong": list(scheme.decisions.wrong)}
        yield scheme
    finally:
        lab.scheme = None
        released = [hold.release() for hold in scheme.holds]
        errors = [release.error for release in released if not release.ok]
        scheme.cleared = {
            "ok": not errors,
            "by": "lease" if any(release.by == "lease" for release in released) else "holder",
            "at_ns": max((release.at_ns for release in released), default=None),
            "copied": sum(release.readback.get("copied", 0) for release in released),
            **({"error": "; ".join(errors)} if errors else {}),
        }
        if any(release.by == "lease" for release in released):
            scheme.doubts.append("its holder had ended before the run removed it")


def _armed(holds: Sequence[Hold]) -> dict[str, Any]:
    """Return the readback over all machines; without one (ecmp) there is nothing to apply."""
    return {
        "ok": all(hold.readback.get("whole") is True and hold.readback.get("applied") is True for hold in holds),
        "at_ns": max((hold.applied_ns or 0 for hold in holds), default=None),
        **{name: sum(hold.readback.get(name, 0) for hold in holds) for name in ("switches", "rules", "routes")},
    }


def _decisions(lab: Lab, tables: SchemeTables) -> RoutingDecisions:
    """Query every switch's kernel for its decisions on sample packets of each prefix, and compare them with it."""
    questions = list(_questions(lab, tables))
    answers = _answers(lab, questions)
    wrong = wrong_decisions(questions, answers)
    if tables.scheme == "resilient":
        wrong += _wrong_groups(tables, switch_routing.read(lab, tables.switches).switches)
    return RoutingDecisions(asked=len(questions), agreed=max(0, len(questions) - len(wrong)), wrong=tuple(wrong))


def wrong_decisions(questions: Sequence[Question], answers: Sequence[Sequence[tuple[str | None, int]]]) -> list[str]:
    """Return one sentence for each question that a kernel answered otherwise than the scheme; answers: (port, table).

    Shares are compared over all prefixes of a switch that have the same ports.
    """
    wrong = []
    counts: dict[tuple[str, tuple[tuple[str, float], ...]], Counter[str | None]] = {}
    for question, decisions in zip(questions, answers, strict=True):
        ports = [port for port, _ in question.ports]
        mark = f" with mark {question.mark}" if question.mark else ""
        elsewhere = [
            (port, table) for port, table in decisions or [(None, 0)] if table != question.table or port not in ports
        ]
        if elsewhere:
            port, table = elsewhere[0]
            wrong.append(
                f"{question.switch} to {question.prefix}{mark}: kernel decides by table {table} for {port}, "
                f"the scheme by table {question.table} for {' or '.join(ports)}"
            )
        elif len(ports) > 1 and question.compares_shares:
            counts.setdefault((question.switch, question.ports), Counter()).update(port for port, _ in decisions)
    for (switch, shares), count in counts.items():
        for port, share in shares:
            part = count[port] / count.total()
            if abs(part - share) > _SHARE_ERROR:
                wrong.append(f"{switch}: {part:.0%} of its kernel's decisions are for {port}, the scheme's {share:.0%}")
    return wrong


def missing_rules(tables: SchemeTables, seen: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each switch that lacks rules of a scheme; `seen` is each switch as it was read."""
    missing = []
    for switch in tables.switches:
        wanted = {(table, prefix, mark or None) for _, table, prefix, mark in tables.request(switch, None)["rules"]}
        there = {(rule["table"], rule["to"], rule["mark"]) for rule in seen[switch]["rules"]}
        if lacking := wanted - there:
            missing.append(
                f"{switch} lacked {len(lacking)} of {len(wanted)} rules of the scheme when the workload had ended"
            )
    return missing


def _questions(lab: Lab, tables: SchemeTables) -> Iterator[Question]:
    if not tables.switches:  # ecmp: BGP's own table must decide on every switch that has a choice
        for switch, one in scheme_tables(lab.topology, "static-parity", tables.routing).switches.items():
            for prefix, hops in one.hops.items():
                shares = tuple((port, 1 / len(hops)) for port in hops)
                yield Question(switch=switch, prefix=prefix, mark=0, table=_MAIN, ports=shares, sports=_SPORTS[:8])
        return
    for switch, one in tables.switches.items():
        for prefix, hops in one.hops.items():
            yield from _of_prefix(tables.scheme, switch, one, prefix, hops)


def _of_prefix(scheme: str, switch: str, one: SwitchTables, prefix: str, hops: Sequence[str]) -> Iterator[Question]:
    if scheme in MARKING:
        for port in hops:
            table = one.table_by_port[port]
            yield Question(
                switch=switch, prefix=prefix, mark=table, table=table, ports=((port, 1.0),), sports=_SPORTS[:1]
            )
    elif scheme in SHARING:
        whole = sum(one.weights[port] for port in hops) if scheme == "weighted" else len(hops)
        shares = tuple((port, (one.weights[port] if scheme == "weighted" else 1) / whole) for port in hops)
        yield Question(
            switch=switch, prefix=prefix, mark=0, table=SHARED_TABLE, ports=shares, sports=_SPORTS, compares_shares=True
        )
    else:
        port = one.static[prefix]
        table = one.table_by_port[port]
        yield Question(switch=switch, prefix=prefix, mark=0, table=table, ports=((port, 1.0),), sports=_SPORTS[:4])


def _answers(lab: Lab, questions: Sequence[Question]) -> list[list[tuple[str | None, int]]]:
    """Query every machine once; answers are in the order of the questions.

    Raises:
        LabError: a machine could not answer.
    """
    flows: dict[str, list[list[Any]]] = {}
    for question in questions:
        source, port = _source(lab, question)
        target = str(ipaddress.ip_network(question.prefix)[1])
        mark = [question.mark] if question.mark else []
        flows.setdefault(question.switch, []).extend(
            [source, target, port, sport, ROCE_PORT, *mark] for sport in question.sports
        )
    by_switch: dict[str, list[tuple[str | None, int]]] = {}
    for machine, nodes in lab.carried(flows).items():
        request = {node: [namespace, flows[node]] for node, namespace in nodes.items()}
        answer = lab.ask(machine, {"do": "decisions", "flows": request})
        by_switch |= {node: [(port, table) for port, table in each] for node, each in answer["found"].items()}
    answers = []
    for question in questions:
        mine = by_switch[question.switch]
        answers.append(mine[: len(question.sports)])
        by_switch[question.switch] = mine[len(question.sports) :]
    return answers


def _source(lab: Lab, question: Question) -> tuple[str, str]:
    """Return a source address and the port by which its packets reach the switch: of a host below it, else any port."""
    used = {port for port, _ in question.ports}
    for link in lab.topology.links_of(question.switch):
        if link.rnic is not None:
            rnics = {rnic.name: rnic for rnic in lab.topology.host_by_name[link.b.node].rnics}
            return rnics[link.rnic].ip, link.a.netdev
    ports = [link.end(question.switch).netdev for link in lab.topology.links_of(question.switch)]
    prefix = ipaddress.ip_network(question.prefix)
    away = next(host for host in lab.topology.hosts if ipaddress.ip_address(host.rnics[0].ip) not in prefix)
    return away.rnics[0].ip, next((port for port in ports if port not in used), ports[0])


def _wrong_groups(tables: SchemeTables, seen: Mapping[str, Mapping[str, Any]]) -> list[str]:
    wrong = []
    for switch, one in tables.switches.items():
        for number, (prefix, hops) in enumerate(one.hops.items()):
            group = seen[switch]["groups"].get(str(GROUP + number), {"ports": [], "buckets": 0})
            if sorted(group["ports"]) != sorted(hops) or group["buckets"] != tables.routing.buckets:
                wrong.append(
                    f"{switch} to {prefix}: its next-hop group has {group['buckets']} buckets over "
                    f"{', '.join(group['ports']) or 'no port'}, the scheme {tables.routing.buckets} over "
                    f"{', '.join(hops)}"
                )
    return wrong


def _carried(lab: Lab, tables: SchemeTables, before: Snapshot, after: Snapshot) -> int | None:
    """Return packets that switches with a choice sent by the ports that they choose among; None: no port was read."""
    switches = tables.switches or scheme_tables(lab.topology, "static-parity", tables.routing).switches
    keys = {
        f"{name}/{port}.tx_packets" for name, one in switches.items() for hops in one.hops.values() for port in hops
    }
    deltas = flat_deltas(before, after)
    sent = [deltas[key] for key in keys if key in deltas]
    return sum(sent) if sent else None


def not_removed(one: RoutingReceipt | None) -> tuple[str, ...]:
    """Return a sentence if a scheme may still be on the switches: the lab is DIRTY then."""
    if one is None or one.cleared.get("ok") is True:
        return ()
    return (f"routing scheme {one.scheme} is not removed: {one.cleared.get('error') or 'its end was not seen'}",)
