"""FRR commands that apply a routing scheme to a rack's switches, and that remove it. Pure. Not yet run on hardware.

A switch has every next hop of a prefix from BGP, and shares packets among them because their paths are equal. A static
scheme makes one path better: a route-map for the uplink's neighbour raises the local preference (RFC 4271, 9.1.1) of
the prefixes that the scheme sends over that uplink. The route is still BGP's: if the uplink dies, or its neighbour
withdraws the prefix, the switch uses the other paths again. A static route would send packets into the dead one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from faultbed.testbed.errors import Unsupported
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.routing.schemes import Routing
from faultbed.testbed.routing.switch_tables import SwitchTables, scheme_tables

__all__ = ["SwitchConfiguration", "switch_configurations"]

_NAME = "FAULTBED_SCHEME"
_PREFERENCE = 200
"""Any value above 100, the local preference of a path for which nothing is set."""
_UNSUPPORTED = {
    "ecmp": "BGP's equal paths do it by themselves, so there is nothing to configure; the playbook of the rack "
    "selects the fields of the hash",
    "e-ecmp": "no public release of SONiC can hash on the queue pair in the BTH",
    "weighted": "FRR weighs next hops by the bandwidth that neighbours announce, and ignores a bandwidth that the "
    "switch itself sets (FRR 10.3, tried on a soft lab)",
    "spray": "public releases of SONiC have no setting for it; some vendors' releases and NICs have their own",
    "te": "an ACL of SONiC can redirect by ingress port and prefix, but drops what it redirects to a dead uplink; a "
    "rule of Linux falls through to BGP",
    "resilient": "SONiC's fine-grained groups (FG_NHG) name next hops by address, and sessions here are unnumbered",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchConfiguration:
    """One switch under a scheme.

    Attributes:
        switch: its name.
        apply: lines for `vtysh` that apply the scheme.
        remove: lines for `vtysh` that remove it, and nothing else.
        uplink_by_prefix: the only next hop that each prefix must have then.
    """

    switch: str
    apply: tuple[str, ...]
    remove: tuple[str, ...]
    uplink_by_prefix: Mapping[str, str]


def switch_configurations(topology: Topology, scheme: str, routing: Routing) -> tuple[SwitchConfiguration, ...]:
    """Return the configuration of every switch that has a choice of uplinks.

    Raises:
        UsageError: no scheme has this name.
        Unsupported: racks' switches cannot do the scheme, or no switch has a choice.
    """
    tables = scheme_tables(topology, scheme, routing)
    if scheme in _UNSUPPORTED:
        raise Unsupported(
            f"{scheme}: there is no plan for a rack's switches: {_UNSUPPORTED[scheme]}; choose static-parity or pinned"
        )
    return tuple(
        _configuration(name, topology.switch_by_name[name].asn, switch_tables)
        for name, switch_tables in tables.switches.items()
    )


def _configuration(name: str, asn: int, tables: SwitchTables) -> SwitchConfiguration:
    ports = tuple(tables.table_by_port)
    prefixes = {port: [prefix for prefix, uplink in tables.static.items() if uplink == port] for port in ports}
    maps = [line for port in ports for line in _preferring(port, prefixes[port])]
    neighbors = [f"neighbor {port} route-map {_map_of(port)} in" for port in ports]
    lists = [f"no ip prefix-list {_map_of(port)}" for port in ports if prefixes[port]]
    return SwitchConfiguration(
        switch=name,
        apply=("configure terminal", *maps, *_in_bgp(asn, neighbors), "end"),
        # Neighbours first: a neighbour with a route-map that does not exist would refuse every prefix.
        remove=(
            "configure terminal",
            *_in_bgp(asn, [f"no {line}" for line in neighbors]),
            *(f"no route-map {_map_of(port)}" for port in ports),
            *lists,
            "end",
        ),
        uplink_by_prefix=tables.static,
    )


def _map_of(port: str) -> str:
    return f"{_NAME}_{port}"


def _preferring(port: str, prefixes: Sequence[str]) -> list[str]:
    name = _map_of(port)
    lines = [f"ip prefix-list {name} seq {5 * number} permit {prefix}" for number, prefix in enumerate(prefixes, 1)]
    if prefixes:
        lines += [f"route-map {name} permit 10", f"match ip address prefix-list {name}"]
        lines += [f"set local-preference {_PREFERENCE}", "exit"]
    return [*lines, f"route-map {name} permit 20", "exit"]


def _in_bgp(asn: int, lines: Sequence[str]) -> list[str]:
    return [f"router bgp {asn}", "address-family ipv4 unicast", *lines, "exit-address-family", "exit"]
