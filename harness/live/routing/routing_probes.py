"""Query the switches' kernels for the port and table that they select, and compare the answers with a routing scheme.

A separate process on the switches' machine queries each kernel (`ip route get`) about sample packets: the process that
applied the scheme does not check itself. Rules, routes, groups and weights are compared as the kernels show them.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faultbed.harness.verdict import RoutingDecisions
from faultbed.testbed.lab import Lab
from faultbed.testbed.node.routing.owned_numbers import GROUP, SHARED_TABLE
from faultbed.testbed.observe import switch_routing
from faultbed.testbed.packets.bth import ROCE_PORT
from faultbed.testbed.routing.schemes import bucket_counts
from faultbed.testbed.routing.switch_tables import SchemeTables, SwitchTables

__all__ = [
    "RouteProbe",
    "changed_marks",
    "decision_mismatches",
    "installed_rules",
    "missing_rules",
    "query_decisions",
    "wrong_marks",
    "wrong_routes",
]

_MAIN = 254
_SPORTS = range(0xC000, 0xC000 + 128)
_MOST_TEXT = 300
"""Characters of a statement of nft in a sentence."""
_SHARE_ERROR = 0.1
"""Tolerance of a port's share of the decisions: more than four standard deviations of 512 draws with even odds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteProbe:
    """Sample packets for one prefix at one switch, and the decision that the scheme expects.

    They arrive at the port `source`; empty: at any port of a host. `ports` are (port, expected share) pairs: one port,
    or the ports among which the source ports are spread.
    """

    switch: str
    prefix: str
    mark: int
    table: int
    ports: tuple[tuple[str, float], ...]
    sports: Sequence[int]
    compares_shares: bool = False
    source: str = ""


def query_decisions(lab: Lab, tables: SchemeTables) -> RoutingDecisions:
    """Query every switch's kernel about sample packets of each prefix, and compare its decisions with the scheme's."""
    probes = list(_route_probes(tables))
    wrong = decision_mismatches(probes, _query_kernels(lab, probes))
    if tables.scheme.shares == "buckets":
        wrong += _wrong_groups(tables, switch_routing.read(lab, tables.switches).switches)
    if tables.scheme.shares == "weights":
        wrong += _wrong_weights(tables, switch_routing.read(lab, tables.switches).switches)
    if tables.scheme.marks:
        wrong += wrong_marks(tables, switch_routing.read(lab, tables.switches).switches)
    return RoutingDecisions(queried=len(probes), agreed=max(0, len(probes) - len(wrong)), wrong=tuple(wrong))


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
        elif len(decisions) < len(probe.sports):
            answered = f"{len(decisions)} of {len(probe.sports)}"
            wrong.append(f"{probe.switch} to {probe.prefix}{mark}: kernel answered {answered} queries")
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
        expected = set(tables.rules(switch))
        if absent := expected - installed_rules(state_by_switch[switch]):
            missing.append(
                f"{switch}: {len(absent)} of {len(expected)} rules of the scheme missing at the end of the workload"
            )
    return missing


def installed_rules(state: Mapping[str, Any]) -> set[tuple[int, int, str | None, int, str]]:
    """Return the rules of a switch's readback, as `SchemeTables.rules` names them."""
    return {
        (rule["priority"], rule["table"], rule["to"], rule["mark"] or 0, rule["in"] or "") for rule in state["rules"]
    }


def wrong_routes(tables: SchemeTables, state_by_switch: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each switch whose scheme tables do not follow from the next hops that BGP has now.

    A packet whose route is missing takes BGP's route. If another program replaces a route, it stays replaced, because
    the agent follows the main table only.
    """
    wrong = []
    for switch, switch_tables in tables.switches.items():
        state = state_by_switch[switch]
        expected = _expected_routes(tables, switch_tables, state["tables"]["main"])
        installed = {key: _installed_route(state, *key) for key in expected}
        if absent := [key for key, route in installed.items() if route is None]:
            wrong.append(
                f"{switch}: {len(absent)} of {len(expected)} routes of the scheme missing at the end of the workload"
            )
        altered = [key for key, route in installed.items() if route is not None and route != expected[key]]
        if altered:
            table, prefix = altered[0]
            wrong.append(
                f"{switch}: {len(altered)} of {len(expected)} routes of the scheme changed at the end of the workload: "
                f"{prefix} in table {table} goes by {_route_text(installed[altered[0]])}; the scheme expects "
                f"{_route_text(expected[altered[0]])}"
            )
    return wrong


def wrong_marks(tables: SchemeTables, state_by_switch: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each switch whose nftables rules draw marks with a wrong modulus or seed.

    The kernels' decisions do not show this, because they are queried with a mark. A switch without the scheme's
    nftables table is left out: another check reports it.
    """
    wrong = []
    for switch in tables.switches:
        draws, expected = state_by_switch[switch]["draws"], tables.draws(switch)
        if draws is not None and sorted(map(tuple, draws), key=str) != sorted(expected, key=str):
            installed = ", ".join(map(_draw_text, draws)) or "no statement"
            wrong.append(
                f"{switch}: marks are drawn by {installed}; the scheme expects {', '.join(map(_draw_text, expected))}"
            )
    return wrong


def changed_marks(
    applied: Mapping[str, Mapping[str, Any]], state_by_switch: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Return one sentence for each switch whose nftables rules are no longer those of the reading `applied`.

    A rule that draws as the scheme does may still mark other destinations, or give other marks. Addresses and marks are
    compared with what the kernel showed when the scheme was applied, because nft lists adjacent prefixes as one range.
    A switch without the scheme's nftables table is left out: another check reports it.
    """
    changed = []
    for switch, state in applied.items():
        before, after = state["mark_rules"], state_by_switch[switch]["mark_rules"]
        if before is None or after is None or before == after:
            continue
        number = next(at for at in range(max(len(before), len(after))) if before[at : at + 1] != after[at : at + 1])
        was, is_now = (rules[number] if number < len(rules) else [] for rules in (before, after))
        old, new = next(pair for pair in itertools.zip_longest(was, is_now) if pair[0] != pair[1])
        changed.append(
            f"{switch}: nftables rule {number + 1} of the scheme changed while the workload ran: "
            f"{_rule_text(old)} became {_rule_text(new)}"
        )
    return changed


def _rule_text(statement: Any) -> str:
    """Return a statement of nft's JSON, shortened; None: the rule does not have it."""
    text = "nothing" if statement is None else json.dumps(statement)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _draw_text(draw: Sequence[int | None]) -> str:
    modulus, seed = draw
    return f"mod {modulus}" if seed is None else f"mod {modulus} seed {seed}"


_Route = tuple[int, dict[str, int]]
"""Buckets (0: no resilient group), and the weight of each port."""


def _expected_routes(
    tables: SchemeTables, switch_tables: SwitchTables, main: Mapping[str, Sequence[str]]
) -> dict[tuple[int, str], _Route]:
    """Return the scheme's routes by (table, prefix), if BGP has the next hops of `main`."""
    routes: dict[tuple[int, str], _Route] = {}
    for prefix, planned in switch_tables.hops.items():
        ports = [port for port in main.get(prefix, ()) if port in planned]
        if tables.scheme.shares and ports:
            weights = {port: switch_tables.weights[port] for port in ports}
            if tables.scheme.shares == "buckets" or len(ports) == 1:  # a single next hop has no weight
                weights = dict.fromkeys(ports, 1)
            routes[SHARED_TABLE, prefix] = tables.routing.buckets if tables.scheme.shares == "buckets" else 0, weights
        elif tables.scheme.has_tables and not tables.scheme.shares:
            routes |= {(switch_tables.table_by_port[port], prefix): (0, {port: 1}) for port in ports}
    return routes


def _installed_route(state: Mapping[str, Any], table: int, prefix: str) -> _Route | None:
    """Return a route of a scheme's table as a switch was read; None: there is none."""
    hops = state["tables"].get(str(table), {}).get(prefix)
    if hops is None:
        return None
    buckets = 0
    if hops and hops[0].startswith("group "):
        group = state["groups"].get(hops[0].removeprefix("group "), {"ports": [], "buckets": 0})
        buckets, hops = group["buckets"], group["ports"]
    return buckets, {name: int(weight or 1) for name, _, weight in (hop.partition(" weight ") for hop in hops)}


def _route_text(route: _Route | None) -> str:
    buckets, weights = route or (0, {})
    ports = ", ".join(f"{port} weight {weight}" if weight > 1 else port for port, weight in weights.items())
    return f"{buckets} buckets over {ports or 'no port'}" if buckets else ports or "no port"


def _route_probes(tables: SchemeTables) -> Iterator[RouteProbe]:
    for switch, switch_tables in tables.switches.items():
        for prefix in switch_tables.hops:
            yield from _probes_of_prefix(tables, switch, prefix)


def _probes_of_prefix(tables: SchemeTables, switch: str, prefix: str) -> Iterator[RouteProbe]:
    scheme, switch_tables, buckets = tables.scheme, tables.switches[switch], tables.routing.buckets
    hops = switch_tables.hops[prefix]
    placed = [(source, port) for (source, to), port in switch_tables.placed.items() if to == prefix]
    if not scheme.has_tables or (scheme.is_placed and not placed):  # BGP's own table must decide
        shares = tuple((port, 1 / len(hops)) for port in hops)
        yield RouteProbe(switch=switch, prefix=prefix, mark=0, table=_MAIN, ports=shares, sports=_SPORTS[:8])
    elif scheme.is_placed:
        for source, port in placed:
            table = switch_tables.table_by_port[port]
            ports = ((port, 1.0),)
            yield RouteProbe(
                switch=switch, prefix=prefix, mark=0, table=table, ports=ports, sports=_SPORTS[:4], source=source
            )
    elif scheme.marks:
        for port in hops:
            table = switch_tables.table_by_port[port]
            yield RouteProbe(
                switch=switch, prefix=prefix, mark=table, table=table, ports=((port, 1.0),), sports=_SPORTS[:1]
            )
    elif scheme.shares:
        weights: Sequence[int] = [switch_tables.weights[port] for port in hops]
        if scheme.shares == "buckets":
            weights = bucket_counts(buckets, len(hops))
        shares = tuple((port, weight / sum(weights)) for port, weight in zip(hops, weights, strict=True))
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
        answer = lab.request(machine, {"do": "decisions", "flows": request})
        for node, decisions in answer["decisions"].items():
            by_switch[node] = [(port, table) for port, table in decisions]
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
        if link.rnic is not None and probe.source in ("", link.a.netdev):
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
    """Return one sentence for each route with other weights: shares of samples cannot distinguish 4:3 from 1:1."""
    wrong = []
    for switch, switch_tables in tables.switches.items():
        for prefix, ports in switch_tables.hops.items():
            expected = {port: switch_tables.weights[port] for port in ports}
            _, installed = _installed_route(state_by_switch[switch], SHARED_TABLE, prefix) or (0, {})
            if installed != expected:
                wrong.append(
                    f"{switch} to {prefix}: its next hops have the weights {installed}; the scheme expects {expected}"
                )
    return wrong
