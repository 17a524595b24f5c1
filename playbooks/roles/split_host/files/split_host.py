"""Keep the back end apart from the front end: ARP and reverse path, routes by source, no default route.

Files are for systemd-networkd (systemd.network(5)); tables and priorities are those that the role roce_host sets now.
"""

from faultbed_found import Found
from faultbed_state import StateError, answer, ip_json

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
    found = Found("split_host", changes)
    for path, value in sysctls(wanted).items():
        found.sysctl(path, value)
    for index, rnic in enumerate(rnics):
        if wanted["networkd"]:
            path = f"{wanted['folder']}/90-faultbed-{rnic['netdev']}.network"
            found.file(path, network(rnic, index, rnic.get("mtu") or wanted["mtu"]))


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
