"""Bring a host's network to what the inventory says: names, MTU, addresses, per-RNIC routes, RDMA devices.

Each RNIC has a routing table of its own (`ip rule from ADDRESS`), so that what it sends leaves by it whatever the
destination; rxe looks up its routes with the source address, and so follows these rules.
"""

import os

from faultbed_state import (
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
FIRST_TABLE = 100
FIRST_PRIORITY = 1000
FRONT_END_MTU = 1500


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    front_end, rnics = wanted["front_end"], wanted["rnics"]
    soft = wanted["kind"] == "soft"
    if soft and not os.path.isdir("/sys/module/rdma_rxe") and changes.really("module rdma_rxe"):
        run(["modprobe", "rdma_rxe"])
    ports = [dict(front_end, mtu=FRONT_END_MTU), *(dict(rnic, mtu=wanted["mtu"]) for rnic in rnics)]
    by_mac = {link.get("address"): link for link in ip_json("address")}
    commands = _names(ports, by_mac) if soft else []
    commands += [line for port in ports for line in _port(port, by_mac[port["mac"]], renamed=bool(commands))]
    commands += _routes(rnics)
    for line in commands:
        changes.really(f"ip {line}")
    if not changes.check:
        ip_batch(commands)
    if soft:
        fifo_queues([rnic["netdev"] for rnic in rnics], changes)
    set_sysctls(_sysctls(rnics, front_end), changes)
    for rnic in rnics:
        _rdma_device(rnic, soft, changes)


def _names(ports, by_mac):
    """Commands that rename interfaces, found by MAC, to their names; over temporary ones, as two may swap."""
    moves = []
    for port in ports:
        link = by_mac.get(port["mac"])
        if link is None:
            raise StateError(f"no interface with MAC {port['mac']} for {port['netdev']}: is its wire in the VM?")
        if any(address.startswith(f"{MANAGEMENT_IP}/") for address in addresses(link)):
            raise StateError(f"{link['ifname']} ({port['mac']}) carries {MANAGEMENT_IP}: refusing to touch it")
        if link["ifname"] != port["netdev"]:
            moves.append((link["ifname"], port["netdev"]))
    commands = []
    for index, (old, _) in enumerate(moves):
        commands += [f"link set dev {old} down", f"link set dev {old} name fbtmp{index}"]
    return commands + [f"link set dev fbtmp{index} name {new}" for index, (_, new) in enumerate(moves)]


def _port(port, link, *, renamed):
    """Commands for one interface's MTU, address and state."""
    netdev, commands = port["netdev"], []
    if link["mtu"] != port["mtu"]:
        commands.append(f"link set dev {netdev} mtu {port['mtu']}")
    have = addresses(link)
    commands += [f"address del {other} dev {netdev}" for other in have if other != port["address"]]
    if port["address"] not in have:
        commands.append(f"address add {port['address']} dev {netdev}")
    if "UP" not in link["flags"] or renamed:
        commands.append(f"link set dev {netdev} up")
    return commands


def _routes(rnics):
    """Commands for the rules and tables of the RNICs; rules of ours that are not wanted any more go."""
    have_rules = {
        (rule["priority"], rule.get("src"), str(rule.get("table")))
        for rule in ip_json("rule")
        if FIRST_PRIORITY <= rule["priority"] < FIRST_PRIORITY + 100
    }
    have_routes = {
        (str(route.get("table")), route.get("gateway"), route.get("dev"))
        for route in ip_json("route", "show", "table", "all")
        if route.get("dst") == "default"
    }
    want_rules, commands = set(), []
    for index, rnic in enumerate(rnics):
        table, address = str(FIRST_TABLE + index), rnic["address"].partition("/")[0]
        want_rules.add((FIRST_PRIORITY + index, address, table))
        if (table, rnic["gateway"], rnic["netdev"]) not in have_routes:
            commands.append(f"route replace default via {rnic['gateway']} dev {rnic['netdev']} table {table}")
    commands += [f"rule del priority {priority}" for priority, _, _ in sorted(have_rules - want_rules)]
    commands += [
        f"rule add priority {priority} from {address} lookup {table}"
        for priority, address, table in sorted(want_rules - have_rules)
    ]
    return commands


def _sysctls(rnics, front_end):
    """Several interfaces of one host must each answer ARP for themselves only (ip-sysctl.rst, arp_ignore).

    An RNIC in hardware knows nothing of ICMP. rxe sends by the kernel's routes: a switch that says "fragmentation
    needed" would have the kernel refuse what rxe sends there for ten minutes (net/ipv4/route.c, ip_rt_mtu_expires).
    """
    wanted = {"ipv4/conf/all/rp_filter": 0, "ipv4/conf/all/arp_ignore": 1, "ipv4/conf/all/arp_announce": 2}
    wanted["ipv4/ip_no_pmtu_disc"] = 2
    for netdev in (front_end["netdev"], *(rnic["netdev"] for rnic in rnics)):
        wanted[f"ipv4/conf/{netdev}/rp_filter"] = 0
    return wanted


def _rdma_device(rnic, soft, changes):
    """An rxe device of the right name on the right netdev; a hardware RNIC must be there already."""
    name, netdev = rnic["name"], rnic["netdev"]
    try:
        with open(f"{INFINIBAND}/{name}/parent", encoding="ascii") as parent:
            below = parent.read().strip()
    except FileNotFoundError:
        below = None
    if not soft:
        if not os.path.isdir(f"{INFINIBAND}/{name}"):
            raise StateError(f"no RDMA device {name}: load its driver, or mend rnics[].name in the inventory")
        return
    if below == netdev:
        return
    if below is not None and changes.really(f"rdma link delete {name} (was on {below})"):
        run(["rdma", "link", "delete", name])
    if changes.really(f"rdma link add {name} on {netdev}"):
        run(["rdma", "link", "add", name, "type", "rxe", "netdev", netdev])
