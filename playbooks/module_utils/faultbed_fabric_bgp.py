"""BGP configuration of a rack's switch. Unlike a soft lab's switch, it announces only prefixes of the fabric.

A rack's switch is also connected to a management network and perhaps a container bridge. If it announced these, other
switches would route to them through the fabric, and administrators could lose access to the racks.
"""

import ipaddress

from faultbed_frr import bgpd_config

__all__ = ["fabric_bgpd_config"]

NAME = "FAULTBED"


def fabric_bgpd_config(switch):
    """Return the configuration of a switch's bgpd. Prefixes learned from others (non-empty AS path) are passed on."""
    own = [switch["loopback"], *(port["address"] for port in switch["ports"] if port.get("address"))]
    prefixes = sorted({ipaddress.ip_interface(address).network for address in own})
    lines = [
        *(f"ip prefix-list {NAME} seq {5 * n} permit {prefix}" for n, prefix in enumerate(prefixes, 1)),
        f"bgp as-path access-list {NAME} seq 5 permit ^$",
        f"route-map {NAME} permit 10",
        f" match ip address prefix-list {NAME}",
        "exit",
        f"route-map {NAME} deny 20",
        f" match as-path {NAME}",
        "exit",
        f"route-map {NAME} permit 30",
        "exit",
        f"router bgp {switch['asn']}",
        " address-family ipv4 unicast",
        f"  neighbor fabric route-map {NAME} out",
        " exit-address-family",
        "exit",
        "",
    ]
    return bgpd_config(switch) + "\n".join(lines)
