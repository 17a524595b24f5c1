"""Prove that the switches of a carrier forward as the inventory says.

Every port is up with its MTU; every uplink has an established BGP session; and in the kernel's own table each RTSW has,
for every far prefix, as many next hops as it has ways there. BGP comes up at its own time, so that part is asked again
until a deadline.
"""

import ipaddress
import json
import time

from faultbed_shapes import wrong_shapes
from faultbed_state import StateError, addresses, answer, ip_json, run

FRONT_END = "fe"
AGAIN_S = 0.5
LOSSLESS = ("pfifo", "noqueue")


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_verify, wanted, check=check)


def _verify(wanted, _changes):
    switches = wanted["switches"]
    wrong = [told for switch in switches for told in _ports(switch, wanted["mtu"], wanted["shapes"])]
    wrong += _front_end(wanted["front_end_ports"])
    deadline = time.monotonic() + wanted["deadline_s"]
    waiting = {switch["name"]: switch for switch in switches}
    sessions = 0
    while True:
        unready = []
        for name, switch in list(waiting.items()):
            told = _routes(switch, switches) or _sessions(switch)
            if told:
                unready += told
            else:
                del waiting[name]
                sessions += len(_uplinks(switch))
        if not waiting or time.monotonic() > deadline:
            break
        time.sleep(AGAIN_S)
    wrong += unready
    if wrong:
        return {"failed": True, "msg": "; ".join(wrong)}
    return {"sessions": sessions}


def _uplinks(switch):
    return [port for port in switch["ports"] if port.get("rnic") is None]


def _ports(switch, mtu, every_shape):
    links = {link["ifname"]: link for link in ip_json("address", namespace=switch["netns"])}
    shapes = every_shape.get(switch["name"], {})
    if shapes:
        yield from wrong_shapes(switch, shapes)
    for port in switch["ports"]:
        link = links.get(port["netdev"])
        name = f"{switch['name']}:{port['netdev']}"
        if link is None:
            yield f"there is no port {name}"
            continue
        if link["operstate"] != "UP" or "LOWER_UP" not in link["flags"]:
            yield f"{name} is {link['operstate']}"
        if link["address"] != port["mac"]:
            yield f"{name} has the MAC {link['address']}, not {port['mac']}"
        if link["mtu"] != mtu:
            yield f"{name} has MTU {link['mtu']}, not {mtu}"
        if port["netdev"] not in shapes and link["qdisc"] not in LOSSLESS:
            yield f"{name} has the queue {link['qdisc']}, which drops what waits long"
        if port.get("address") and port["address"] not in addresses(link):
            yield f"{name} has not the address {port['address']}"


def _front_end(ports):
    if not ports:
        return []
    links = {link["ifname"]: link for link in ip_json("address", namespace=FRONT_END)}
    return [
        f"front end: {port['netdev']} is not up in the bridge"
        for port in ports
        if (link := links.get(port["netdev"], {})).get("master") != FRONT_END or link.get("operstate") != "UP"
    ]


def ways(switch, switches):
    """Far prefix -> how many next hops the kernel must have for it: first hops on a shortest path over the switches.

    A switch refuses what passed its own ASN, so that of those with its ASN it has none (RFC 4271, 9.1.2).
    """
    by_name = {other["name"]: other for other in switches}
    own = _distances(switch["name"], by_name)
    from_peer = {port["peer"]: _distances(port["peer"], by_name) for port in _uplinks(switch)}
    found = {}
    for target, hops in own.items():
        if hops and by_name[target]["asn"] != switch["asn"]:
            count = sum(distances.get(target) == hops - 1 for distances in from_peer.values())
            found[by_name[target]["loopback"]] = count
            for port in by_name[target]["ports"]:
                if port.get("address"):
                    found[str(ipaddress.IPv4Interface(port["address"]).network)] = count
    return found


def _distances(start, by_name):
    """Hops from a switch to every switch that can be reached."""
    hops, order = {start: 0}, [start]
    for name in order:
        for port in _uplinks(by_name[name]):
            if port["peer"] not in hops:
                hops[port["peer"]] = hops[name] + 1
                order.append(port["peer"])
    return hops


def _routes(switch, switches):
    routes = {
        route["dst"]: max(1, len(route.get("nexthops", [])))
        for route in ip_json("route", "show", "proto", "bgp", namespace=switch["netns"])
    }
    wrong = []
    for prefix, count in ways(switch, switches).items():
        have = routes.get(prefix.removesuffix("/32"), 0)
        if have != count:
            wrong.append(f"{switch['name']} has {have} next hops for {prefix}, not {count}")
    return wrong


def _sessions(switch):
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
