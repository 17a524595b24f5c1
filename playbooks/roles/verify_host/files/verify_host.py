"""Prove that a host is what the inventory says, and that its RNICs reach every RNIC of the other hosts.

Looks at the kernel's state only and believes nothing that provisioning has reported. The ping is bounded by a
deadline; it waits meanwhile for the switches' routes, which come up at their own time.
"""

import os
import sys

from faultbed_state import addresses, answer, ip_json, run

INFINIBAND = "/sys/class/infiniband"
ACTIVE = "4: ACTIVE"
RDMA_MTU = "4096"


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_verify, wanted, check=check)


def _verify(wanted, _changes):
    links = {link["ifname"]: link for link in ip_json("address")}
    front_end = wanted["front_end"]
    wrong = _link(links, front_end["netdev"], front_end["mac"], front_end["address"], None)
    for index, rnic in enumerate(wanted["rnics"]):
        wrong += _link(links, rnic["netdev"], rnic["mac"], rnic["address"], wanted["mtu"])
        wrong += _rdma(rnic)
        wrong += _route(index, rnic)
    for gpu in wanted["gpus"]:
        unit = f"faultbed-{gpu['name']}.service"
        if gpu["kind"] == "soft" and run(["systemctl", "is-active", unit], ok=(0, 3, 4)).strip() != "active":
            wrong.append(f"{unit} is not active")
    pinged = {}
    if not wrong:
        pinged = _ping(wanted)
        wrong += pinged["failed"]
    result = {"pairs": pinged.get("pairs", 0), "slowest_us": pinged.get("slowest_us", 0)}
    if wrong:
        return result | {"failed": True, "msg": "; ".join(wrong)}
    return result


def _link(links, netdev, mac, address, mtu):
    link = links.get(netdev)
    if link is None:
        return [f"there is no interface {netdev}"]
    wrong = []
    if link["address"] != mac:
        wrong.append(f"{netdev} has the MAC {link['address']}, not {mac}")
    if "LOWER_UP" not in link["flags"] or link["operstate"] not in {"UP", "UNKNOWN"}:
        wrong.append(f"{netdev} is {link['operstate']}")
    if addresses(link) != [address]:
        wrong.append(f"{netdev} has the addresses {addresses(link)}, not {address}")
    if mtu is not None and link["mtu"] != mtu:
        wrong.append(f"{netdev} has MTU {link['mtu']}, not {mtu}")
    return wrong


def _rdma(rnic):
    name, port = rnic["name"], f"{INFINIBAND}/{rnic['name']}/ports/1"
    if not os.path.isdir(port):
        return [f"there is no RDMA device {name}"]
    wrong = []
    if (state := _read(f"{port}/state")) != ACTIVE:
        wrong.append(f"{name} is {state}")
    a, b, c, d = (int(part) for part in rnic["address"].partition("/")[0].split("."))
    gid = f"0000:0000:0000:0000:0000:ffff:{a << 8 | b:04x}:{c << 8 | d:04x}"
    if gid not in [_read(f"{port}/gids/{index}") for index in os.listdir(f"{port}/gids")]:
        wrong.append(f"{name} has no GID {gid} (::ffff:{rnic['address'].partition('/')[0]})")
    return wrong


def _read(path):
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _route(index, rnic):
    """The RNIC's own table is used for what it sends: asked of the kernel for an address far away."""
    source = rnic["address"].partition("/")[0]
    found = ip_json("route", "get", "192.0.2.1", "from", source)[0]
    if (found.get("dev"), found.get("gateway")) == (rnic["netdev"], rnic["gateway"]):
        return []
    return [
        f"{rnic['name']} ({source}) would send by {found.get('dev')} to {found.get('gateway')}, table {100 + index}"
    ]


def _ping(wanted):
    sys.path[:0] = [wanted["code"]]
    from traffic.node.rdma_ping import ping

    return ping(
        {
            "run": wanted["run"],
            "host": wanted["host"],
            "address": _bare(wanted["front_end"]["address"]),
            "rnics": [{"name": rnic["name"], "address": _bare(rnic["address"])} for rnic in wanted["rnics"]],
            "peers": [
                {
                    "name": peer["name"],
                    "address": _bare(peer["front_end"]["address"]),
                    "rnics": [{"name": rnic["name"], "address": _bare(rnic["address"])} for rnic in peer["rnics"]],
                }
                for peer in wanted["peers"]
            ],
            "deadline_s": wanted["deadline_s"],
        }
    )


def _bare(address):
    return address.partition("/")[0]
