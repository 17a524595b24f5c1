"""BGP of a rack's switch: that of the soft lab's, and of its own prefixes only those of the fabric told to others.

A switch of a rack is connected to more than the fabric: its management port, a container bridge. What it told of these,
others would follow: two racks whose management networks differ would reach each other's through the fabric, and who
manages them would be cut off.
"""

import ipaddress

from faultbed_frr import bgpd_config

__all__ = ["fabric_bgpd_config"]

NAME = "FAULTBED"


def fabric_bgpd_config(switch):
    """The configuration of a switch's bgpd. What others have told (its AS path is not empty) is passed on."""
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
