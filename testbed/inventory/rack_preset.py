"""The example of a rack lab, as an Ansible inventory: 2 racks x 2 servers x 8 GPUs and 8 RNICs, 2 RTSWs, 4 CTSWs.

`python3 -m faultbed.testbed.inventory.rack_preset > inventory/rack-h100.example.yml` writes the file again; a test
keeps both equal. What is the same for the whole lab (IP plan, DSCP map, QoS profile) is in
inventory/group_vars/rack_h100.yml, by hand. Addresses follow from numbers, as in
`faultbed.testbed.inventory.soft_presets`; those of management, BMCs and PDUs are documentation prefixes (RFC 5737), to
be replaced together with the MACs.
"""

from __future__ import annotations

import sys
from typing import Any

import yaml

__all__ = ["inventory_text"]

RACKS, SERVERS, RAILS, CTSWS = 2, 2, 8, 4
RNIC_GBPS, UPLINK_GBPS = 400, 800
HOST_MTU, FABRIC_MTU = 9000, 9216
_PCIE = ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db")
"""Placeholders: a bus for each rail, where the RNIC and its GPU sit below one PCIe switch (`lspci -tv` tells yours)."""
_HEAD = """\
# yaml-language-server: $schema=schema.json
# Example of a rack lab: 2 racks x 2 servers x 8 GPUs and 8 RNICs, one RTSW a rack, 4 CTSWs. Not yet run on hardware.
# Written by `python3 -m faultbed.testbed.inventory.rack_preset`. Copy it, put in your addresses, MACs, PCIe addresses
# and outlets, then `faultbed --lab YOURS.yml inventory check`. Group variables: group_vars/rack_h100.yml beside it.
#
# Management 192.0.2.0/24, BMCs 198.51.100.0/24 and PDUs 203.0.113.0/24 are documentation prefixes (RFC 5737).
"""


def inventory_text() -> str:
    """Return the inventory as YAML with its head comment."""
    body = yaml.safe_dump(_tree(), sort_keys=False, default_flow_style=None, width=200)
    return _HEAD + body


def _tree() -> dict[str, Any]:
    racks = range(1, RACKS + 1)
    lab = {
        "children": {
            "jump": {"hosts": {"jump1": {"ansible_host": "192.0.2.250"}}},
            "racks": {"children": {f"rack{rack}": _rack(rack) for rack in racks}},
            "hosts": {"hosts": {f"host{number}": _host(number) for number in range(1, RACKS * SERVERS + 1)}},
            "switches": {
                "vars": {"faultbed_nos": "sonic"},
                "children": {
                    "rtsw": {"hosts": {f"rtsw{rack}": _rtsw(rack) for rack in racks}},
                    "ctsw": {
                        "vars": {"faultbed_zone": "zone1"},
                        "hosts": {f"ctsw{number}": _ctsw(number) for number in range(1, CTSWS + 1)},
                    },
                },
            },
        }
    }
    return {"all": {"children": {"rack_h100": lab}}}


def _rack(rack: int) -> dict[str, Any]:
    members = [*(f"host{number}" for number in _servers(rack)), f"rtsw{rack}"]
    return {
        "vars": {"faultbed_zone": "zone1", "faultbed_rack": f"rack{rack}"},
        "hosts": {member: {} for member in members},
    }


def _host(number: int) -> dict[str, Any]:
    rack = (number - 1) // SERVERS + 1
    return {
        "ansible_host": f"192.0.2.{10 + number}",
        "faultbed_bmc": {"address": f"198.51.100.{10 + number}", "protocol": "redfish"},
        "faultbed_power": [
            {"pdu": f"pdu{rack}a", "outlet": (number - 1) % SERVERS + 1},
            {"pdu": f"pdu{rack}b", "outlet": (number - 1) % SERVERS + 1},
        ],
        "faultbed_front_end": {"netdev": "ens1f0", "mac": _mac(5, 0, 0, number), "address": f"10.79.0.{number}/24"},
        "faultbed_rnics": [
            {
                "name": f"mlx5_{rail}",
                "netdev": f"rail{rail}",
                "mac": _mac(1, rack, number, rail),
                "address": f"10.77.{rack}.{2 * _link(number, rail) + 1}/31",
                "gateway": f"10.77.{rack}.{2 * _link(number, rail)}",
                "switch": f"rtsw{rack}",
                "mtu": HOST_MTU,
                "speed_gbps": RNIC_GBPS,
                "pcie": f"0000:{_PCIE[rail]}:00.0",
                "gpu": f"gpu{rail}",
            }
            for rail in range(RAILS)
        ],
        "faultbed_gpus": [
            {"name": f"gpu{rail}", "kind": "h100-sxm", "pcie": f"0000:{int(_PCIE[rail], 16) + 1:02x}:00.0"}
            for rail in range(RAILS)
        ],
    }


def _rtsw(rack: int) -> dict[str, Any]:
    host_ports = [
        {
            "netdev": f"Ethernet{8 * _link(number, rail)}",
            "mac": _mac(2, rack, number, rail),
            "address": f"10.77.{rack}.{2 * _link(number, rail)}/31",
            "peer": f"host{number}",
            "rnic": f"mlx5_{rail}",
            "mtu": FABRIC_MTU,
            "speed_gbps": RNIC_GBPS,
        }
        for number in _servers(rack)
        for rail in range(RAILS)
    ]
    uplinks = [
        {
            "netdev": f"Ethernet{8 * (SERVERS * RAILS + ctsw - 1)}",
            "mac": _mac(3, 0, rack, ctsw),
            "peer": f"ctsw{ctsw}",
            "mtu": FABRIC_MTU,
            "speed_gbps": UPLINK_GBPS,
        }
        for ctsw in range(1, CTSWS + 1)
    ]
    return {
        "ansible_host": f"192.0.2.{100 + rack}",
        "faultbed_asn": 65100 + rack,
        "faultbed_loopback": f"10.78.0.{rack}/32",
        "faultbed_power": [{"pdu": f"pdu{rack}a", "outlet": 20}, {"pdu": f"pdu{rack}b", "outlet": 20}],
        "faultbed_ports": host_ports + uplinks,
    }


def _ctsw(number: int) -> dict[str, Any]:
    rack = (number - 1) % RACKS + 1
    outlet = 21 + (number - 1) // RACKS
    return {
        "ansible_host": f"192.0.2.{200 + number}",
        "faultbed_asn": 65201,
        "faultbed_loopback": f"10.78.0.{100 + number}/32",
        "faultbed_power": [{"pdu": f"pdu{rack}a", "outlet": outlet}, {"pdu": f"pdu{rack}b", "outlet": outlet}],
        "faultbed_ports": [
            {
                "netdev": f"Ethernet{8 * (rtsw - 1)}",
                "mac": _mac(4, 0, number, rtsw),
                "peer": f"rtsw{rtsw}",
                "mtu": FABRIC_MTU,
                "speed_gbps": UPLINK_GBPS,
            }
            for rtsw in range(1, RACKS + 1)
        ],
    }


def _servers(rack: int) -> range:
    return range((rack - 1) * SERVERS + 1, rack * SERVERS + 1)


def _link(number: int, rail: int) -> int:
    """Return the number of a host link in its rack, from 0."""
    return (number - 1) % SERVERS * RAILS + rail


def _mac(kind: int, *tail: int) -> str:
    return "02:fb:" + ":".join(f"{byte:02x}" for byte in (kind, *tail))


if __name__ == "__main__":
    sys.stdout.write(inventory_text())
