"""The lab of three racks as network namespaces with real kernels, and the controller of te on it.

python placed_fabric.py                 prints as JSON what links carried under each scheme, what rule updates lost, and
                                        how long the backdoor takes; run by `unshare -rnm`
python placed_fabric.py CYCLE_S PHASE_S  the same without backdoor

Stand-ins: BGP's routes are static, with BGP's protocol; the agents run in this process instead of a holder's.
"""

from __future__ import annotations

import ctypes
import ipaddress
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.live.routing.flow_controller import FlowController
from faultbed.harness.live.routing.routing_probes import query_decisions
from faultbed.inject.journal import Journal
from faultbed.inject.node.network.scheme import SchemeActuator
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.node import netns
from faultbed.testbed.node.next_hops import decisions
from faultbed.testbed.node.routing.routing_state import read_switch
from faultbed.testbed.observe.telemetry import Change
from faultbed.testbed.routing.schemes import Routing
from faultbed.testbed.routing.switch_tables import scheme_tables
from faultbed.testbed.routing.valley_free import ValleyFreePaths
from faultbed.testbed.shipped import inventory_named

if sys.version_info < (3, 12):  # the lab's machines have a newer one
    os.CLONE_NEWNET = 0x40000000
    os.setns = lambda fd, nstype=0: ctypes.CDLL(None).setns(fd, nstype)
    netns.sys = SimpleNamespace(version_info=(3, 12))

TOPOLOGY = lab_inventory.load(inventory_named("soft-3rack")).topology
ROCE, PACKETS, MOVES = 4791, 300, 100
COLLIDING = {("host1:rxe0", "host3"): 1.0, ("host2:rxe0", "host4"): 1.0}
ODD_EVEN = {(f"host{a}:rxe0", f"host{b}"): 1.0 for a, b in itertools.permutations((1, 2, 3, 5), 2)}


def address(rnic: str) -> str:
    host, _, name = rnic.partition(":")
    return next(one.ip for one in TOPOLOGY.host_by_name[host].rnics if one.name == name)


def run(lines: list[str]) -> None:
    """Run lines of ip(8), those of one namespace (`-n NAME`) together."""
    by_namespace: dict[str, list[str]] = {}
    for line in lines:
        first, _, rest = line.partition(" ")
        name, _, rest = rest.partition(" ") if first == "-n" else ("", "", line)
        by_namespace.setdefault(name, []).append(rest)
    for name, batch in by_namespace.items():
        argv = ["ip", *(["-n", name] if name else []), "-batch", "-"]
        done = subprocess.run(argv, input="\n".join(batch), text=True, capture_output=True, check=False)
        assert done.returncode == 0, (name, done.stderr, batch)


def make_fabric() -> None:
    """Make a namespace for each node, a veth pair for each link, and each switch's routes."""
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    names = [*TOPOLOGY.host_by_name, *TOPOLOGY.switch_by_name]
    run([f"netns add {name}" for name in names])
    for name in names:
        netns.enter(name)
        # A switch without interfaces of its own still answers; policy 1 hashes ports, as the lab's switches do.
        for setting, value in (("ip_forward", "1"), ("fib_multipath_hash_policy", "1"), ("conf/all/rp_filter", "0")):
            Path(f"/proc/sys/net/ipv4/{setting}").write_text(value)
        netns.enter(None)
    lines = [f"-n {name} link set lo up" for name in names]
    plug = []
    for link in TOPOLOGY.links:
        a, b = link.a, link.b
        plug.append(f"link add {a.netdev} netns {a.node} type veth peer name {b.netdev} netns {b.node}")
        lines += [f"-n {a.node} link set {a.netdev} up", f"-n {b.node} link set {b.netdev} up"]
    for host in TOPOLOGY.hosts:
        for rnic in host.rnics:
            link = TOPOLOGY.rnic_link(host.name, rnic.name)
            interface = ipaddress.ip_interface(rnic.address)
            gateway = next(one for one in interface.network if one != interface.ip)
            lines += [
                f"-n {host.name} address add {rnic.address} dev {link.b.netdev}",
                f"-n {link.a.node} address add {gateway}/31 dev {link.a.netdev}",
                f"-n {host.name} route replace default via {gateway} metric {int(rnic.name[-1]) + 1}",
            ]
    run(plug)
    run(lines)
    paths = ValleyFreePaths(TOPOLOGY)
    macs = {}
    for name in TOPOLOGY.switch_by_name:
        shown = subprocess.run(["ip", "-n", name, "-j", "link"], capture_output=True, text=True, check=True).stdout
        macs |= {(name, one["ifname"]): one.get("address", "") for one in json.loads(shown)}
    routes = []
    for link in TOPOLOGY.uplinks:
        for near, far in ((link.a, link.b), (link.b, link.a)):
            mac = macs[far.node, far.netdev]
            routes.append(f"-n {near.node} neigh replace 169.254.0.1 lladdr {mac} dev {near.netdev} nud permanent")
    for switch in TOPOLOGY.switches:
        for host in TOPOLOGY.hosts:
            for rnic in host.rnics:
                hops = paths.next_hops(switch.name, TOPOLOGY.rnic_link(host.name, rnic.name).a.node)
                words = " ".join(f"nexthop via 169.254.0.1 dev {hop.end(switch.name).netdev} onlink" for hop in hops)
                prefix = ipaddress.ip_interface(rnic.address).network
                routes += [f"-n {switch.name} route replace {prefix} metric 20 proto bgp {words}"] if hops else []
    run(routes)


class Lab:
    """What the controller needs of a lab, answered by the code that runs on a lab's switches."""

    def __init__(self) -> None:
        self.topology, self.name, self.scheme = TOPOLOGY, "namespaces", None

    def carrier(self, _name: str) -> Any:
        return SimpleNamespace(name="fabric")

    def carried(self, nodes: Any) -> dict[str, dict[str, str]]:
        return {"fabric": {node: node for node in nodes}}

    def request(self, _machine: str, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "routing":
            return {"nodes": {node: read_switch(node) for node in request["nodes"]}, "held": []}
        return {"decisions": {node: decisions(name, flows) for node, (name, flows) in request["flows"].items()}}


class Lease:
    """The holder's actuator in this process."""

    def __init__(self, tables: Any) -> None:
        self.names, self.tables = [*tables.switches], tables

    def apply(self) -> None:
        self.actuator = SchemeActuator(switches=[self.tables.request(name, name) for name in self.names])
        self.actuator.prepare()
        self.actuator.on()

    def update(self, tables: Any) -> None:
        self.actuator.update(rules=[[list(rule) for rule in tables.rules(name)] for name in self.names])

    def release(self) -> None:
        self.actuator.off()
        self.actuator.close()


def sender(node: str, source: str, sport: int) -> socket.socket:
    netns.enter(node)
    try:
        out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    finally:
        netns.enter(None)
    out.bind((source, sport))
    return out


def sent_up(switch: str) -> dict[str, int]:
    """Return the packets that a rack switch has sent by each uplink."""
    shown = subprocess.run(["ip", "-n", switch, "-s", "-j", "link"], capture_output=True, text=True, check=True).stdout
    ports = {link.a.netdev for link in TOPOLOGY.uplinks if link.a.node == switch}
    return {one["ifname"]: one["stats64"]["tx"]["packets"] for one in json.loads(shown) if one["ifname"] in ports}


def mmr(switch: str, demands: dict[Any, float], sports: dict[Any, int]) -> float:
    """Send equal packets of each key, and return the maximum over the mean of what the uplinks carried."""
    before = sent_up(switch)
    for source, host in demands:
        out = sender(source.partition(":")[0], address(source), sports.get((source, host), 50000))
        for _ in range(PACKETS):
            out.sendto(b"x" * 64, (address(f"{host}:rxe0"), ROCE))
        out.close()
    counts = [after - before[port] for port, after in sent_up(switch).items()]
    assert sum(counts) >= PACKETS, counts
    return max(counts) * len(counts) / sum(counts)


def colliding_ports() -> dict[Any, int]:
    """Return source ports by which BGP's ECMP sends both keys of `COLLIDING` over one uplink."""
    chosen = {}
    for source, host in COLLIDING:
        port = TOPOLOGY.rnic_link(*source.split(":")).a.netdev
        flows = [[address(source), address(f"{host}:rxe0"), port, sport, ROCE] for sport in range(50000, 50064)]
        answers = decisions("rtsw1", flows)
        chosen[source, host] = next(flow[3] for flow, (out, _) in zip(flows, answers, strict=True) if out == "ctsw1")
    return chosen


def controller_on(lab: Lab, journal: Journal, demands: dict[Any, float], **words: Any) -> tuple[FlowController, Lease]:
    tables = scheme_tables(TOPOLOGY, "te", Routing())
    lease = Lease(tables)
    lease.apply()
    controller = FlowController(lab, Fabric(routing="te", **words), tables, [lease], journal, demands)
    controller.place("start")
    return controller, lease


def rules() -> dict[str, str]:
    """Return the text of each rack switch's rules, in an order that does not depend on history."""
    shown = {
        name: subprocess.run(["ip", "-n", name, "rule"], capture_output=True, text=True, check=True).stdout
        for name in TOPOLOGY.switch_by_name
    }
    return {name: "\n".join(sorted(text.splitlines())) for name, text in shown.items()}


def moved_under_load(lease: Lease) -> dict[str, int]:
    """Move both keys `MOVES` times while numbered packets of them arrive; return what was lost or out of order."""
    tables = [
        scheme_tables(TOPOLOGY, "te", Routing(uplinks=dict(zip(COLLIDING, names, strict=True))))
        for names in itertools.permutations(("rtsw1:ctsw1", "rtsw1:ctsw2"))
    ]
    netns.enter("host3")
    inward = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    netns.enter(None)
    inward.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    inward.bind((address("host3:rxe0"), ROCE))
    inward.settimeout(0.5)
    numbers: list[int] = []
    is_over = threading.Event()

    def receive() -> None:
        while True:
            try:
                numbers.append(int.from_bytes(inward.recv(64), "big"))
            except TimeoutError:
                if is_over.is_set():
                    return

    receiver = threading.Thread(target=receive)
    receiver.start()
    out, count = sender("host1", address("host1:rxe0"), 50001), 0
    changes = threading.Thread(target=lambda: [lease.update(tables[at % 2]) for at in range(MOVES)])
    changes.start()
    while changes.is_alive() or count < MOVES:
        out.sendto(count.to_bytes(8, "big"), (address("host3:rxe0"), ROCE))
        count += 1
        if count - len(numbers) > 200:  # the receiver's buffer is not what is tested
            time.sleep(0.001)
    changes.join()
    is_over.set()
    receiver.join()
    behind = sum(later < earlier for earlier, later in itertools.pairwise(numbers))
    return {"sent": count, "lost": count - len(set(numbers)), "out_of_order": behind}


def rebalanced_s(controller: FlowController, lease: Lease, phase_s: float) -> float:
    """Cut an uplink, and return how long it takes until the rules are those of the links that are left.

    `phase_s`: how long after the begin of a cycle it is cut.
    """
    monitor = subprocess.Popen(["ip", "-n", "rtsw1", "monitor", "link"], stdout=subprocess.PIPE, text=True)

    def push() -> None:
        for _ in monitor.stdout or ():
            controller.on_change(Change(at_ns=time.monotonic_ns(), node="rtsw1", subject="link ctsw1", text="DOWN"))

    threading.Thread(target=push, daemon=True).start()
    controller.start()
    time.sleep(phase_s)
    count = len(controller.record().placements)
    begin = time.monotonic()
    run(["-n rtsw1 link set ctsw1 down"])
    while len(controller.record().placements) == count and time.monotonic() - begin < 30:
        lease.actuator.tick(time.monotonic_ns())
        time.sleep(0.01)
    took = time.monotonic() - begin
    controller.stop()
    monitor.kill()
    return took


def main() -> None:
    make_fabric()
    lab, results = Lab(), {}
    sports = colliding_ports()
    results["collide ecmp"] = mmr("rtsw1", COLLIDING, sports)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, Journal(Path(folder) / "journal.jsonl") as journal:
        controller, lease = controller_on(lab, journal, COLLIDING)
        agreed = query_decisions(lab, controller.tables)
        results["decisions"] = [agreed.agreed, agreed.queried, list(agreed.wrong)]
        results["collide te"] = mmr("rtsw1", COLLIDING, sports)
        results["moves"] = moved_under_load(lease)
        controller.place("cycle")  # puts the forced moves right
        written = rules()
        lease.release()  # the controller dies, and its lease ends
        results["after"] = mmr("rtsw1", COLLIDING, sports)
        controller, lease = controller_on(lab, journal, COLLIDING)
        results["byte-equal"] = rules() == written
        lease.release()

        parity = Lease(scheme_tables(TOPOLOGY, "static-parity", Routing()))
        parity.apply()
        results["odd-even parity"] = mmr("rtsw1", ODD_EVEN, {})
        parity.release()
        controller, lease = controller_on(lab, journal, ODD_EVEN)
        results["odd-even te"] = mmr("rtsw1", ODD_EVEN, {})
        lease.release()

        cycle_s, phase_s = map(float, sys.argv[1:] or (3600.0, 0.3))
        controller, lease = controller_on(lab, journal, COLLIDING, cycle=cycle_s, backdoor=not sys.argv[1:])
        results["rebalanced_s"] = rebalanced_s(controller, lease, phase_s)
        placement = controller.record().placements[-1]
        results["after cut"] = [placement.cause, list(placement.failed), placement.moved]
        lease.release()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
