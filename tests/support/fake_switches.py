"""Switches that obey a routing scheme, ignore it or falsely confirm it, and the lease that applies a scheme to them."""

from __future__ import annotations

import ipaddress
import itertools
from types import SimpleNamespace

from faultbed.inject.routing.scheme_lease import SchemeRelease
from faultbed.testbed.errors import FaultError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.node.routing.owned_numbers import GROUP
from faultbed.testbed.routing.schemes import bucket_counts
from faultbed.testbed.routing.valley_free import ValleyFreePaths
from faultbed.testbed.shipped import inventory_named

TOPOLOGY = lab_inventory.load(inventory_named("soft-3rack")).topology


class FakeSchemeLease:
    """Stand-in for the holder of a scheme; with `lie` it confirms a scheme that its switches do not have."""

    def __init__(self, lab, tables, machine, journal, *, mutate=None):
        self.planned = SimpleNamespace(place=SimpleNamespace(node=machine))
        self.lab, self.tables, self.mutate = lab, tables, mutate
        self.applied_ns = 1

    def apply(self):
        if self.lab.refuses:
            raise FaultError(
                "rtsw1: a rule of priority 1000 (lookup 77) already exists in the range reserved for schemes"
            )
        is_there = self.mutate != "noop"
        self.readback = {"applied": is_there, "whole": is_there, "switches": 3, "rules": 6, "routes": 48}
        if self.tables.scheme.has_tables:  # plain ECMP leaves the switches as they are
            self.lab.obeys = self.tables if self.mutate is None else None

    def update(self, tables):
        if self.mutate is None:
            self.lab.obeys = tables

    def is_applied(self):
        return self.lab.holds

    def release(self):
        self.lab.obeys = None
        detail = "" if self.lab.releases else "a rule is left"
        return SchemeRelease(ok=self.lab.releases, at_ns=2, detail=detail, deviations=self.lab.deviations)


def daddr(*prefixes):
    """Return the statement of nft's JSON that matches destinations."""
    left = {"payload": {"protocol": "ip", "field": "daddr"}}
    return {"match": {"op": "==", "left": left, "right": {"set": list(prefixes)}}}


def mark_by(draw, switch, marks=None):
    """Return the statement of nft's JSON that maps each drawn number to a mark."""
    drawn = list(enumerate(marks or switch.table_by_port.values()))
    return {"mangle": {"key": {"meta": {"key": "mark"}}, "value": {"map": {"key": draw, "data": {"set": drawn}}}}}


class Switches:
    """A lab of three racks whose switches route by this scheme; None: BGP's own ECMP."""

    def __init__(self):
        self.topology, self.scheme, self.obeys = TOPOLOGY, None, None
        self.refuses, self.holds, self.releases, self.marks, self.empties, self.weighs = (
            False,
            True,
            True,
            True,
            False,
            True,
        )
        self.failed = frozenset()
        """Links between switches over which BGP has no session."""
        self.deviations = ()
        """What the machine recorded while the scheme was applied (`faultbed.inject.routing.scheme_lease.Deviation`)."""
        self.changes = {}
        """Parts of the state of every switch that another program has overwritten."""

    def carrier(self, _name):
        return SimpleNamespace(name="fabric")

    def carried(self, nodes):
        return {"fabric": {node: node for node in nodes}}

    def request(self, _machine, request):
        if request["do"] == "routing":
            return {"nodes": {node: self.state(node) for node in request["nodes"]}, "held": []}
        actual = {node: [self.decide(node, flow) for flow in flows] for node, (_, flows) in request["flows"].items()}
        return {"decisions": actual}

    def state(self, node):
        tables = self.obeys
        if tables is None or node not in tables.switches:
            nothing = dict.fromkeys(("marked", "draws", "mark_rules"))
            return {"groups": {}, **nothing, "rules": [], "tables": {"main": self.main(node)}}
        hops = tables.switches[node].hops.values()
        groups = {
            str(GROUP + at): {"ports": list(each), "buckets": tables.routing.buckets} for at, each in enumerate(hops)
        }
        rules = [
            {"priority": priority, "table": table, "to": prefix, "mark": mark or None, "in": source or None}
            for priority, table, prefix, mark, source in tables.rules(node)
        ]
        marked = [400 if self.marks else 0] if tables.scheme.marks else None
        switch = tables.switches[node]
        routes = {"main": self.main(node)}
        for prefix, ports in () if self.empties else switch.hops.items():
            numbers = [1000] if tables.scheme.shares else [switch.table_by_port[port] for port in ports]
            weights = switch.weights if tables.scheme.shares == "weights" and self.weighs else {}
            names = [f"{port} weight {weights[port]}" if weights else port for port in ports]
            for number, port in zip(numbers, ports, strict=False):
                routes.setdefault(str(number), {})[prefix] = names if tables.scheme.shares else [port]
        if tables.scheme.shares == "buckets" and not self.empties:
            routes["1000"] = {prefix: [f"group {GROUP + at}"] for at, prefix in enumerate(switch.hops)}
        draws = [list(draw) for draw in tables.draws(node)] if tables.scheme.marks else None
        mark_rules = None if draws is None else [[daddr(*switch.hops), mark_by(draw, switch)] for draw in draws]
        state = {"groups": groups, "marked": marked, "draws": draws, "rules": rules, "tables": routes}
        state["mark_rules"] = mark_rules
        for change in self.changes.values():
            change(state)
        return state

    def main(self, node):
        """Return the ports of each prefix that BGP has at a switch."""
        paths = ValleyFreePaths(self.topology, failed=self.failed)
        main = {}
        for link in self.topology.links:
            if not link.is_uplink:
                (prefix,) = (
                    str(ipaddress.ip_interface(rnic.address).network)
                    for rnic in self.topology.host_by_name[link.b.node].rnics
                    if rnic.name == link.rnic
                )
                hops = [hop.end(node).netdev for hop in paths.next_hops(node, link.a.node)]
                main[prefix] = hops or ([link.a.netdev] if node == link.a.node else [])
        return main

    def decide(self, node, flow):
        sport, mark = flow[3], flow[5] if len(flow) > 5 else 0
        if self.obeys is None:
            return ["ctsw1" if sport % 2 else "ctsw2", 254]
        one = self.obeys.switches[node]
        prefix = next(each for each in one.hops if flow[1].rpartition(".")[0] in each and is_in(flow[1], each))
        if self.obeys.scheme.is_placed:
            port = one.placed.get((flow[2], prefix))
            return [port, one.table_by_port[port]] if port else ["ctsw1" if sport % 2 else "ctsw2", 254]
        if self.obeys.scheme.shares:
            ports = one.hops[prefix]
            counts = [one.weights[port] for port in ports]
            if self.obeys.scheme.shares == "buckets":
                counts = bucket_counts(self.obeys.routing.buckets, len(ports))
            cycle = list(
                itertools.chain.from_iterable([port] * count for port, count in zip(ports, counts, strict=True))
            )
            return [cycle[sport % len(cycle)], 1000]
        if self.obeys.scheme.marks:
            return [next(port for port, table in one.table_by_port.items() if table == mark), mark]
        return [one.static[prefix], one.table_by_port[one.static[prefix]]]


def is_in(address, prefix):
    return int(address.rpartition(".")[2]) - 1 == int(prefix.partition("/")[0].rpartition(".")[2])
