"""The request of each actuator of a rack, and its expected effect."""

from __future__ import annotations

import dataclasses
import itertools

from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventories

RACK = lab_inventory.load(inventories() / "rack-h100.example.yml").topology


def running(*nos):
    """Yield the example rack with each type of switch."""
    names = itertools.cycle(nos)
    return dataclasses.replace(RACK, switches=tuple(dataclasses.replace(x, nos=next(names)) for x in RACK.switches))


LINUX = running("frr")
SAMPLES = {
    "link.down": [("rtsw1:host1:mlx5_0", {}), ("host1:mlx5_0", {})],
    "link.flap": [("rtsw1:host1:mlx5_0", {"period": 2}), ("host1:mlx5_0", {"period": 8})],
    "link.oneway": [("rtsw1:host1:mlx5_0", {}), ("host1:mlx5_0", {"direction": "from"})],
    "link.rate": [("rtsw1:host1:mlx5_0", {"rate": 100}), ("host1:mlx5_0", {"rate": 100})],
    "link.mtu": [("rtsw1:host1:mlx5_0", {}), ("host1:mlx5_0", {"mtu": 1500})],
    "link.fec": [("host1:mlx5_0", {"offset": 40})],
    "congestion.pfc-storm": [("host1:mlx5_0", {})],
    "packet.drop": [("rtsw1:host1:mlx5_0", {"share": 1}), ("host1:mlx5_0", {"share": 1, "direction": "from"})],
    "switch.bgp-kill": [("rtsw1", {})],
    "switch.freeze": [("rtsw1", {})],
    "switch.withdraw": [("rtsw1", {})],
    "switch.hash-policy": [("rtsw1", {})],
    "congestion.late-receives": [("host1", {"late": 200}), ("host1", {})],
    "congestion.background": [("host3:mlx5_0", {"rate": 1000})],
    "host.cpu-steal": [("host1", {"share": 0.5})],
    "host.clock-step": [("host1", {"step": -30})],
    "host.disk-full": [("host1", {})],
    "storage.stall": [("host1", {})],
    "storage.burst": [("host1", {})],
    "host.rank-kill": [("host1", {})],
    "host.rank-hang": [("host1", {})],
    "gpu.throttle": [("host1:gpu0", {"percent": 5})],
    "gpu.power-cap": [("host1:gpu0", {"percent": 30})],
    "gpu.xid": [("host1:gpu0", {})],
    "gpu.ecc": [("host1:gpu0", {"error": "uncontained", "count": 2}), ("host1:gpu0", {"error": "corrected"})],
    "gpu.row-remap": [("host1:gpu0", {}), ("host1:gpu0", {"state": "failed"})],
    "gpu.overheat": [("host1:gpu0", {"celsius": 92})],
    "gpu.noisy-neighbour": [("host1:gpu0", {"neighbours": 2})],
    # Kinds whose soft half is elsewhere: taken without the catalogue.
    "gpu.lost": [("host1:gpu0", {})],
    "rnic.address": [("host1:mlx5_0", {})],
    "rnic.remove": [("host1:mlx5_0", {})],
    "rnic.reset": [("host1:mlx5_0", {})],
}
# At switches that are Linux machines with FRR: the software hop. What can tell of it: a prefix of a counter.
ON_LINUX = {
    "link.down": [("rtsw1:ctsw1", {}, "ctsw1/Ethernet0.carrier_changes")],
    "link.flap": [("rtsw1:ctsw1", {"period": 2}, "ctsw1/Ethernet0.carrier_changes")],
    "link.oneway": [("rtsw1:ctsw1", {}, "host1/mlx5_0.out_of_sequence")],
    "link.rate": [
        ("host1:mlx5_0", {"rate": 5}, "host1/mlx5_0.out_of_sequence"),
        ("rtsw1:ctsw1", {"rate": 5}, "ctsw1/ip.InECT1Pkts"),
    ],
    "link.mtu": [("host1:mlx5_0", {}, "rtsw1/ip.FragFails")],
    "packet.drop": [
        ("host1:mlx5_0", {"share": 0.01}, "host1/mlx5_0.out_of_sequence"),
        ("host1:mlx5_0", {"qp": "any", "psn": "+100"}, "host1/mlx5_0.out_of_sequence"),
        ("host1:mlx5_0", {"share": 0.01, "burst": 5}, "host1/mlx5_0.out_of_sequence"),
    ],
    "packet.mark": [("host1:mlx5_0", {}, "host1/mlx5_0.np_ecn_marked_roce_packets")],
    "packet.corrupt": [("host1:mlx5_0", {"every": 10}, "host1/mlx5_0.out_of_sequence")],
    "packet.forge": [("host1:mlx5_0", {"what": "nak"}, "host1/mlx5_0.local_ack_timeout_err")],
    "packet.delay": [
        ("host1:mlx5_0", {"delay": 5, "direction": "from"}, "rtsw1/ip.InECT1Pkts"),
        ("rtsw1:ctsw1", {"delay": 5}, "ctsw1/ip.InECT1Pkts"),
    ],
    "packet.reorder": [("host1:mlx5_0", {"share": 0.1}, "host1/mlx5_0.out_of_sequence")],
    "packet.duplicate": [("host1:mlx5_0", {}, "host1/mlx5_0.duplicate_request")],
    "data.corrupt": [("host1:mlx5_0", {"every": 50}, "host1/mlx5_0.duplicate_request")],
    "congestion.shallow-queue": [("host1:mlx5_0", {}, "host1/mlx5_0.out_of_sequence")],
    "congestion.hash-collision": [("rtsw1:ctsw1", {}, "rtsw1/Ethernet128.tx_packets")],
    "switch.hash-policy": [("rtsw1", {}, "rtsw1/Ethernet128.tx_packets")],
    "switch.bgp-reset": [("rtsw1", {}, "ctsw1/tcp.ActiveOpens")],
    "switch.withdraw": [("rtsw1", {}, "ctsw1/ip.InNoRoutes")],
    "switch.drain": [("ctsw1", {}, "rtsw1/Ethernet136.tx_packets")],
}
HOPS = [(kind, *case) for kind, each in ON_LINUX.items() for case in each]
CASES = [(kind, target, params) for kind, each in SAMPLES.items() for target, params in each]
