"""Configure a soft host's network as the inventory says: interface names, MTU, addresses, routes, RDMA devices.

Each RNIC has its own routing table (`ip rule from ADDRESS`), so that packets from its address leave through it whatever
their destination. rxe looks up routes with the source address and therefore follows these rules.
"""

import os

from faultbed_state import (
    FIRST_PRIORITY,
    FIRST_TABLE,
    MANAGEMENT_IP,
    StateError,
    addresses,
    answer,
    fifo_queues,
    ip_batch,
    ip_json,
    run,
    set_sysctls,
)

INFINIBAND = "/sys/class/infiniband"
PRIORITIES = 100
FRONT_END_MTU = 1500


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    front_end, rnics = desired["front_end"], desired["rnics"]
    is_soft = desired["kind"] == "soft"
    if is_soft and not os.path.isdir("/sys/module/rdma_rxe") and changes.should_make("module rdma_rxe"):
        run(["modprobe", "rdma_rxe"])
    ports = [dict(front_end, mtu=FRONT_END_MTU), *(dict(rnic, mtu=desired["mtu"]) for rnic in rnics)]
    by_mac = {link.get("address"): link for link in ip_json("address")}
    commands = _rename_commands(ports, by_mac) if is_soft else []
    was_renamed = bool(commands)
    for port in ports:
        commands += _port_commands(port, by_mac[port["mac"]], renamed=was_renamed)
    commands += _route_commands(rnics)
    for line in commands:
        changes.should_make(f"ip {line}")
    if not changes.check:
        ip_batch(commands)
    if is_soft:
        fifo_queues([rnic["netdev"] for rnic in rnics], changes)
    set_sysctls(_sysctls(rnics, front_end), changes)
    for rnic in rnics:
        _configure_rdma_device(rnic, is_soft, changes)


def _rename_commands(ports, by_mac):
    """Return `ip` commands that give interfaces, identified by MAC, their names.

    Each gets a temporary name first, because two interfaces may swap their names.
    """
    renames = []
    for port in ports:
        link = by_mac.get(port["mac"])
        if link is None:
            raise StateError(f"no interface with MAC {port['mac']} for {port['netdev']}: check the VM's NICs")
        if any(address.startswith(f"{MANAGEMENT_IP}/") for address in addresses(link)):
            raise StateError(
                f"{link['ifname']} ({port['mac']}) has {MANAGEMENT_IP}, which SSH uses; correct the inventory's MACs"
            )
        if link["ifname"] != port["netdev"]:
            renames.append((link["ifname"], port["netdev"]))
    commands = []
    for index, (old, _) in enumerate(renames):
        commands += [f"link set dev {old} down", f"link set dev {old} name fbtmp{index}"]
    return commands + [f"link set dev fbtmp{index} name {new}" for index, (_, new) in enumerate(renames)]


def _port_commands(port, link, *, renamed):
    """Return `ip` commands for one interface's MTU, address and state; `renamed`: renaming has taken it down."""
    netdev, commands = port["netdev"], []
    if link["mtu"] != port["mtu"]:
        commands.append(f"link set dev {netdev} mtu {port['mtu']}")
    current = addresses(link)
    commands += [f"address del {other} dev {netdev}" for other in current if other != port["address"]]
    if port["address"] not in current:
        commands.append(f"address add {port['address']} dev {netdev}")
    if "UP" not in link["flags"] or renamed:
        commands.append(f"link set dev {netdev} up")
    return commands


def _route_commands(rnics):
    """Return `ip` commands for the rules and tables of the RNICs; they also delete rules of RNICs that are gone."""
    current_rules = {
        (rule["priority"], rule.get("src"), str(rule.get("table")))
        for rule in ip_json("rule")
        if FIRST_PRIORITY <= rule["priority"] < FIRST_PRIORITY + PRIORITIES
    }
    current_routes = {
        (str(route.get("table")), route.get("gateway"), route.get("dev"))
        for route in ip_json("route", "show", "table", "all")
        if route.get("dst") == "default"
    }
    rules, commands = set(), []
    for index, rnic in enumerate(rnics):
        table, address = str(FIRST_TABLE + index), rnic["address"].partition("/")[0]
        rules.add((FIRST_PRIORITY + index, address, table))
        if (table, rnic["gateway"], rnic["netdev"]) not in current_routes:
            commands.append(f"route replace default via {rnic['gateway']} dev {rnic['netdev']} table {table}")
    commands += [f"rule del priority {priority}" for priority, _, _ in sorted(current_rules - rules)]
    commands += [
        f"rule add priority {priority} from {address} lookup {table}"
        for priority, address, table in sorted(rules - current_rules)
    ]
    return commands


def _sysctls(rnics, front_end):
    """Return values below /proc/sys/net, by path. Each interface answers ARP for itself only (Linux, ip-sysctl.rst).

    ip_no_pmtu_disc: an RNIC in hardware ignores ICMP, but rxe sends by the kernel's routes. Otherwise a switch's ICMP
    "fragmentation needed" would make the kernel refuse rxe's packets to that destination for ten minutes
    (net/ipv4/route.c, ip_rt_mtu_expires).
    """
    values = {
        "ipv4/conf/all/rp_filter": 0,
        "ipv4/conf/all/arp_ignore": 1,
        "ipv4/conf/all/arp_announce": 2,
        "ipv4/ip_no_pmtu_disc": 2,
    }
    for netdev in (front_end["netdev"], *(rnic["netdev"] for rnic in rnics)):
        values[f"ipv4/conf/{netdev}/rp_filter"] = 0
    return values


def _configure_rdma_device(rnic, is_soft, changes):
    """Create the rxe device of a soft RNIC on its interface. StateError if a hardware RNIC has no RDMA device."""
    name, netdev = rnic["name"], rnic["netdev"]
    try:
        with open(f"{INFINIBAND}/{name}/parent", encoding="ascii") as file:
            parent = file.read().strip()
    except FileNotFoundError:
        parent = None
    if not is_soft:
        if not os.path.isdir(f"{INFINIBAND}/{name}"):
            raise StateError(f"{name}: no such RDMA device; load its driver, or correct rnics[].name in the inventory")
        return
    if parent == netdev:
        return
    if parent is not None and changes.should_make(f"rdma link delete {name} (was on {parent})"):
        run(["rdma", "link", "delete", name])
    if changes.should_make(f"rdma link add {name} on {netdev}"):
        run(["rdma", "link", "add", name, "type", "rxe", "netdev", netdev])
