"""Link types of capture files: which are read, and what to do about the others.

Source: https://www.tcpdump.org/linktypes.html. A file says what its frames begin with; `faultbed.testbed.packets.
encapsulation` finds the IP header behind that.
"""

from __future__ import annotations

__all__ = ["COOKED", "COOKED_2", "ERF", "ETHERNET", "HARMLESS", "LOOPBACK", "RAW_IP", "READ", "refusal"]

ETHERNET, ERF, COOKED, COOKED_2 = 1, 197, 113, 276
RAW_IP = (101, 12, 14, 228, 229)
"""LINKTYPE_RAW, the numbers that some systems write for it, LINKTYPE_IPV4 and LINKTYPE_IPV6."""
LOOPBACK = (0, 108)
"""LINKTYPE_NULL and LINKTYPE_LOOP: four bytes before the IP header."""
READ = frozenset({ETHERNET, ERF, COOKED, COOKED_2, *RAW_IP, *LOOPBACK})

HARMLESS = frozenset({187, 189, 190, 195, 201, 220, 227, 230, 231, 249, 251, 253, 254})
"""Link types that carry no IP: USB, Bluetooth, CAN, IEEE 802.15.4, D-Bus, netlink and its kin."""
_ETHERNET_REMEDY = "capture on the Ethernet interface"
_NAMES = {
    9: ("PPP", _ETHERNET_REMEDY),
    50: ("PPP in HDLC-like framing", _ETHERNET_REMEDY),
    51: ("PPPoE", _ETHERNET_REMEDY),
    105: ("IEEE 802.11", _ETHERNET_REMEDY),
    127: ("IEEE 802.11 with a radio header", _ETHERNET_REMEDY),
    219: ("MPLS", "capture where the packets have no MPLS label"),
    239: ("netfilter log", "capture with tcpdump on the interface instead of NFLOG"),
    240: ("Hilscher netANALYZER", "convert the file to Ethernet frames"),
    247: ("native InfiniBand", "RoCEv2 runs over Ethernet: capture there"),
    274: ("Ethernet with preamble (IEEE 802.3br)", "capture without preambles"),
}


def refusal(link_type: int) -> str:
    """Return what an unreadable link type is and what to do instead, for example `link type 247 (...); capture ...`."""
    name, remedy = _NAMES.get(link_type, ("", _ETHERNET_REMEDY))
    return f"link type {link_type}{f' ({name})' if name else ''} is not read; {remedy}, or with `tcpdump -i any`"
