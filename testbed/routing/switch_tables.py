"""What each switch of a soft lab needs to route by a scheme: tables, rules, marks and next-hop groups. Pure.

    ecmp              nothing: the main table, which BGP fills, decides
    static schemes    one table for each uplink, with every prefix that BGP reaches over it; a rule for each prefix
    marking schemes   the same tables; nftables marks each RoCEv2 packet, a rule for each mark
    sharing schemes   one table whose routes have weights, or a resilient next-hop group; one rule

Every table holds only routes that BGP has now (`faultbed.testbed.node.routing.agent` copies them). A lookup that finds
no route in a scheme's table goes on to the main table, so a dead uplink or a withdrawn prefix falls back to BGP's own
ECMP.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from faultbed.testbed.errors import Unsupported
from faultbed.testbed.model.topology import Link, Switch, Topology
from faultbed.testbed.node.routing.owned_numbers import PRIORITY, SHARED_TABLE, TABLE
from faultbed.testbed.packets.bth import ROCE_PORT
from faultbed.testbed.routing.jenkins_hash import nft_jhash
from faultbed.testbed.routing.schemes import Choice, Flow, Routing, Scheme, scheme_named
from faultbed.testbed.routing.valley_free import ValleyFreePaths

__all__ = ["SchemeTables", "SwitchTables", "scheme_tables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchTables:
    """One switch under a scheme.

    Attributes:
        hops: ports by which each prefix is reached, in the order of the inventory; prefixes with one are left out.
        static: port of each prefix; empty unless the scheme is static and chooses one.
        weights: share of each port.
    """

    hops: Mapping[str, tuple[str, ...]]
    static: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)

    @property
    def table_by_port(self) -> dict[str, int]:
        """Number of the table of each port, which is also the mark of packets for it."""
        ports = dict.fromkeys(port for hops in self.hops.values() for port in hops)
        return {port: TABLE + 1 + index for index, port in enumerate(ports)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeTables:
    """A scheme on a lab. Switches that have no choice are left out of `switches`."""

    scheme: Scheme
    routing: Routing
    switches: Mapping[str, SwitchTables]

    def mark(self, switch: str, destination: str, dst_qpn: int) -> int:
        """Return the mark that `switch` gives to RoCEv2 packets for an address and a queue pair; 0: none.

        Under `spray` the marks differ from packet to packet, and 0 is returned.
        """
        hops = self._hops(switch, destination)
        if not self.scheme.marks or self.scheme.is_per_packet or not hops:
            return 0
        chosen = nft_jhash(dst_qpn.to_bytes(3, "big"), modulus=len(hops), seed=self.routing.seed)
        return self.switches[switch].table_by_port[hops[chosen]]

    def sprays(self, switch: str, destination: str) -> bool:
        """Return whether packets for an address leave `switch` by more than one port, whatever flow they are of."""
        return self.scheme.is_per_packet and bool(self._hops(switch, destination))

    def request(self, switch: str, netns: str | None) -> dict[str, Any]:
        """Return the request to the agent on the switch's machine (JSON)."""
        tables_of_switch = self.switches[switch]
        tables = {str(table): port for port, table in tables_of_switch.table_by_port.items()}
        rules: list[list[Any]]  # priority, table, prefix or None, mark
        if not self.scheme.has_tables:
            tables, rules = {}, []
        elif self.scheme.shares:
            tables, rules = {}, [[PRIORITY, SHARED_TABLE, None, 0]]
        elif self.scheme.marks:
            rules = [[PRIORITY, table, None, table] for table in tables_of_switch.table_by_port.values()]
        else:
            rules = [
                [PRIORITY, tables_of_switch.table_by_port[port], prefix, 0]
                for prefix, port in tables_of_switch.static.items()
            ]
        return {
            "netns": netns,
            "prefixes": {prefix: list(ports) for prefix, ports in tables_of_switch.hops.items()},
            "tables": tables,
            "weights": dict(tables_of_switch.weights) if self.scheme.shares else {},
            "buckets": self.routing.buckets if self.scheme.shares == "buckets" else 0,
            "rules": rules,
            "marks": self._marks(tables_of_switch) if self.scheme.marks else [],
        }

    def _marks(self, tables_of_switch: SwitchTables) -> list[str]:
        """Return nftables statements, one for each set of next hops."""
        by_hops: dict[tuple[str, ...], list[str]] = {}
        for prefix, hops in tables_of_switch.hops.items():
            by_hops.setdefault(hops, []).append(prefix)
        lines = []
        for hops, prefixes in by_hops.items():
            table_by_port = tables_of_switch.table_by_port
            choice = ", ".join(f"{index} : {table_by_port[port]}" for index, port in enumerate(hops))
            draw = self.scheme.marks.format(hops=len(hops), seed=self.routing.seed)
            lines.append(
                f"ip daddr {{ {', '.join(prefixes)} }} udp dport {ROCE_PORT} counter meta mark set {draw} "
                f"map {{ {choice} }}"
            )
        return lines

    def draws(self, switch: str) -> list[tuple[int, int | None]]:
        """Return (modulus, seed) of the draw of each nftables statement; the seed is None where nothing is hashed."""
        if not self.scheme.marks:
            return []
        seed = None if self.scheme.is_per_packet else self.routing.seed
        return [(len(hops), seed) for hops in dict.fromkeys(self.switches[switch].hops.values())]

    def _hops(self, switch: str, destination: str) -> tuple[str, ...]:
        known = self.switches.get(switch)
        address = ipaddress.ip_address(destination)
        for prefix, hops in known.hops.items() if known else ():
            if address in ipaddress.ip_network(prefix):
                return hops
        return ()


def scheme_tables(topology: Topology, scheme: str, routing: Routing) -> SchemeTables:
    """Plan a scheme for every switch that has a choice.

    Raises:
        UsageError: no scheme has this name.
        Unsupported: no switch of the lab has two next hops to anywhere.
    """
    chosen = scheme_named(scheme)
    paths = ValleyFreePaths(topology)
    switches: dict[str, SwitchTables] = {}
    for switch in topology.switches:
        hops: dict[str, tuple[str, ...]] = {}
        static: dict[str, str] = {}
        for host in topology.hosts:
            for rnic in host.rnics:
                links = paths.next_hops(switch.name, topology.rnic_link(host.name, rnic.name).a.node)
                if len(links) < 2:  # noqa: PLR2004 - one next hop is no choice
                    continue
                prefix = str(ipaddress.ip_interface(rnic.address).network)
                hops[prefix] = tuple(link.end(switch.name).netdev for link in links)
                if chosen.is_static and not chosen.marks:
                    flow = Flow(src="", dst=f"{host.name}:{rnic.name}", size_bytes=1, src_port=0, dst_qpn=0)
                    at = Choice(
                        topology=topology, switch=switch.name, routing=routing, flow=flow, hops=links, alive=links
                    )
                    ((link, _share),) = chosen.choose(at)
                    static[prefix] = link.end(switch.name).netdev
        if hops:
            weights = _weights(topology, switch, routing)
            switches[switch.name] = SwitchTables(hops=hops, static=static, weights=weights)
    if not switches:
        raise Unsupported(f"{scheme}: no switch of this lab has two next hops to another rack, so there is no choice")
    return SchemeTables(scheme=chosen, routing=routing, switches=switches)


def _weights(topology: Topology, switch: Switch, routing: Routing) -> dict[str, int]:
    def share(link: Link) -> int:
        return round(routing.weights.get(link.name, 1.0))

    return {link.end(switch.name).netdev: share(link) for link in topology.links_of(switch.name) if link.is_uplink}
