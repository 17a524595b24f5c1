"""Check addresses and uplinks of a fabric: overlapping subnets, and switches that cannot be reached. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from faultbed.testbed.inventory.audit_finding import InventoryFinding
from faultbed.testbed.inventory.consistency import Entries

__all__ = ["check_fabric"]

_HOST_BITS, _PAIR_BITS = 32, 31


def check_fabric(entries: Entries) -> Iterator[InventoryFinding]:
    """Yield findings about subnets, loopbacks, missing uplinks and ASNs. Both ends of every link must agree already."""
    yield from _ends_of_subnets(entries)
    yield from _subnets(entries)
    yield from _loopbacks(entries)
    yield from _islands(entries)
    yield from _rejected_routes(entries)


def _ends_of_subnets(entries: Entries) -> Iterator[InventoryFinding]:
    """Check that no interface has the first or last address of its subnet, except in a /31 (RFC 3021) or /32."""
    for place, text in [*_front_ends(entries), *_ports(entries), *_rnics(entries)]:
        address = ipaddress.IPv4Interface(text)
        network = address.network
        if network.prefixlen < _PAIR_BITS and address.ip in (network.network_address, network.broadcast_address):
            problem = f"{address} is the first or last address of its subnet, which no interface may have"
            yield InventoryFinding(place=place, what=problem, do="give it another one, or make it a /31 (RFC 3021)")


def _subnets(entries: Entries) -> Iterator[InventoryFinding]:
    """Check that each cable has its own subnet, and that front ends in one subnet have the same prefix length."""
    shared = [(ipaddress.IPv4Interface(text).network, place, True) for place, text in _front_ends(entries)]
    own = [(ipaddress.IPv4Interface(text).network, place, False) for place, text in _ports(entries, once=True)]
    before: tuple[ipaddress.IPv4Network, str, bool] | None = None
    # Sorted, a network comes after the one that contains it; only other networks that are contained in it are between.
    for network, place, is_shared in sorted(shared + own, key=lambda placed: (placed[0], placed[1])):
        if before is not None and network.overlaps(before[0]):
            if network != before[0] or not (is_shared and before[2]):
                problem = f"its subnet {network} overlaps {before[0]} of {before[1]}"
                do = "give each cable its own subnet, and front ends that share one the same prefix length"
                yield InventoryFinding(place=place, what=problem, do=do)
        else:
            before = network, place, is_shared


def _loopbacks(entries: Entries) -> Iterator[InventoryFinding]:
    for name, (role, switch) in entries.switches.items():
        length = ipaddress.IPv4Interface(switch.loopback).network.prefixlen
        if length != _HOST_BITS:
            problem = f"{switch.loopback} would attract the traffic of all of its /{length} to this switch"
            yield InventoryFinding(place=f"{role}.{name}.loopback", what=problem, do="write it as a /32")


def _islands(entries: Entries) -> Iterator[InventoryFinding]:
    """Yield switches with hosts that the uplinks do not connect to the others. A lab without any uplink is allowed."""
    peers = {name: _peers(entries, name) for name in entries.switches}
    with_hosts = [name for name, (_, switch) in entries.switches.items() if any(port.rnic for port in switch.ports)]
    if not with_hosts or not any(peers.values()):
        return
    reached, order = {with_hosts[0]}, [with_hosts[0]]
    for name in order:
        order += peers[name] - reached
        reached |= peers[name]
    for name in with_hosts:
        if name not in reached:
            role, switch = entries.switches[name]
            hosts = ", ".join(dict.fromkeys(port.peer for port in switch.ports if port.rnic))
            problem = f"no uplinks lead from {name} ({hosts}) to {with_hosts[0]}, so their hosts are not connected"
            yield InventoryFinding(place=f"{role}.{name}.ports", what=problem, do="add the uplinks, at both ends")


def _rejected_routes(entries: Entries) -> Iterator[InventoryFinding]:
    """Yield the first switch that rejects routes with its own ASN in their path, if a switch with hosts needs them."""
    asns = {name: switch.asn for name, (_, switch) in entries.switches.items()}
    if len(set(asns.values())) == len(asns):
        return
    peers = {name: _peers(entries, name) for name in entries.switches}
    with_hosts = [name for name, (_, switch) in entries.switches.items() if any(port.rnic for port in switch.ports)]
    for origin in with_hosts:
        passed, order = {origin: {asns[origin]}}, [origin]
        refused: set[str] = set()
        for name in order:  # BGP announces its best path, one of the shortest (RFC 4271, 9.1)
            for peer in sorted(peers[name] - passed.keys()):
                if asns[peer] in passed[name]:
                    refused.add(peer)
                else:
                    passed[peer] = passed[name] | {asns[peer]}
                    order.append(peer)
        missing = [name for name in with_hosts if name not in passed]
        if missing and refused - passed.keys():
            at = min(refused - passed.keys())
            role, _ = entries.switches[at]
            problem = (
                f"AS {asns[at]} is on the path from {origin}, so that {missing[0]} never learns routes of {origin}"
            )
            yield InventoryFinding(place=f"{role}.{at}.asn", what=problem, do="give it an ASN of its own")
            return


def _peers(entries: Entries, name: str) -> set[str]:
    return {port.peer for port in entries.switches[name][1].ports if port.rnic is None}


def _front_ends(entries: Entries) -> list[tuple[str, str]]:
    return [(f"hosts.{name}.front_end.address", host.front_end.address) for name, host in entries.hosts.items()]


def _rnics(entries: Entries) -> list[tuple[str, str]]:
    return [
        (f"hosts.{name}.rnics[{rnic.name}].address", rnic.address)
        for name, host in entries.hosts.items()
        for rnic in host.rnics
    ]


def _ports(entries: Entries, *, once: bool = False) -> list[tuple[str, str]]:
    """Return the addresses of switch ports with their places; with `once`, an uplink only at one of its ends."""
    return [
        (f"{role}.{name}.ports[{index}].address", port.address)
        for name, (role, switch) in entries.switches.items()
        for index, port in enumerate(switch.ports)
        if port.address is not None and not (once and port.rnic is None and name > port.peer)
    ]
