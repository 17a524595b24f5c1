"""Verify that the switches of a carrier forward as the inventory says.

Every port must be up with its MTU, every uplink must have an established BGP session, and each switch's kernel must
have the computed number of next hops for every remote prefix. BGP converges in its own time, so sessions and routes are
checked repeatedly until a deadline.
"""

import ipaddress
import json
import time

from faultbed_shapes import wrong_shapes
from faultbed_state import StateError, addresses, answer, ip_json, run

FRONT_END = "fe"
RETRY_S = 0.5
LOSSLESS_QDISCS = ("pfifo", "noqueue")


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_verify, desired, check=check)


def _verify(desired, _changes):
    switches = desired["switches"]
    problems = [text for switch in switches for text in _port_problems(switch, desired["mtu"], desired["shapes"])]
    problems += _front_end_problems(desired["front_end_ports"])
    deadline = time.monotonic() + desired["deadline_s"]
    waiting = {switch["name"]: switch for switch in switches}
    sessions = 0
    while True:
        not_converged = []
        for name, switch in list(waiting.items()):
            remaining = _route_problems(switch, switches) or _session_problems(switch)
            if remaining:
                not_converged += remaining
            else:
                del waiting[name]
                sessions += len(_uplinks(switch))
        if not waiting or time.monotonic() > deadline:
            break
        time.sleep(RETRY_S)
    problems += not_converged
    if problems:
        return {"failed": True, "msg": "; ".join(problems)}
    return {"sessions": sessions}


def _uplinks(switch):
    """Return the ports of a switch that lead to other switches."""
    return [port for port in switch["ports"] if port.get("rnic") is None]


def _port_problems(switch, mtu, all_shapes):
    """Yield the deviations of a switch's ports from their desired state, as text."""
    links = {link["ifname"]: link for link in ip_json("address", namespace=switch["netns"])}
    shapes = all_shapes.get(switch["name"], {})
    if shapes:
        yield from wrong_shapes(switch, shapes)
    for port in switch["ports"]:
        link = links.get(port["netdev"])
        name = f"{switch['name']}:{port['netdev']}"
        if link is None:
            yield f"{name}: no such port"
            continue
        if link["operstate"] != "UP" or "LOWER_UP" not in link["flags"]:
            yield f"{name} is {link['operstate']}"
        if link["address"] != port["mac"]:
            yield f"{name} has the MAC {link['address']}, not {port['mac']}"
        if link["mtu"] != mtu:
            yield f"{name} has MTU {link['mtu']}, not {mtu}"
        if port["netdev"] not in shapes and link["qdisc"] not in LOSSLESS_QDISCS:
            yield f"{name} has the qdisc {link['qdisc']}, which drops packets by their delay"
        if port.get("address") and port["address"] not in addresses(link):
            yield f"{name} does not have the address {port['address']}"


def _front_end_problems(ports):
    """Return the ports that are not up in the front end's bridge, as text."""
    if not ports:
        return []
    links = {link["ifname"]: link for link in ip_json("address", namespace=FRONT_END)}
    return [
        f"front end: {port['netdev']} is not up in the bridge"
        for port in ports
        if (link := links.get(port["netdev"], {})).get("master") != FRONT_END or link.get("operstate") != "UP"
    ]


def next_hop_counts(switch, switches):
    """Return the number of next hops that a switch must have for each remote prefix: prefix -> count.

    Next hops are the neighbours on a shortest path. A switch rejects routes that passed its own ASN (RFC 4271, section
    9.1.2), so there are no counts for the prefixes of switches with the same ASN.
    """
    by_name = {other["name"]: other for other in switches}
    own_hops = _hop_counts(switch["name"], by_name)
    hops_by_peer = {port["peer"]: _hop_counts(port["peer"], by_name) for port in _uplinks(switch)}
    counts = {}
    for target, hops in own_hops.items():
        if hops and by_name[target]["asn"] != switch["asn"]:
            count = sum(peer_hops.get(target) == hops - 1 for peer_hops in hops_by_peer.values())
            counts[by_name[target]["loopback"]] = count
            for port in by_name[target]["ports"]:
                if port.get("address"):
                    counts[str(ipaddress.IPv4Interface(port["address"]).network)] = count
    return counts


def _hop_counts(start, by_name):
    """Return the number of hops from a switch to every reachable switch, by name; 0 for itself."""
    hops, queue = {start: 0}, [start]
    for name in queue:
        for port in _uplinks(by_name[name]):
            if port["peer"] not in hops:
                hops[port["peer"]] = hops[name] + 1
                queue.append(port["peer"])
    return hops


def _route_problems(switch, switches):
    """Return the remote prefixes with another number of next hops than computed, as text."""
    routes = {
        route["dst"]: max(1, len(route.get("nexthops", [])))
        for route in ip_json("route", "show", "proto", "bgp", namespace=switch["netns"])
    }
    problems = []
    for prefix, count in next_hop_counts(switch, switches).items():
        actual = routes.get(prefix.removesuffix("/32"), 0)
        if actual != count:
            problems.append(f"{switch['name']} has {actual} next hops for {prefix}, not {count}")
    return problems


def _session_problems(switch):
    """Return the uplinks without an established BGP session, as text."""
    try:
        text = run(["vtysh", "-N", switch["netns"], "-d", "bgpd", "-c", "show bgp ipv4 unicast summary json"])
        peers = json.loads(text)["peers"] if _uplinks(switch) else {}
    except (StateError, KeyError, ValueError) as error:
        return [f"bgpd of {switch['name']} does not answer: {error}"]
    return [
        f"BGP {switch['name']}:{port['netdev']} is {peers.get(port['netdev'], {}).get('state', 'missing')}"
        for port in _uplinks(switch)
        if peers.get(port["netdev"], {}).get("state") != "Established"
    ]
