"""Kills of a routing scheme's holder, of its controller and of a spine, while numbered packets cross the switch.

python switch_killed.py FOLDER SEED POINTS     prints what happened as JSON; run by `unshare -rn`

The switch is `switch_namespace.make_switch`. Packets are sent into a port of a host, and are awaited at the far ends of
both uplinks: a number that does not arrive was blackholed. What BGP does when a spine dies is done here by `ip`.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from switch_held import Controller, no_rules
from switch_namespace import HOP, P2, P3, SCHEMES, both, ip, make_switch, seen
from switch_packets import SOURCE, frame
from waiting import until, wait_s

MAC = bytes.fromhex("020000000010")
QPNS = 48
EVERY_S = 0.001
WITHIN_S = (0.02, 0.2)
"""A kill falls into the installation of the scheme, or into the changes of BGP that follow it."""
_PSN = 14 + 20 + 8 + 9


class Stream:
    """Packets of 48 queue pairs, one by one, whose PSN is their number."""

    def __init__(self) -> None:
        self.sent = 0
        self.lost: set[int] = set()
        self._tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        self._tap.bind(("h1", 0))
        self._ends = []
        for port in ("far1", "far2"):
            end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
            end.bind((port, 0))
            end.settimeout(0)
            self._ends.append(end)
        self._stops = threading.Event()

    @contextlib.contextmanager
    def flowing(self) -> Iterator[None]:
        """Send while the block lasts; afterwards `sent` and `lost` are of this block."""
        self.sent, self.lost = 0, set()
        self._stops.clear()
        self._arrivals()
        sender = threading.Thread(target=self._send)
        sender.start()
        try:
            yield
        finally:
            self._stops.set()
            sender.join()
            wait_s(0.05)
            self.lost = set(range(self.sent)) - self._arrivals()

    def _send(self) -> None:
        while not self._stops.wait(EVERY_S):
            packet = bytearray(frame(MAC, 17 + self.sent % QPNS, sport=0xC000 + self.sent % QPNS))
            packet[_PSN : _PSN + 3] = self.sent.to_bytes(3, "big")
            self._tap.send(bytes(packet))
            self.sent += 1

    def _arrivals(self) -> set[int]:
        numbers = set()
        for end in self._ends:
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet, address = end.recvfrom(2048)
                    is_roce = address[2] != socket.PACKET_OUTGOING and packet[23] == socket.IPPROTO_UDP
                    if is_roce and struct.unpack("!H", packet[36:38])[0] == 4791:
                        numbers.add(int.from_bytes(packet[_PSN : _PSN + 3], "big"))
        return numbers


def neighbour(port: str) -> None:
    ip(f"neigh replace 169.254.0.1 lladdr 02:00:00:00:00:02 dev {port} nud permanent")


def spine_dies() -> None:
    """Uplink 1 goes down; BGP has one next hop left."""
    ip("link set up1 down")
    ip(f"route replace {P2} metric 20 proto bgp {HOP.format(port='up2')}")


def spine_returns() -> None:
    ip("link set up1 up")
    neighbour("up1")
    both(P2)
    both(P3)


def churn(until_ns: int) -> None:
    """Have BGP withdraw one next hop and announce it again, until a time."""
    while time.monotonic_ns() < until_ns:
        ip(f"route replace {P2} metric 20 proto bgp {HOP.format(port='up2')}")
        wait_s(0.01)
        both(P2)
        wait_s(0.01)


def started(folder: Path, name: str, scheme: str) -> Controller:
    controller = Controller(folder, name)
    answer = controller.prepare(scheme)
    assert answer["event"] == "prepared", answer
    return controller


def rules_of(folder: Path, scheme: str) -> dict:
    """What a whole life of a scheme puts on the switch."""
    controller = started(folder, "reference", scheme)
    controller.request("arm")
    state = seen()
    controller.request("clear")
    controller.end()
    return state


def point(folder: Path, stream: Stream, reference: dict, scheme: str, victim: str, delay_s: float) -> dict:
    """Kill one of the three `delay_s` after the installation was requested.

    `reference` is what the scheme puts on the switch when nothing is killed: it has to be there again when the spine
    has returned, unless the installation was refused because the port went down in it.
    """
    answer: dict = {}
    controller = started(folder, "victim", scheme)
    at_ns = time.monotonic_ns() + round(delay_s * 1e9)
    kill = {"holder": controller.process.kill, "controller": controller.process.stdin.close, "spine": spine_dies}[
        victim
    ]

    def strike() -> None:
        wait_s(max(0, at_ns - time.monotonic_ns()) / 1e9)
        kill()

    with stream.flowing():
        wait_s(0.02)
        striker = threading.Thread(target=strike)
        striker.start()
        with contextlib.suppress(ValueError, OSError):  # the end of a line that was killed
            answer = controller.request("arm")
        if victim == "spine":
            striker.join()
            wait_s(0.05)
            spine_returns()
            if answer["event"] == "armed":
                until(lambda: seen() == reference, within_s=10.0)
        else:
            churn(at_ns)
            striker.join()
            controller.process.wait(timeout=20)
            for stored in folder.glob("victim.revert"):  # PID 1 runs it when the holder was killed
                assert subprocess.run(["sh", str(stored)], check=False).returncode == 0
                stored.unlink()
            until(no_rules)
            both(P2)
        wait_s(0.02)
    if victim == "spine":
        controller.request("clear")
        controller.end()
    left = seen()
    return {
        "scheme": scheme,
        "victim": victim,
        "armed": answer.get("event"),
        "delay_ms": round(delay_s * 1e3),
        "sent": stream.sent,
        "lost": len(stream.lost),
        "left": [left["rules"], left["tables"], left["groups"]],
        "again": rules_of(folder, scheme),
    }


def main() -> None:
    folder, seed, points = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    make_switch()
    ip("link add h0 address 02:00:00:00:00:10 type veth peer name h1")
    for port in ("h0", "h1"):
        ip(f"link set {port} up")
    for port in ("up1", "up2"):
        neighbour(port)
    ip(f"route add {SOURCE}/32 dev h0")
    for name in ("all", "h0", "default"):
        Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").write_text("0")
    Path("/proc/sys/net/ipv4/fib_multipath_hash_policy").write_text("1")
    stream, choice = Stream(), random.Random(seed)
    results: dict = {"reference": {scheme: rules_of(folder, scheme) for scheme in SCHEMES}}
    with stream.flowing():
        wait_s(0.05)
        ip(f"rule add priority 900 to {P2} blackhole")
        wait_s(0.05)
        ip("rule del priority 900")
        wait_s(0.05)
    results["blackholed on purpose"] = len(stream.lost)
    with stream.flowing():
        wait_s(0.02)
        spine_dies()
        wait_s(0.05)
        spine_returns()
        wait_s(0.02)
    results["lost by BGP alone"] = len(stream.lost)
    drawn = [
        (choice.choice(list(SCHEMES)), victim, choice.uniform(0, choice.choice(WITHIN_S)))
        for victim, _ in zip(["holder", "controller", "spine"] * points, range(points), strict=False)
    ]
    results["points"] = [point(folder, stream, results["reference"][one[0]], *one) for one in drawn]
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
