"""What each switch of a soft lab needs to route by a scheme: tables, rules, marks and next-hop groups. Pure.

    ecmp              nothing: the main table, which BGP fills, decides
    static schemes    one table for each uplink, with every prefix that BGP reaches over it; a rule for each prefix
    marking schemes   the same tables; nftables marks each RoCEv2 packet, a rule for each mark
    sharing schemes   one table whose routes have weights, or a resilient next-hop group; one rule
    placed schemes    the tables of static schemes; a rule for each port of a source and each prefix of a destination

Every table holds only routes that BGP has now (`faultbed.testbed.node.routing.agent` copies them). A lookup that finds
no route in a scheme's table goes on to the main table, so a dead uplink or a withdrawn prefix falls back to BGP's own
ECMP.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Mapping, Sequence
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
        placed: port of each (port of a source RNIC, prefix of a destination host); empty unless the scheme is placed.
    """

    hops: Mapping[str, tuple[str, ...]]
    static: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    placed: Mapping[tuple[str, str], str] = field(default_factory=dict)

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

    def rules(self, switch: str) -> list[tuple[int, int, str | None, int, str]]:
        """Return the rules of a switch: priority, table, prefix (None: any), mark (0: any), port (empty: any)."""
        tables_of_switch = self.switches[switch]
        table_by_port = tables_of_switch.table_by_port
        if not self.scheme.has_tables:
            return []
        if self.scheme.shares:
            return [(PRIORITY, SHARED_TABLE, None, 0, "")]
        if self.scheme.marks:
            return [(PRIORITY, table, None, table, "") for table in table_by_port.values()]
        placed = tables_of_switch.placed.items()
        return [
            *((PRIORITY, table_by_port[port], prefix, 0, "") for prefix, port in tables_of_switch.static.items()),
            *((PRIORITY, table_by_port[port], prefix, 0, source) for (source, prefix), port in placed),
        ]

    def request(self, switch: str, netns: str | None) -> dict[str, Any]:
        """Return the request to the agent on the switch's machine (JSON)."""
        tables_of_switch = self.switches[switch]
        tables = {str(table): port for port, table in tables_of_switch.table_by_port.items()}
        if self.scheme.shares or not self.scheme.has_tables:
            tables = {}
        return {
            "netns": netns,
            "prefixes": {prefix: list(ports) for prefix, ports in tables_of_switch.hops.items()},
            "tables": tables,
            "weights": dict(tables_of_switch.weights) if self.scheme.shares else {},
            "buckets": self.routing.buckets if self.scheme.shares == "buckets" else 0,
            "rules": [list(rule) for rule in self.rules(switch)],
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
                if chosen.is_static and not chosen.marks and not chosen.is_placed:
                    flow = Flow(src="", dst=f"{host.name}:{rnic.name}", size_bytes=1, src_port=0, dst_qpn=0)
                    at = Choice(
                        topology=topology, switch=switch.name, routing=routing, flow=flow, hops=links, alive=links
                    )
                    ((link, _share),) = chosen.choose(at)
                    static[prefix] = link.end(switch.name).netdev
        if hops:
            weights = _weights(topology, switch, routing)
            placed = _placed(topology, switch, routing, hops) if chosen.is_placed else {}
            switches[switch.name] = SwitchTables(hops=hops, static=static, weights=weights, placed=placed)
    if not switches:
        raise Unsupported(f"{scheme}: no switch of this lab has two next hops to another rack, so there is no choice")
    return SchemeTables(scheme=chosen, routing=routing, switches=switches)


def _placed(
    topology: Topology, switch: Switch, routing: Routing, hops: Mapping[str, Sequence[str]]
) -> dict[tuple[str, str], str]:
    """Return the port of each source port and destination prefix at a rack switch.

    Parallel links to one spine share a name, and take the keys of that name in turn.
    """
    source_port = {f"{link.b.node}:{link.rnic}": link.a.netdev for link in topology.links_of(switch.name) if link.rnic}
    ports: dict[str, list[str]] = {}
    for link in topology.links_of(switch.name):
        if link.is_uplink and link.a.node == switch.name:
            ports.setdefault(link.name, []).append(link.a.netdev)
    turns = {name: itertools.cycle(among) for name, among in ports.items()}
    placed = {}
    for (source, host), name in sorted(routing.uplinks.items()):
        if source not in source_port:
            continue
        port = next(turns[name])
        for rnic in topology.host_by_name[host].rnics:
            prefix = str(ipaddress.ip_interface(rnic.address).network)
            if port in hops.get(prefix, ()):
                placed[source_port[source], prefix] = port
    return placed


def _weights(topology: Topology, switch: Switch, routing: Routing) -> dict[str, int]:
    def share(link: Link) -> int:
        return round(routing.weights.get(link.name, 1.0))

    return {link.end(switch.name).netdev: share(link) for link in topology.links_of(switch.name) if link.is_uplink}
