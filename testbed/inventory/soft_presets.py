"""The soft labs we offer, as Ansible inventories: pure functions from a size to a text.

`python3 -m testbed.inventory.soft_presets soft > inventory/soft.yml` writes the file again; a test keeps file and
generator equal. Addresses, MACs and AS numbers are functions of a node's number alone, so that a snapshot, an ECMP
mapping or a captured packet means the same on every machine that runs the preset.

    back end    rack R, link i     switch 10.77.R.(2i)/31, host 10.77.R.(2i+1)/31   (/31: RFC 3021)
    front end   host n             10.79.0.n/24
    loopback    rtsw n, ctsw n     10.78.0.n/32, 10.78.0.(100+n)/32
    ASN         rtsw n, ctsw n     65100+n, 65200+n
    MAC         02:fb:KK:XX:YY:ZZ  locally administered; KK is the kind of port (`_MacKind`)

QEMU's user network owns 10.0.2.0/24, so no preset may use it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import yaml

from testbed.errors import UsageError

__all__ = ["PRESETS", "Preset", "inventory_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The size of a soft lab. Every rack has one RTSW, every RTSW one uplink to every CTSW, every host one soft GPU."""

    name: str
    summary: str
    racks: int
    hosts_per_rack: int
    rnics_per_host: int
    ctsws: int
    host_memory_mib: int = 512
    carrier_memory_mib: int = 512


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="soft-mini",
            summary="one rack of two hosts; its one CTSW gives BGP something to speak to, but no path to choose",
            racks=1,
            hosts_per_rack=2,
            rnics_per_host=2,
            ctsws=1,
        ),
        Preset(
            name="soft",
            summary="two racks of two hosts and two equal paths between them; the default",
            racks=2,
            hosts_per_rack=2,
            rnics_per_host=2,
            ctsws=2,
        ),
        Preset(
            name="soft-3rack",
            summary="three racks of two hosts: incast and groups that span racks unevenly",
            racks=3,
            hosts_per_rack=2,
            rnics_per_host=2,
            ctsws=2,
        ),
    )
}

_CARRIER = "fabric"
_HEAD = """\
# {name}: {summary}.
# Written by `python3 -m testbed.inventory.soft_presets {name}`; change the preset, not this file.
#
# This is an Ansible inventory and the single source of truth of the lab: the VMs, their wires, the roles in
# playbooks/ and the topology model are all made from it. `ansible-inventory -i inventory/{name}.yml --list` shows it.
#
# Where a node answers is not written here, because the ports of a soft lab are chosen when it starts. A running lab
# keeps a second inventory in its state directory with ansible_host (127.0.0.1), ansible_port, ansible_user,
# ansible_ssh_private_key_file and ansible_ssh_common_args (StrictHostKeyChecking=yes and the lab's own known hosts)
# for each machine, and both are given to Ansible: `-i inventory/{name}.yml -i STATE/<runtime inventory>`.
#
# Groups: hosts; switches (rtsw, ctsw); carriers (VMs that carry switches as network namespaces); racks.
# A switch with faultbed_carrier is no machine of its own: it is the namespace faultbed_netns on that carrier.
"""


class _MacKind(IntEnum):
    MANAGEMENT = 0
    RNIC = 1
    HOST_PORT = 2
    UPLINK_LOW = 3
    UPLINK_HIGH = 4
    FRONT_END = 5
    FRONT_END_PORT = 6


def inventory_text(name: str) -> str:
    """The inventory of a preset, as YAML with its head comment.

    Raises:
        UsageError: there is no such preset.
    """
    if name not in PRESETS:
        raise UsageError(f'no preset "{name}": there are {", ".join(PRESETS)}')
    preset = PRESETS[name]
    body = yaml.safe_dump(_tree(preset), sort_keys=False, default_flow_style=None, width=160)
    return _HEAD.format(name=preset.name, summary=preset.summary) + body


def _tree(preset: Preset) -> dict[str, Any]:
    racks = range(1, preset.racks + 1)
    ctsws = range(1, preset.ctsws + 1)
    return {
        "all": {
            "vars": {
                "faultbed_schema": 1,
                "faultbed_name": preset.name,
                "faultbed_kind": "soft",
                # 4096 bytes of RDMA payload plus the RoCEv2 headers (InfiniBand annex A17) with room to spare
                "faultbed_mtu": 4200,
                "faultbed_ecmp_hash_seed": 12345,
            },
            "children": {
                "racks": {"children": {f"rack{rack}": _rack(preset, rack) for rack in racks}},
                "hosts": {
                    "vars": {"faultbed_vm": {"memory_mib": preset.host_memory_mib, "vcpus": 1}},
                    "hosts": {
                        f"host{number}": _host(preset, rack, number)
                        for rack in racks
                        for number in _host_numbers(preset, rack)
                    },
                },
                "switches": {
                    "vars": {"faultbed_carrier": _CARRIER},
                    "children": {
                        "rtsw": {"hosts": {f"rtsw{rack}": _rtsw(preset, rack) for rack in racks}},
                        "ctsw": {
                            "vars": {"faultbed_zone": "zone1"},
                            "hosts": {f"ctsw{number}": _ctsw(preset, number) for number in ctsws},
                        },
                    },
                },
                "carriers": {"hosts": {_CARRIER: _carrier(preset)}},
            },
        }
    }


def _rack(preset: Preset, rack: int) -> dict[str, Any]:
    members = [*(f"host{number}" for number in _host_numbers(preset, rack)), f"rtsw{rack}"]
    return {
        "vars": {"faultbed_zone": "zone1", "faultbed_rack": f"rack{rack}"},
        "hosts": {member: {} for member in members},
    }


def _host(preset: Preset, rack: int, number: int) -> dict[str, Any]:
    return {
        "faultbed_management": {"netdev": "mgmt0", "mac": _mac(_MacKind.MANAGEMENT, 0, 0, number)},
        "faultbed_front_end": {
            "netdev": "fe0",
            "mac": _mac(_MacKind.FRONT_END, 0, 0, number),
            "address": f"10.79.0.{number}/24",
        },
        "faultbed_rnics": [
            {
                "name": f"rxe{index}",
                "netdev": f"be{index}",
                "mac": _mac(_MacKind.RNIC, rack, number, index),
                "address": f"10.77.{rack}.{2 * _link_index(preset, rack, number, index) + 1}/31",
                "gateway": f"10.77.{rack}.{2 * _link_index(preset, rack, number, index)}",
                "switch": f"rtsw{rack}",
            }
            for index in range(preset.rnics_per_host)
        ],
        "faultbed_gpus": [{"name": "gpu0", "kind": "soft"}],
    }


def _rtsw(preset: Preset, rack: int) -> dict[str, Any]:
    host_ports = [
        {
            "netdev": f"host{number}-rxe{index}",
            "mac": _mac(_MacKind.HOST_PORT, rack, number, index),
            "address": f"10.77.{rack}.{2 * _link_index(preset, rack, number, index)}/31",
            "peer": f"host{number}",
            "rnic": f"rxe{index}",
        }
        for number in _host_numbers(preset, rack)
        for index in range(preset.rnics_per_host)
    ]
    uplinks = [
        {"netdev": f"ctsw{ctsw}", "mac": _mac(_MacKind.UPLINK_LOW, 0, rack, ctsw), "peer": f"ctsw{ctsw}"}
        for ctsw in range(1, preset.ctsws + 1)
    ]
    return {
        "faultbed_netns": f"rtsw{rack}",
        "faultbed_asn": 65100 + rack,
        "faultbed_loopback": f"10.78.0.{rack}/32",
        "faultbed_ports": host_ports + uplinks,
    }


def _ctsw(preset: Preset, number: int) -> dict[str, Any]:
    return {
        "faultbed_netns": f"ctsw{number}",
        "faultbed_asn": 65200 + number,
        "faultbed_loopback": f"10.78.0.{100 + number}/32",
        "faultbed_ports": [
            {
                "netdev": f"rtsw{rack}",
                "mac": _mac(_MacKind.UPLINK_HIGH, 0, number, rack),
                "peer": f"rtsw{rack}",
            }
            for rack in range(1, preset.racks + 1)
        ],
    }


def _carrier(preset: Preset) -> dict[str, Any]:
    hosts = preset.racks * preset.hosts_per_rack
    return {
        "faultbed_vm": {"memory_mib": preset.carrier_memory_mib, "vcpus": 1},
        "faultbed_management": {"netdev": "mgmt0", "mac": _mac(_MacKind.MANAGEMENT, 0, 1, 0)},
        "faultbed_front_end_ports": [
            {
                "netdev": f"host{number}-fe0",
                "mac": _mac(_MacKind.FRONT_END_PORT, 0, 0, number),
                "peer": f"host{number}",
            }
            for number in range(1, hosts + 1)
        ],
    }


def _host_numbers(preset: Preset, rack: int) -> range:
    """Numbers of a rack's hosts; hosts are numbered over the whole lab from 1."""
    first = (rack - 1) * preset.hosts_per_rack + 1
    return range(first, first + preset.hosts_per_rack)


def _link_index(preset: Preset, rack: int, number: int, rnic: int) -> int:
    """The i of a rack's i-th host link, from 0."""
    return (number - _host_numbers(preset, rack).start) * preset.rnics_per_host + rnic


def _mac(kind: _MacKind, *tail: int) -> str:
    return "02:fb:" + ":".join(f"{byte:02x}" for byte in (kind, *tail))


if __name__ == "__main__":
    sys.stdout.write(inventory_text(sys.argv[1] if len(sys.argv) > 1 else "soft"))
