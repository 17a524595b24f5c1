"""Configure the switches in a carrier VM as the inventory says: namespaces, ports, addresses, sysctls, FRR.

A port's NIC is identified by its MAC, renamed, and moved into the switch's namespace. Uplinks are veth pairs with fixed
MACs. FRR orders next hops by link-local address, which is derived from the MAC, so that a flow takes the same uplink
after every boot.
"""

import os

from faultbed_frr import configure_frr
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


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    switches = desired["switches"]
    namespaces = {switch["netns"]: switch["ports"] for switch in switches}
    if desired["front_end_ports"]:
        namespaces[FRONT_END] = desired["front_end_ports"]
    for namespace in namespaces:
        if not os.path.exists(f"{NETNS}/{namespace}") and changes.should_make(f"namespace {namespace}"):
            ip_batch([f"netns add {namespace}"])
    if changes.check and changes.made:
        return  # a namespace that does not exist yet has no state to compare
    # A veth pair delivers packets through the receiving CPU's backlog, which drops above this limit (net/core/dev.c).
    set_sysctls({"core/netdev_max_backlog": QUEUE_PACKETS}, changes)
    for switch in switches:
        set_sysctls(_sysctls(desired["ecmp_hash_seeds"][switch["name"]]), changes, namespace=switch["netns"])
    _apply(_placement_commands(switches, namespaces, _interfaces(namespaces), desired["mtu"]), changes)
    interfaces = _interfaces(namespaces)
    for switch in switches:
        _apply(_switch_commands(switch, interfaces, desired["mtu"]), changes, switch["netns"])
        # Only ports to hosts: uplinks are veth pairs, which have no queue.
        host_ports = [port["netdev"] for port in switch["ports"] if port.get("rnic") is not None]
        every_port = [port["netdev"] for port in switch["ports"]]
        shapes = desired["shapes"].get(switch["name"], {})
        unshaped = [port for port in host_ports if port not in shapes]
        fifo_queues(unshaped, changes, namespace=switch["netns"], clsact=every_port)
        if shapes:
            shape_ports(shapes, changes, namespace=switch["netns"])
    if FRONT_END in namespaces:
        _apply(_bridge_commands(namespaces[FRONT_END], interfaces), changes, FRONT_END)
    configure_frr(switches, changes)


def _apply(commands, changes, namespace=None):
    """Report `ip` commands as changes and run them in a namespace (None: the VM's own)."""
    where = f" in {namespace}" if namespace else ""
    for line in commands:
        changes.should_make(f"ip {line}{where}")
    if not changes.check:
        ip_batch(commands, namespace=namespace)


def _sysctls(seed):
    """Return values below /proc/sys/net, by path.

    BGP unnumbered uses IPv6 link-local addresses. They must be usable at once, so duplicate address detection is off
    (RFC 4862, section 5.4).
    """
    return {
        "ipv4/ip_forward": 1,
        "ipv4/fib_multipath_hash_policy": 1,  # layer 4: addresses and ports (ip-sysctl.rst)
        "ipv4/fib_multipath_hash_seed": seed,
        "ipv4/conf/all/rp_filter": 0,
        "ipv4/conf/default/rp_filter": 0,
        "ipv6/conf/all/forwarding": 1,
        "ipv6/conf/default/accept_dad": 0,
        "ipv6/conf/default/dad_transmits": 0,
    }


def _interfaces(namespaces):
    """Return all interfaces of the VM: MAC -> (namespace or None, entry of `ip -j address`)."""
    interfaces = {}
    for namespace in (None, *namespaces):
        for link in ip_json("-d", "address", namespace=namespace):
            if link.get("link_type") == "ether" and link["ifname"] != FRONT_END:
                interfaces[link["address"]] = (namespace, link)
    return interfaces


def _placement_commands(switches, namespaces, interfaces, mtu):
    """Return `ip` commands, for the VM's own namespace, that place NICs and create the veth pairs of uplinks."""
    uplinks = {port["mac"] for switch in switches for port in switch["ports"] if port.get("rnic") is None}
    commands = []
    for namespace, ports in namespaces.items():
        for port in ports:
            if port["mac"] not in uplinks:
                commands += _move_commands(namespace, port, interfaces)
    by_name = {switch["name"]: switch for switch in switches}
    for switch in switches:
        for port in switch["ports"]:
            # Each pair is created once, from the switch whose name sorts first.
            if port["mac"] in uplinks and port["mac"] not in interfaces and switch["name"] < port["peer"]:
                commands.append(_veth_command(switch, port, by_name.get(port["peer"]), mtu))
    return commands


def _move_commands(namespace, port, interfaces):
    """Return `ip` commands that move one NIC into a namespace and rename it.

    Raises:
        StateError: the VM has no such NIC, SSH uses it, or it is in the wrong namespace.
    """
    if port["mac"] not in interfaces:
        raise StateError(f"no NIC with MAC {port['mac']} for {namespace}:{port['netdev']}: check the VM's NICs")
    where, link = interfaces[port["mac"]]
    if any(address.startswith(f"{MANAGEMENT_IP}/") for address in addresses(link)):
        raise StateError(
            f"{link['ifname']} ({port['mac']}) has {MANAGEMENT_IP}, which SSH uses; correct the inventory's MACs"
        )
    if where == namespace and link["ifname"] == port["netdev"]:
        return []
    if where is not None:
        raise StateError(
            f"{port['mac']} is {link['ifname']} in {where}, not {port['netdev']} in {namespace}; reset the lab"
        )
    rename = [f"link set dev {link['ifname']} name {port['netdev']}"] if link["ifname"] != port["netdev"] else []
    return [f"link set dev {link['ifname']} down", *rename, f"link set dev {port['netdev']} netns {namespace}"]


def _veth_command(switch, port, peer, mtu):
    """Return the `ip` command that creates an uplink, with an end in each of two namespaces."""
    if peer is None:
        raise StateError(
            f"uplink {switch['name']}:{port['peer']} leads to a switch on another carrier; give both the same "
            "faultbed_carrier"
        )
    far = next(other for other in peer["ports"] if other["peer"] == switch["name"])
    return (
        f"link add name {port['netdev']} address {port['mac']} mtu {mtu} netns {switch['netns']} "
        f"type veth peer name {far['netdev']} address {far['mac']} mtu {mtu} netns {peer['netns']}"
    )


def _switch_commands(switch, interfaces, mtu):
    """Return `ip` commands for one switch's namespace: loopback, MTUs, addresses, states."""
    commands = []
    loopback = ip_json("address", "show", "dev", "lo", namespace=switch["netns"])[0]
    if "UP" not in loopback["flags"]:
        commands.append("link set dev lo up")
    if switch["loopback"] not in addresses(loopback):
        commands.append(f"address add {switch['loopback']} dev lo")
    for port in switch["ports"]:
        _, link = interfaces[port["mac"]]
        if link["mtu"] != mtu:
            commands.append(f"link set dev {port['netdev']} mtu {mtu}")
        current = addresses(link)
        commands += [f"address del {other} dev {port['netdev']}" for other in current if other != port.get("address")]
        if port.get("address") and port["address"] not in current:
            commands.append(f"address add {port['address']} dev {port['netdev']}")
        if "UP" not in link["flags"]:
            commands.append(f"link set dev {port['netdev']} up")
    return commands


def _bridge_commands(ports, interfaces):
    """Return `ip` commands for the front end's namespace: one bridge with the front-end ports of all hosts."""
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
        _, link = interfaces[port["mac"]]
        if link.get("master") != FRONT_END:
            commands.append(f"link set dev {port['netdev']} master {FRONT_END}")
        if "UP" not in link["flags"]:
            commands.append(f"link set dev {port['netdev']} up")
    return commands
