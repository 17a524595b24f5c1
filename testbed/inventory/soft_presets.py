"""The soft labs that come with faultbed, as Ansible inventories: pure functions from a size to a text.

`python3 -m faultbed.testbed.inventory.soft_presets soft > inventory/soft.yml` writes the file again; a test keeps file
and generator equal. Addresses, MACs and AS numbers are functions of a node's number alone, so that a snapshot, an ECMP
mapping or a captured packet means the same on every machine that runs the preset.

Racks, hosts and switches are numbered over the whole lab, not within their zone.

    back end    rack R, link i     switch 10.77.R.(2i)/31, host 10.77.R.(2i+1)/31   (/31: RFC 3021)
    front end   host n             10.79.0.n/24
    loopback    rtsw, ctsw, atsw n 10.78.0.n/32, 10.78.0.(100+n)/32, 10.78.0.(200+n)/32
    ASN         rtsw n             65100+n; all CTSWs of zone z 65200+z, all ATSWs 65300 (RFC 7938, 5.2.1)
    MAC         02:fb:KK:XX:YY:ZZ  locally administered; KK is the kind of port (`_MacKind`)

QEMU's user network owns 10.0.2.0/24, so no preset may use it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import yaml

from faultbed.testbed.errors import UsageError

__all__ = ["PRESETS", "Preset", "inventory_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The size of a soft lab. Every rack has one RTSW, every host one soft GPU.

    `racks` and `ctsws` are those of a zone. Every RTSW has one uplink to every CTSW of its zone, every CTSW one to
    every ATSW. `rates` are lab-wide variables: rate_scale and tiers (`faultbed.testbed.inventory.rates`).
    """

    name: str
    summary: str
    racks: int
    hosts_per_rack: int
    rnics_per_host: int
    ctsws: int
    zones: int = 1
    atsws: int = 0
    host_memory_mib: int = 512
    carrier_memory_mib: int = 512
    rates: Mapping[str, Any] = field(default_factory=dict)

    @property
    def all_racks(self) -> range:
        """Numbers of all racks."""
        return range(1, self.zones * self.racks + 1)

    @property
    def all_ctsws(self) -> range:
        """Numbers of all CTSWs."""
        return range(1, self.zones * self.ctsws + 1)

    def zone_of_rack(self, rack: int) -> int:
        """Return the number of a rack's zone."""
        return (rack - 1) // self.racks + 1

    def racks_of(self, ctsw: int) -> range:
        """Return the numbers of the racks in a CTSW's zone."""
        first = (ctsw - 1) // self.ctsws * self.racks + 1
        return range(first, first + self.racks)

    def ctsws_of(self, rack: int) -> range:
        """Return the numbers of the CTSWs in a rack's zone."""
        first = (rack - 1) // self.racks * self.ctsws + 1
        return range(first, first + self.ctsws)


_ZONES = Preset(
    name="soft-zones",
    summary="two zones of two racks, tapered 2.8 to 1 above the zones; links have rates, distance has delay",
    zones=2,
    racks=2,
    hosts_per_rack=1,
    rnics_per_host=2,
    ctsws=2,
    atsws=2,
    carrier_memory_mib=768,
    rates={
        "rate_scale": 64000,
        "tiers": {
            "host": {"speed_gbps": 400},
            "rtsw": {"taper": 1, "delay_us": 100},
            "ctsw": {"taper": 2.8, "delay_us": 500},
        },
    },
)
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
        Preset(
            name="soft-tapered",
            summary="three racks of two hosts, whose uplinks carry half of what the hosts send: a collision costs time",
            racks=3,
            hosts_per_rack=2,
            rnics_per_host=1,
            ctsws=2,
            rates={"rate_scale": 100000, "tiers": {"host": {"speed_gbps": 400}, "rtsw": {"taper": 2}}},
        ),
        _ZONES,
        dataclasses.replace(
            _ZONES,
            name="soft-zones-8",
            summary="as soft-zones, with two hosts a rack: eight hosts; half its rates, so that two cores carry them",
            hosts_per_rack=2,
            rates={**_ZONES.rates, "rate_scale": 128000},
        ),
    )
}

_CARRIER = "fabric"
_HEAD = """\
# {name}: {summary}.
# Written by `python3 -m faultbed.testbed.inventory.soft_presets {name}`; change the preset, not this file.
#
# This is an Ansible inventory and the single source of truth of the lab: the VMs, their wires, the roles in
# playbooks/ and the topology model are all made from it. `ansible-inventory -i inventory/{name}.yml --list` shows it.
#
# Where a node answers is not written here, because the ports of a soft lab are chosen when it starts. A running lab
# keeps a second inventory in its state directory with ansible_host (127.0.0.1), ansible_port, ansible_user,
# ansible_ssh_private_key_file and ansible_ssh_common_args (StrictHostKeyChecking=yes and the lab's own known hosts)
# for each machine, and both are given to Ansible: `-i inventory/{name}.yml -i STATE/<runtime inventory>`.
#
# Groups: hosts; switches ({roles}); carriers (VMs that carry switches as network namespaces); racks.
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
    ZONE_UPLINK_LOW = 7
    ZONE_UPLINK_HIGH = 8


def inventory_text(name: str) -> str:
    """Return the inventory of a preset as YAML with its head comment.

    Raises:
        UsageError: there is no such preset.
    """
    if name not in PRESETS:
        raise UsageError(f'no preset "{name}": there are {", ".join(PRESETS)}')
    preset = PRESETS[name]
    body = yaml.safe_dump(_tree(preset), sort_keys=False, default_flow_style=None, width=160)
    roles = "rtsw, ctsw, atsw" if preset.atsws else "rtsw, ctsw"
    return _HEAD.format(name=preset.name, summary=preset.summary, roles=roles) + body


def _tree(preset: Preset) -> dict[str, Any]:
    return {
        "all": {
            "vars": {
                "faultbed_schema": 1,
                "faultbed_name": preset.name,
                "faultbed_kind": "soft",
                # 4096 bytes of RDMA payload plus the RoCEv2 headers (InfiniBand annex A17) with room to spare
                "faultbed_mtu": 4200,
                "faultbed_ecmp_hash_seed": 12345,
                **{f"faultbed_{name}": value for name, value in preset.rates.items()},
            },
            "children": {
                "racks": {"children": {f"rack{rack}": _rack(preset, rack) for rack in preset.all_racks}},
                "hosts": {
                    "vars": {"faultbed_vm": {"memory_mib": preset.host_memory_mib, "vcpus": 1}},
                    "hosts": {
                        f"host{number}": _host(preset, rack, number)
                        for rack in preset.all_racks
                        for number in _host_numbers(preset, rack)
                    },
                },
                "switches": {"vars": {"faultbed_carrier": _CARRIER}, "children": _switches(preset)},
                "carriers": {"hosts": {_CARRIER: _carrier(preset)}},
            },
        }
    }


def _switches(preset: Preset) -> dict[str, Any]:
    """Return the groups of switches. Aggregation switches are above the zones, and belong to the first one."""
    ctsws: dict[str, Any] = {f"ctsw{number}": _ctsw(preset, number) for number in preset.all_ctsws}
    if preset.zones > 1:
        zones = {
            f"ctsw{number}": f"zone{preset.zone_of_rack(preset.racks_of(number)[0])}" for number in preset.all_ctsws
        }
        ctsw: dict[str, Any] = {
            "hosts": {name: {"faultbed_zone": zones[name]} | variables for name, variables in ctsws.items()}
        }
    else:
        ctsw = {"vars": {"faultbed_zone": "zone1"}, "hosts": ctsws}
    groups = {"rtsw": {"hosts": {f"rtsw{rack}": _rtsw(preset, rack) for rack in preset.all_racks}}, "ctsw": ctsw}
    if preset.atsws:
        atsws = {f"atsw{number}": _atsw(preset, number) for number in range(1, preset.atsws + 1)}
        groups["atsw"] = {"vars": {"faultbed_zone": "zone1"}, "hosts": atsws}
    return groups


def _rack(preset: Preset, rack: int) -> dict[str, Any]:
    members = [*(f"host{number}" for number in _host_numbers(preset, rack)), f"rtsw{rack}"]
    return {
        "vars": {"faultbed_zone": f"zone{preset.zone_of_rack(rack)}", "faultbed_rack": f"rack{rack}"},
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
        for ctsw in preset.ctsws_of(rack)
    ]
    return {
        "faultbed_netns": f"rtsw{rack}",
        "faultbed_asn": 65100 + rack,
        "faultbed_loopback": f"10.78.0.{rack}/32",
        "faultbed_ports": host_ports + uplinks,
    }


def _ctsw(preset: Preset, number: int) -> dict[str, Any]:
    down = [
        {"netdev": f"rtsw{rack}", "mac": _mac(_MacKind.UPLINK_HIGH, 0, number, rack), "peer": f"rtsw{rack}"}
        for rack in preset.racks_of(number)
    ]
    up = [
        {"netdev": f"atsw{atsw}", "mac": _mac(_MacKind.ZONE_UPLINK_LOW, 0, number, atsw), "peer": f"atsw{atsw}"}
        for atsw in range(1, preset.atsws + 1)
    ]
    return {
        "faultbed_netns": f"ctsw{number}",
        "faultbed_asn": 65200 + preset.zone_of_rack(preset.racks_of(number)[0]),
        "faultbed_loopback": f"10.78.0.{100 + number}/32",
        "faultbed_ports": down + up,
    }


def _atsw(preset: Preset, number: int) -> dict[str, Any]:
    return {
        "faultbed_netns": f"atsw{number}",
        "faultbed_asn": 65300,
        "faultbed_loopback": f"10.78.0.{200 + number}/32",
        "faultbed_ports": [
            {"netdev": f"ctsw{ctsw}", "mac": _mac(_MacKind.ZONE_UPLINK_HIGH, 0, number, ctsw), "peer": f"ctsw{ctsw}"}
            for ctsw in preset.all_ctsws
        ],
    }


def _carrier(preset: Preset) -> dict[str, Any]:
    hosts = preset.zones * preset.racks * preset.hosts_per_rack
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
    """Return the numbers of a rack's hosts. Hosts are numbered over the whole lab from 1."""
    first = (rack - 1) * preset.hosts_per_rack + 1
    return range(first, first + preset.hosts_per_rack)


def _link_index(preset: Preset, rack: int, number: int, rnic: int) -> int:
    """Return the number of a host link in its rack, from 0."""
    return (number - _host_numbers(preset, rack).start) * preset.rnics_per_host + rnic


def _mac(kind: _MacKind, *tail: int) -> str:
    return "02:fb:" + ":".join(f"{byte:02x}" for byte in (kind, *tail))


if __name__ == "__main__":
    sys.stdout.write(inventory_text(sys.argv[1] if len(sys.argv) > 1 else "soft"))
