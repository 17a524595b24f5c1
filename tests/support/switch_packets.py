"""RoCEv2 packets through a switch under each scheme, in a network namespace: which uplink carries which queue pair.

python switch_packets.py     prints packets of each uplink as JSON; run by `unshare -rn`
"""

from __future__ import annotations

import json
import shutil
import socket
import struct
import sys
from pathlib import Path

from switch_namespace import P2, both, ip, make_switch

from faultbed.testbed.node.routing.agent import SwitchAgent
from faultbed.testbed.routing.schemes import SCHEMES, Routing
from faultbed.testbed.routing.switch_tables import SchemeTables, SwitchTables

QPNS = range(17, 65)
SOURCE, TARGET = "10.77.1.1", "10.77.2.1"
HOPS = {P2: ("up1", "up2")}


def checksum(header: bytes) -> int:
    total = sum(struct.unpack(f"!{len(header) // 2}H", header))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


def frame(mac: bytes, qpn: int, sport: int = 0xC000) -> bytes:
    """Return an Ethernet frame with the headers of an RC write to a queue pair."""
    bth = struct.pack("!BBHII", 0x0A, 0, 0xFFFF, qpn, 0) + bytes(20)
    udp = struct.pack("!HHHH", sport, 4791, 8 + len(bth), 0)
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(udp + bth), 1, 0, 64, 17, 0,
                       socket.inet_aton(SOURCE), socket.inet_aton(TARGET))  # fmt: skip
    head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
    return mac + b"\2\0\0\0\0\1" + b"\x08\0" + head + udp + bth


def sent(port: str) -> int:
    lines = dict(line.split(":") for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line)
    return int(next(rest for name, rest in lines.items() if name.strip() == port).split()[9])


def main() -> None:
    make_switch()
    ip("link add h0 address 02:00:00:00:00:10 type veth peer name h1")
    for port in ("h0", "h1"):
        ip(f"link set {port} up")
    for port in ("up1", "up2"):
        ip(f"neigh add 169.254.0.1 lladdr 02:00:00:00:00:02 dev {port} nud permanent")
    ip(f"route add {SOURCE}/32 dev h0")
    for name in ("all", "h0", "default"):
        Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").write_text("0")
    Path("/proc/sys/net/ipv4/fib_multipath_hash_policy").write_text("1")
    mac = bytes.fromhex("020000000010")
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    tap.bind(("h1", 0))

    def carried(frames: list[bytes]) -> dict[str, int]:
        before = {port: sent(port) for port in ("up1", "up2")}
        for one in frames:
            tap.send(one)
        return {port: sent(port) - count for port, count in before.items()}

    def under(scheme: str, **tables) -> SwitchAgent:
        planned = SchemeTables(
            scheme=SCHEMES[scheme], routing=Routing(seed=7), switches={"s": SwitchTables(hops=HOPS, **tables)}
        )
        agent = SwitchAgent(planned.request("s", None))
        agent.apply()
        return agent

    each = [frame(mac, qpn) for qpn in QPNS]
    results: dict = {"bgp": carried(each)}
    agent = under("pinned", static={P2: "up2"})
    results["pinned"] = carried(each)
    ip("link set up2 down")
    results["pinned, its uplink down"] = carried(each)
    ip("link set up2 up")
    ip("neigh replace 169.254.0.1 lladdr 02:00:00:00:00:02 dev up2 nud permanent")
    both(P2)
    agent.remove()
    agent.close()
    if shutil.which("nft"):
        agent = under("spray")
        results["spray"] = carried(each)
        agent.remove()
        agent = under("e-ecmp")
        packets = {qpn: carried([frame(mac, qpn)]) for qpn in QPNS}
        results["e-ecmp"] = {qpn: next(port for port, count in one.items() if count) for qpn, one in packets.items()}
        agent.remove()
    results["after"] = carried(each)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
