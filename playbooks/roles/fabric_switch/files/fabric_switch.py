"""Bring the switches that a VM carries to what the inventory says: namespaces, ports, addresses, sysctls, FRR.

A port's NIC is found by its MAC wherever it is, renamed and moved into the switch's namespace. Uplinks are veth pairs
with fixed MACs: next hops are ordered by link-local address, and these follow the MACs, so that the same flow takes the
same uplink after every boot.
"""

import os

from faultbed_frr import bring_frr
from faultbed_shapes import shape_ports
from faultbed_state import (
    MANAGEMENT_IP,
    NETNS,
    QUEUE_PACKETS,
    StateError,
    addresses,
    answer,
    fifo_queues,
    ip_batch,
    ip_json,
    set_sysctls,
)

FRONT_END = "fe"
FRONT_END_MTU = 1500


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    switches = wanted["switches"]
    spaces = {switch["netns"]: switch["ports"] for switch in switches}
    if wanted["front_end_ports"]:
        spaces[FRONT_END] = wanted["front_end_ports"]
    for space in spaces:
        if not os.path.exists(f"{NETNS}/{space}") and changes.really(f"namespace {space}"):
            ip_batch([f"netns add {space}"])
    if changes.check and changes.made:
        return  # what is inside a namespace that is not there cannot be compared
    # A veth pair hands packets over by the receiving CPU's backlog, which drops beyond this (net/core/dev.c).
    set_sysctls({"core/netdev_max_backlog": QUEUE_PACKETS}, changes)
    for switch in switches:
        set_sysctls(_sysctls(wanted["ecmp_hash_seeds"][switch["name"]]), changes, namespace=switch["netns"])
    _apply(_placing(switches, spaces, _survey(spaces), wanted["mtu"]), changes)
    inside = _survey(spaces)
    for switch in switches:
        _apply(_switch_links(switch, inside, wanted["mtu"]), changes, switch["netns"])
        # Uplinks are veth pairs: they have no queue.
        host_ports = [port["netdev"] for port in switch["ports"] if port.get("rnic") is not None]
        every_port = [port["netdev"] for port in switch["ports"]]
        shapes = wanted["shapes"].get(switch["name"], {})
        unshaped = [port for port in host_ports if port not in shapes]
        fifo_queues(unshaped, changes, namespace=switch["netns"], clsact=every_port)
        if shapes:
            shape_ports(shapes, changes, namespace=switch["netns"])
    if FRONT_END in spaces:
        _apply(_bridge(spaces[FRONT_END], inside), changes, FRONT_END)
    bring_frr(switches, changes)


def _apply(commands, changes, namespace=None):
    where = f" in {namespace}" if namespace else ""
    for line in commands:
        changes.really(f"ip {line}{where}")
    if not changes.check:
        ip_batch(commands, namespace=namespace)


def _sysctls(seed):
    """IPv6 is there for BGP unnumbered; its link-local addresses must be usable at once, without DAD (RFC 4429)."""
    return {
        "ipv4/ip_forward": 1,
        "ipv4/fib_multipath_hash_policy": 1,  # layer 4: ports too, ip-sysctl.rst
        "ipv4/fib_multipath_hash_seed": seed,
        "ipv4/conf/all/rp_filter": 0,
        "ipv4/conf/default/rp_filter": 0,
        "ipv6/conf/all/forwarding": 1,
        "ipv6/conf/default/accept_dad": 0,
        "ipv6/conf/default/dad_transmits": 0,
    }


def _survey(spaces):
    """All interfaces of the VM: MAC -> (namespace or None, entry of `ip -j address`)."""
    found = {}
    for space in (None, *spaces):
        for link in ip_json("-d", "address", namespace=space):
            if link.get("link_type") == "ether" and link["ifname"] != FRONT_END:
                found[link["address"]] = (space, link)
    return found


def _placing(switches, spaces, found, mtu):
    """Commands, for the VM's own namespace, that bring NICs to their places and make the veth pairs of uplinks."""
    uplinks = {port["mac"] for switch in switches for port in switch["ports"] if port.get("rnic") is None}
    commands = []
    for space, ports in spaces.items():
        for port in ports:
            if port["mac"] not in uplinks:
                commands += _move(space, port, found)
    by_name = {switch["name"]: switch for switch in switches}
    for switch in switches:
        for port in switch["ports"]:
            # Each pair is made once, from the end whose name comes first.
            if port["mac"] in uplinks and port["mac"] not in found and switch["name"] < port["peer"]:
                commands.append(_veth(switch, port, by_name.get(port["peer"]), mtu))
    return commands


def _move(space, port, found):
    """Commands that bring one NIC to a namespace under its name."""
    if port["mac"] not in found:
        raise StateError(f"no NIC with MAC {port['mac']} for {space}:{port['netdev']}: is its wire in the VM?")
    where, link = found[port["mac"]]
    if any(address.startswith(f"{MANAGEMENT_IP}/") for address in addresses(link)):
        raise StateError(f"{link['ifname']} ({port['mac']}) carries {MANAGEMENT_IP}: refusing to touch it")
    if where == space and link["ifname"] == port["netdev"]:
        return []
    if where is not None:
        raise StateError(
            f"{port['mac']} is {link['ifname']} in {where}, not {port['netdev']} in {space}: reset the lab"
        )
    rename = [f"link set dev {link['ifname']} name {port['netdev']}"] if link["ifname"] != port["netdev"] else []
    return [f"link set dev {link['ifname']} down", *rename, f"link set dev {port['netdev']} netns {space}"]


def _veth(switch, port, peer, mtu):
    """The command that makes an uplink, an end in each of two namespaces."""
    if peer is None:
        raise StateError(f"uplink {switch['name']}:{port['peer']} leads to a switch on another carrier")
    far = next(other for other in peer["ports"] if other["peer"] == switch["name"])
    return (
        f"link add name {port['netdev']} address {port['mac']} mtu {mtu} netns {switch['netns']} "
        f"type veth peer name {far['netdev']} address {far['mac']} mtu {mtu} netns {peer['netns']}"
    )


def _switch_links(switch, found, mtu):
    """Commands for one switch's namespace: loopback, MTUs, addresses, states."""
    commands = []
    loopback = ip_json("address", "show", "dev", "lo", namespace=switch["netns"])[0]
    if "UP" not in loopback["flags"]:
        commands.append("link set dev lo up")
    if switch["loopback"] not in addresses(loopback):
        commands.append(f"address add {switch['loopback']} dev lo")
    for port in switch["ports"]:
        _, link = found[port["mac"]]
        if link["mtu"] != mtu:
            commands.append(f"link set dev {port['netdev']} mtu {mtu}")
        have = addresses(link)
        commands += [f"address del {other} dev {port['netdev']}" for other in have if other != port.get("address")]
        if port.get("address") and port["address"] not in have:
            commands.append(f"address add {port['address']} dev {port['netdev']}")
        if "UP" not in link["flags"]:
            commands.append(f"link set dev {port['netdev']} up")
    return commands


def _bridge(ports, found):
    """Commands for the front end's namespace: one bridge over all hosts' wires."""
    links = {link["ifname"]: link for link in ip_json("address", namespace=FRONT_END)}
    commands = []
    if FRONT_END not in links:
        commands += [
            f"link add name {FRONT_END} mtu {FRONT_END_MTU} type bridge forward_delay 0 stp_state 0",
            f"link set dev {FRONT_END} addrgenmode none",
        ]
    if "UP" not in links.get(FRONT_END, {"flags": []})["flags"]:
        commands.append(f"link set dev {FRONT_END} up")
    for port in ports:
        _, link = found[port["mac"]]
        if link.get("master") != FRONT_END:
            commands.append(f"link set dev {port['netdev']} master {FRONT_END}")
        if "UP" not in link["flags"]:
            commands.append(f"link set dev {port['netdev']} up")
    return commands
