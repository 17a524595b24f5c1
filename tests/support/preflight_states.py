"""States of a lab as preflight reads them: healthy, and with each fault planted."""

import dataclasses
import ipaddress
import json

from faultbed.testbed import shipped
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.node.gpu import health
from faultbed.testbed.preflight.checks import expected_next_hops
from faultbed.testbed.preflight.collect import Facts, Interface

INVENTORY = inventory_module.load(shipped.inventories() / "soft.yml")


def healthy(inventory=INVENTORY):
    """Return the facts of a lab that matches its inventory."""
    topology, state = inventory.topology, {}
    for name in (*inventory.machines, *topology.switch_by_name):
        facts = state[name] = Facts()
        if name in inventory.machines:
            facts.wall_s = 1000.0
        for link in topology.links_of(name):
            port = link.end(name)
            facts.interfaces[port.netdev] = Interface(
                up=True, carrier=True, mtu=port.mtu, mac=port.mac,
                addresses=frozenset([port.address] if port.address else []), queue="pfifo",
                shape=inventory.shapes.get(name, {}).get(port.netdev),
            )  # fmt: skip
    for host in topology.hosts:
        facts = state[host.name]
        facts.interfaces[host.front_end_netdev] = Interface(
            up=True, carrier=True, mtu=1500, mac=host.front_end_mac, addresses=frozenset(), queue="fq_codel"
        )
        for rnic in host.rnics:
            facts.rdma[rnic.name] = ("ACTIVE", rnic.netdev)
            facts.gids[rnic.name] = {ipaddress.IPv6Address(f"::ffff:{rnic.ip}").exploded}
            gateway = topology.rnic_link(host.name, rnic.name).a.address.partition("/")[0]
            facts.route_by_source[rnic.ip] = (rnic.netdev, gateway)
        facts.raw["gpu"] = json.dumps(health.look([gpu.name for gpu in host.gpus]))
        for gpu in host.gpus:
            facts.units[f"faultbed-{gpu.name}.service"] = "active"
            facts.units["faultbed-nodeup.service"] = "active"
            facts.cpu_max[f"faultbed-{gpu.name}.service"] = "max 100000"
    for switch in topology.switches:
        facts = state[switch.name]
        facts.sysctls = {
            "net.ipv4.ip_forward": "1",
            "net.ipv4.fib_multipath_hash_policy": "1",
            "net.ipv4.fib_multipath_hash_seed": str(inventory.hash_seed(switch.name)),
        }
        facts.next_hops = expected_next_hops(topology, switch.name)
        facts.sessions = {
            link.end(switch.name).netdev: "Established" for link in topology.links_of(switch.name) if link.is_uplink
        }
    return state


def _make_gid_v1(state):
    facts = state["host3"]
    (gid,) = facts.gids.pop("rxe0")
    facts.gid_entries["rxe0", "1", "2"] = gid


def interface(node, netdev, **changes):
    def plant(state):
        result = state[node].interfaces
        result[netdev] = dataclasses.replace(result[netdev], **changes)

    return plant


PLANTED = {
    "port down": (interface("rtsw1", "ctsw1", up=False), "link", "rtsw1:ctsw1"),
    "no carrier": (interface("host1", "be0", carrier=False), "link", "host1:be0"),
    "port gone": (lambda s: s["rtsw1"].interfaces.pop("ctsw1"), "link", "rtsw1:ctsw1"),
    "front end down": (interface("host2", "fe0", carrier=False), "link", "host2:fe0"),
    "other machine": (interface("host1", "be0", mac="02:00:00:00:00:01"), "mac", "host1:be0"),
    "wrong MTU on one port": (interface("rtsw1", "host1-rxe0", mtu=1500), "mtu", "rtsw1:host1-rxe0"),
    "wrong MTU on an uplink": (interface("ctsw2", "rtsw2", mtu=9000), "mtu", "ctsw2:rtsw2"),
    "address gone": (interface("host3", "be1", addresses=frozenset()), "address", "host3:be1"),
    "RNIC down": (lambda s: s["host1"].rdma.update(rxe0=("DOWN", "be0")), "rdma", "host1:rxe0"),
    "RNIC on another netdev": (lambda s: s["host1"].rdma.update(rxe0=("ACTIVE", "be1")), "rdma", "host1:rxe0"),
    "GID of RoCE v1 alone": (_make_gid_v1, "gid", "host3:rxe0"),
    "missing GID": (lambda s: s["host4"].gids.update(rxe1=set()), "gid", "host4:rxe1"),
    "slow link": (interface("rtsw2", "host3-rxe0", queue="tbf"), "queue", "rtsw2:host3-rxe0"),
    "wrong hash policy": (
        lambda s: s["rtsw1"].sysctls.update({"net.ipv4.fib_multipath_hash_policy": "0"}), "hash", "rtsw1",
    ),
    "wrong hash seed": (
        lambda s: s["ctsw1"].sysctls.update({"net.ipv4.fib_multipath_hash_seed": "1"}), "hash", "ctsw1",
    ),
    "wrong route": (
        lambda s: s["host1"].route_by_source.update({"10.77.1.1": ("be1", "10.77.1.2")}),
        "route", "host1:rxe0 (10.77.1.1)",
    ),
    "session down": (lambda s: s["rtsw1"].sessions.update(ctsw1="Active"), "bgp", "rtsw1:ctsw1"),
    "one next hop of two": (lambda s: s["rtsw1"].next_hops.update({"10.77.2.0/31": 1}), "ecmp", "rtsw1"),
    "clock skew": (lambda s: setattr(s["host2"], "offset_s", -600.0), "clock", "host2"),
    "stored revert": (lambda s: s["fabric"].reverts.append("link.flap-1.json"), "leftovers", "fabric"),
    "fault's unit": (lambda s: s["host1"].units.update({"faultbed-fault-x.service": "failed"}), "leftovers", "host1"),
    "nft table": (lambda s: s["rtsw1"].nft_tables.append("netdev faultbed"), "leftovers", "rtsw1"),
    "GPU throttled": (
        lambda s: s["host1"].cpu_max.update({"faultbed-gpu0.service": "50000 100000"}), "soft-gpu", "host1:gpu0",
    ),
    "GPU dead": (lambda s: s["host1"].units.update({"faultbed-gpu0.service": "failed"}), "soft-gpu", "host1:gpu0"),
}  # fmt: skip
