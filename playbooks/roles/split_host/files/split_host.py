"""Separate a host's back end from its front end: ARP, reverse-path filter, addresses and source-based routes.

The settings of each RNIC are applied now, and files for systemd-networkd apply them again at every boot
(systemd.network(5)). An interface with an address that the inventory does not have is rejected and never changed,
because an administrator may be logged in through it.
"""

import os

from faultbed_saved import SavedState
from faultbed_state import FIRST_PRIORITY, FIRST_TABLE, StateError, addresses, answer, ip_json

INFINIBAND = "/sys/class/infiniband"
SYSCTL_FILE = "/etc/sysctl.d/90-faultbed-split_host.conf"


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    rnics = desired["rnics"]
    back_end = {rnic["netdev"] for rnic in rnics}
    defaults = [route["dev"] for route in ip_json("route", "show", "default") if route.get("dev") in back_end]
    if defaults:
        raise StateError(
            f"default route: it uses {', '.join(defaults)}, which is a back-end interface; move it to the front end"
        )
    saved = SavedState("split_host", changes)
    saved.sysctls(sysctls(desired), SYSCTL_FILE)
    links = {link["ifname"]: link for link in ip_json("address")}
    rules, routes = ip_json("rule"), ip_json("route", "show", "table", "all")
    for index, rnic in enumerate(rnics):
        mtu = rnic.get("mtu") or desired["mtu"]
        link = _checked_link(rnic, links.get(rnic["netdev"]))
        for step in steps(rnic, index, mtu, link, rules, routes):
            saved.command(**step)
        if desired["networkd"]:
            saved.file(f"{desired['folder']}/90-faultbed-{rnic['netdev']}.network", network(rnic, index, mtu))


def _checked_link(rnic, link):
    """Return the entry of `ip -j address` for an RNIC's interface after checking it against the inventory.

    Raises:
        StateError: the interface or the RDMA device is missing, or the interface has another MAC or address.
    """
    netdev, name = rnic["netdev"], rnic["name"]
    if link is None:
        raise StateError(f"{netdev}: no such interface; rename it (systemd.link(5)), or correct rnics[{name}].netdev")
    if link.get("address") != rnic["mac"]:
        raise StateError(
            f"{netdev} has the MAC {link.get('address')}, the inventory has {rnic['mac']}; correct the inventory, or "
            "rename the interfaces"
        )
    if not os.path.isdir(f"{INFINIBAND}/{name}"):
        raise StateError(
            f"{name}: no such RDMA device; load its driver, or correct rnics[{name}].name in the inventory"
        )
    unknown = [address for address in addresses(link) if address != rnic["address"]]
    if unknown:
        raise StateError(
            f"{netdev} has {', '.join(unknown)}, the inventory has {rnic['address']}; remove the address by hand if it "
            "is not in use, or correct the inventory"
        )
    return link


def steps(rnic, index, mtu, link, rules, routes):
    """Yield the settings of one RNIC in the order in which to apply them, as arguments of `SavedState.command`."""
    netdev, address = rnic["netdev"], rnic["address"]
    source, table, priority = address.partition("/")[0], str(FIRST_TABLE + index), str(FIRST_PRIORITY + index)
    set_link = ["ip", "link", "set", "dev", netdev]
    yield {
        "key": f"{netdev} MTU",
        "current": link["mtu"],
        "desired": mtu,
        "do": [*set_link, "mtu", str(mtu)],
        "undo": [*set_link, "mtu", str(link["mtu"])],
    }
    yield {
        "key": f"{netdev} address",
        "current": ", ".join(addresses(link)),
        "desired": address,
        "do": ["ip", "address", "add", address, "dev", netdev],
        "undo": ["ip", "address", "flush", "dev", netdev, "to", address],
    }
    state = "up" if "UP" in link["flags"] else "down"
    yield {
        "key": f"{netdev} state",
        "current": state,
        "desired": "up",
        "do": [*set_link, "up"],
        "undo": [*set_link, state],
    }
    yield _route_step(rnic, table, routes)
    rule = f"from {source} lookup {table}"
    installed = {(entry["priority"], entry.get("src"), str(entry.get("table"))) for entry in rules}
    yield {
        "key": f"{netdev} rule",
        "current": rule if (int(priority), source, table) in installed else "",
        "desired": rule,
        "do": ["ip", "rule", "add", "priority", priority, *rule.split()],
        "undo": _tolerating_absence(f"ip rule del priority {priority} {rule}", f"ip rule show priority {priority}"),
    }


def _route_step(rnic, table, routes):
    """Return the step for the default route of the RNIC's own table; its undo restores a route that existed before."""
    existing = [
        f"via {route.get('gateway')} dev {route['dev']}"
        for route in routes
        if (route.get("dst"), str(route.get("table"))) == ("default", table) and "dev" in route
    ]
    current, desired = " and ".join(existing), f"via {rnic['gateway']} dev {rnic['netdev']}"
    replace = ["ip", "route", "replace", "default", "table", table]
    delete = _tolerating_absence(f"ip route del default table {table}", f"ip route show default table {table}")
    return {
        "key": f"{rnic['netdev']} route of table {table}",
        "current": current,
        "desired": desired,
        "do": [*replace, *desired.split()],
        "undo": [*replace, *current.split()] if len(existing) == 1 else delete,
    }


def _tolerating_absence(undo, query):
    """Return a shell command that runs `undo` and also succeeds if `query` prints nothing that is left to undo."""
    return ["sh", "-c", f"{undo} 2>/dev/null || ! {query} 2>/dev/null | grep -q ."]


def sysctls(desired):
    """Return the ARP, reverse-path and redirect settings (Linux, ip-sysctl.rst): path below /proc/sys -> value.

    Each interface answers ARP for its own addresses only. Packets that arrive on another path than the one back to
    their source are accepted.
    """
    values = {"net/ipv4/conf/all/arp_ignore": 1, "net/ipv4/conf/all/arp_announce": 2, "net/ipv4/conf/all/rp_filter": 0}
    for netdev in (desired["front_end"]["netdev"], *(rnic["netdev"] for rnic in desired["rnics"])):
        values[f"net/ipv4/conf/{netdev}/rp_filter"] = 0
        values[f"net/ipv4/conf/{netdev}/accept_redirects"] = 0
    return values


def network(rnic, index, mtu):
    """Return the text of the systemd-networkd file of one RNIC."""
    address, table = rnic["address"], FIRST_TABLE + index
    source = address.partition("/")[0]
    return (
        f"# Written by faultbed's role split_host.\n[Match]\nName={rnic['netdev']}\n\n[Link]\nMTUBytes={mtu}\n\n"
        f"[Network]\nAddress={address}\nLinkLocalAddressing=no\n\n"
        f"[Route]\nGateway={rnic['gateway']}\nTable={table}\n\n"
        f"[RoutingPolicyRule]\nFrom={source}\nTable={table}\nPriority={FIRST_PRIORITY + index}\n"
    )
