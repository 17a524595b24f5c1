"""Keep the back end apart from the front end: ARP and reverse path, addresses and routes by source, no default route.

What the inventory says of each RNIC is set now, and kept over a boot by files for systemd-networkd
(systemd.network(5)). Tables and priorities are those of soft hosts. An interface that carries what the inventory does
not know is refused, never emptied: it may be somebody's way in.
"""

import os

from faultbed_saved import SavedState
from faultbed_state import StateError, addresses, answer, ip_json

INFINIBAND = "/sys/class/infiniband"
SYSCTL_FILE = "/etc/sysctl.d/90-faultbed-split_host.conf"
FIRST_TABLE, FIRST_PRIORITY = 100, 1000


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    rnics = wanted["rnics"]
    devices = {rnic["netdev"] for rnic in rnics}
    over = [route["dev"] for route in ip_json("route", "show", "default") if route.get("dev") in devices]
    if over:
        raise StateError(f"the default route leads over {', '.join(over)}, which is back end: give it to the front end")
    saved = SavedState("split_host", changes)
    saved.sysctls(sysctls(wanted), SYSCTL_FILE)
    links = {link["ifname"]: link for link in ip_json("address")}
    rules, routes = ip_json("rule"), ip_json("route", "show", "table", "all")
    for index, rnic in enumerate(rnics):
        mtu = rnic.get("mtu") or wanted["mtu"]
        link = _its_own(rnic, links.get(rnic["netdev"]))
        for step in steps(rnic, index, mtu, link, rules, routes):
            saved.command(**step)
        if wanted["networkd"]:
            saved.file(f"{wanted['folder']}/90-faultbed-{rnic['netdev']}.network", network(rnic, index, mtu))


def _its_own(rnic, link):
    """The RNIC's interface, if it is the inventory's, with its RDMA device, and nobody else's."""
    netdev, name = rnic["netdev"], rnic["name"]
    if link is None:
        raise StateError(f"no interface {netdev}: rename it (systemd.link(5)), or mend rnics[{name}].netdev")
    if link.get("address") != rnic["mac"]:
        raise StateError(
            f"{netdev} has the MAC {link.get('address')}, the inventory says {rnic['mac']}: mend one of them"
        )
    if not os.path.isdir(f"{INFINIBAND}/{name}"):
        raise StateError(f"no RDMA device {name}: load its driver, or mend rnics[{name}].name in the inventory")
    strange = [address for address in addresses(link) if address != rnic["address"]]
    if strange:
        raise StateError(
            f"{netdev} has {', '.join(strange)}, the inventory says {rnic['address']}: take it away by hand if nobody "
            "needs it, or mend the inventory"
        )
    return link


def steps(rnic, index, mtu, link, rules, routes):
    """Return what to set for one RNIC, in order, as arguments of `SavedState.command`."""
    netdev, address = rnic["netdev"], rnic["address"]
    source, table, priority = address.partition("/")[0], str(FIRST_TABLE + index), str(FIRST_PRIORITY + index)
    at = ["ip", "link", "set", "dev", netdev]
    yield {
        "key": f"{netdev} MTU",
        "have": link["mtu"],
        "want": mtu,
        "do": [*at, "mtu", str(mtu)],
        "undo": [*at, "mtu", str(link["mtu"])],
    }
    yield {
        "key": f"{netdev} address",
        "have": ", ".join(addresses(link)),
        "want": address,
        "do": ["ip", "address", "add", address, "dev", netdev],
        "undo": ["ip", "address", "flush", "dev", netdev, "to", address],
    }
    have = "up" if "UP" in link["flags"] else "down"
    yield {"key": f"{netdev} state", "have": have, "want": "up", "do": [*at, "up"], "undo": [*at, have]}
    yield _route(rnic, table, routes)
    rule = f"from {source} lookup {table}"
    there = (int(priority), source, table) in {
        (one["priority"], one.get("src"), str(one.get("table"))) for one in rules
    }
    yield {
        "key": f"{netdev} rule",
        "have": rule if there else "",
        "want": rule,
        "do": ["ip", "rule", "add", "priority", priority, *rule.split()],
        "undo": _unless_gone(f"ip rule del priority {priority} {rule}", f"ip rule show priority {priority}"),
    }


def _route(rnic, table, routes):
    """The default route of the RNIC's own table; one that was there before comes back."""
    said = [
        f"via {one.get('gateway')} dev {one['dev']}"
        for one in routes
        if (one.get("dst"), str(one.get("table"))) == ("default", table) and "dev" in one
    ]
    have, want = " and ".join(said), f"via {rnic['gateway']} dev {rnic['netdev']}"
    replace = ["ip", "route", "replace", "default", "table", table]
    gone = _unless_gone(f"ip route del default table {table}", f"ip route show default table {table}")
    return {
        "key": f"{rnic['netdev']} route of table {table}",
        "have": have,
        "want": want,
        "do": [*replace, *want.split()],
        "undo": [*replace, *have.split()] if len(said) == 1 else gone,
    }


def _unless_gone(undo, look):
    """A shell command that is right when `undo` was, or when `look` shows that there is nothing to undo."""
    return ["sh", "-c", f"{undo} 2>/dev/null || ! {look} 2>/dev/null | grep -q ."]


def sysctls(wanted):
    """Each interface answers ARP for itself only, and is not forgotten for asymmetric paths (ip-sysctl.rst)."""
    made = {"net/ipv4/conf/all/arp_ignore": 1, "net/ipv4/conf/all/arp_announce": 2, "net/ipv4/conf/all/rp_filter": 0}
    for netdev in (wanted["front_end"]["netdev"], *(rnic["netdev"] for rnic in wanted["rnics"])):
        made[f"net/ipv4/conf/{netdev}/rp_filter"] = 0
        made[f"net/ipv4/conf/{netdev}/accept_redirects"] = 0
    return made


def network(rnic, index, mtu):
    """The networkd file of one RNIC."""
    address, table = rnic["address"], FIRST_TABLE + index
    source = address.partition("/")[0]
    return (
        f"# Written by faultbed's role split_host.\n[Match]\nName={rnic['netdev']}\n\n[Link]\nMTUBytes={mtu}\n\n"
        f"[Network]\nAddress={address}\nLinkLocalAddressing=no\n\n"
        f"[Route]\nGateway={rnic['gateway']}\nTable={table}\n\n"
        f"[RoutingPolicyRule]\nFrom={source}\nTable={table}\nPriority={FIRST_PRIORITY + index}\n"
    )
