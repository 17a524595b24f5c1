"""Verify that a host is configured as the inventory says and that its RNICs reach every RNIC of the other hosts.

The check reads the kernel's state and does not rely on what provisioning has reported. The RDMA ping has a deadline,
within which it waits for the switches' routes to converge.
"""

import os
import sys

from faultbed_state import FIRST_TABLE, addresses, answer, ip_json, run

INFINIBAND = "/sys/class/infiniband"
ACTIVE = "4: ACTIVE"
REMOTE_ADDRESS = "192.0.2.1"  # reserved for documentation (RFC 5737): no lab has it, so the default route applies


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_verify, desired, check=check)


def _verify(desired, _changes):
    links = {link["ifname"]: link for link in ip_json("address")}
    front_end = desired["front_end"]
    problems = _link_problems(links, front_end["netdev"], front_end["mac"], front_end["address"], None)
    for index, rnic in enumerate(desired["rnics"]):
        problems += _link_problems(links, rnic["netdev"], rnic["mac"], rnic["address"], desired["mtu"])
        problems += _rdma_problems(rnic)
        problems += _route_problems(index, rnic)
    for gpu in desired["gpus"]:
        unit = f"faultbed-{gpu['name']}.service"
        if gpu["kind"] == "soft" and run(["systemctl", "is-active", unit], ok=(0, 3, 4)).strip() != "active":
            problems.append(f"{unit} is not active")
    pings = {}
    if not problems:
        pings = _ping(desired)
        problems += pings["failed"]
    result = {"pairs": pings.get("pairs", 0), "slowest_us": pings.get("slowest_us", 0)}
    if problems:
        return result | {"failed": True, "msg": "; ".join(problems)}
    return result


def _link_problems(links, netdev, mac, address, mtu):
    """Return the deviations of an interface from its desired state; `mtu` None: any MTU is accepted."""
    link = links.get(netdev)
    if link is None:
        return [f"{netdev}: no such interface"]
    problems = []
    if link["address"] != mac:
        problems.append(f"{netdev} has the MAC {link['address']}, not {mac}")
    if "LOWER_UP" not in link["flags"] or link["operstate"] not in {"UP", "UNKNOWN"}:
        problems.append(f"{netdev} is {link['operstate']}")
    if addresses(link) != [address]:
        problems.append(f"{netdev} has the addresses {addresses(link)}, not {address}")
    if mtu is not None and link["mtu"] != mtu:
        problems.append(f"{netdev} has MTU {link['mtu']}, not {mtu}")
    return problems


def _rdma_problems(rnic):
    """Return the deviations of an RNIC's RDMA device: missing, port not active, or no GID of its IPv4 address."""
    name, port = rnic["name"], f"{INFINIBAND}/{rnic['name']}/ports/1"
    if not os.path.isdir(port):
        return [f"{name}: no such RDMA device"]
    problems = []
    if (state := _read(f"{port}/state")) != ACTIVE:
        problems.append(f"{name} is {state}")
    address = _without_prefix(rnic["address"])
    a, b, c, d = (int(part) for part in address.split("."))
    gid = f"0000:0000:0000:0000:0000:ffff:{a << 8 | b:04x}:{c << 8 | d:04x}"
    if gid not in [_read(f"{port}/gids/{index}") for index in os.listdir(f"{port}/gids")]:
        problems.append(f"{name} has no GID {gid} (::ffff:{address})")
    return problems


def _read(path):
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _route_problems(index, rnic):
    """Return a problem if packets from an RNIC's address do not leave by the RNIC's own interface and gateway."""
    source = _without_prefix(rnic["address"])
    route = ip_json("route", "get", REMOTE_ADDRESS, "from", source)[0]
    if (route.get("dev"), route.get("gateway")) == (rnic["netdev"], rnic["gateway"]):
        return []
    actual = f"{rnic['name']} ({source}) sends through {route.get('dev')} to {route.get('gateway')}"
    return [f"{actual}, not by table {FIRST_TABLE + index} through {rnic['netdev']} to {rnic['gateway']}"]


def _ping(desired):
    """Ping every RNIC of the other hosts by RDMA; the answer is described in traffic/node/rdma_ping.py."""
    sys.path[:0] = [desired["code"]]
    from faultbed.traffic.node.rdma_ping import ping

    return ping(
        {
            "run": desired["run"],
            "host": desired["host"],
            "address": _without_prefix(desired["front_end"]["address"]),
            "rnics": _ping_rnics(desired["rnics"]),
            "peers": [
                {
                    "name": peer["name"],
                    "address": _without_prefix(peer["front_end"]["address"]),
                    "rnics": _ping_rnics(peer["rnics"]),
                }
                for peer in desired["peers"]
            ],
            "deadline_s": desired["deadline_s"],
        }
    )


def _ping_rnics(rnics):
    return [{"name": rnic["name"], "address": _without_prefix(rnic["address"])} for rnic in rnics]


def _without_prefix(address):
    """Return an address without its prefix length."""
    return address.partition("/")[0]
