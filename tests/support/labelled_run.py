"""Synthetic runs with one fault each, and its effects on all counters. Packets are drawn at random, not measured.

Each connection sends data and gets ACKs along its path; a fault at a place loses, marks or delays what crosses it. What
a healthy and busy machine adds (timers, duplicates) is on every RNIC.
"""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import numpy as np
from synthetic_run import changed, soft_topology, synthetic_run

from faultbed.harness.record.evidence.workload_evidence import Connection
from faultbed.inject.kinds.fault_spec import FaultSpec

PACKETS = 20_000
HOSTS = ("host1", "host2", "host3", "host4")


def connections():
    """Return connections from every host to the next one in a ring of RNICs rxe0, and to the one after that."""
    racks = dict(zip(HOSTS, (1, 1, 2, 2), strict=True))
    collected = []
    for index, src in enumerate(HOSTS):
        for hop in (1, 2):
            dst = HOSTS[(index + hop) % 4]
            middle = [f"rtsw{racks[src]}"]
            if racks[src] != racks[dst]:
                middle += [f"ctsw{1 + (index + hop) % 2}", f"rtsw{racks[dst]}"]
            number = len(collected)
            collected.append(
                Connection(
                    src=f"{src}:rxe0",
                    dst=f"{dst}:rxe0",
                    lqpn=17 + number,
                    rqpn=117 + number,
                    udp_sport=50_000 + number,
                    path=(src, *middle, dst),
                )
            )
    return tuple(collected)


class Network:
    """Counters after the packets of all connections, of which one directed link u→v loses or marks a share."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.topology = soft_topology()
        self.counts = Counter()
        self.ports = {
            (near.node, far.node): near.netdev
            for link in self.topology.links
            if link.rnic in (None, "rxe0")
            for near, far in ((link.a, link.b), (link.b, link.a))
        }

    def move(self, path, packets, faulty_link, share, effect):
        """Send packets along a path, count them at each port, and return how many arrive."""
        for u, v in itertools.pairwise(path):
            if (u, v) == faulty_link and effect in ("drop", "mtu"):
                lost = int(self.rng.binomial(packets, share))
                self.counts[u, "ip.FragFails"] += lost if effect == "mtu" else 0
                packets -= lost
            self.counts[u, f"{self.ports[u, v]}.tx_packets"] += packets
            self.counts[v, f"{self.ports[v, u]}.rx_packets"] += packets
        return packets

    def run(self, faulty_link=None, share=0.0, effect="drop"):
        for one in connections():
            (src, dst) = (end.partition(":")[0] for end in (one.src, one.dst))
            lost = PACKETS - self.move(one.path, PACKETS, faulty_link, share, effect)
            effect_on_acks = "drop" if effect == "ack" else effect
            lost_acks = PACKETS // 4 - self.move(one.path[::-1], PACKETS // 4, faulty_link, share, effect_on_acks)
            self.counts[dst, "rxe0.out_of_seq_request"] += lost
            self.counts[src, "rxe0.rcvd_seq_err"] += int(self.rng.binomial(lost, 0.9))
            timers = int(self.rng.binomial(lost, 0.1)) + int(self.rng.binomial(lost_acks, 0.05))
            self.counts[src, "rxe0.completer_retry_err"] += timers
            self.counts[dst, "rxe0.duplicate_request"] += timers
            if effect == "mark" and faulty_link in itertools.pairwise(one.path):
                self.counts[dst, "ip.InCEPkts"] += int(self.rng.binomial(PACKETS, share))
        return self

    def hang(self, host):
        for one in connections():
            if one.dst.startswith(f"{host}:"):
                self.counts[one.src.partition(":")[0], "rxe0.completer_retry_err"] += int(self.rng.integers(20, 40))
                self.counts[host, "rxe0.duplicate_request"] += int(self.rng.integers(20, 40))
        return self

    def carrier(self, link):
        for end in (link.a, link.b):
            self.counts[end.node, f"{end.netdev}.carrier_changes"] += 2
        return self

    def sessions(self, switch):
        for link in self.topology.links_of(switch):
            if link.is_uplink:
                self.counts[switch, "tcp.ActiveOpens"] += 1
                self.counts[link.other(switch).node, "tcp.EstabResets"] += 1
        return self

    def measured(self, kind, target, *, slow=None):
        """Return the measurements: counters, and the fault, if any, with a receipt that proves it."""
        run = synthetic_run()
        for host in self.topology.host_by_name:
            self.counts[host, "rxe0.completer_retry_err"] += int(self.rng.poisson(4))
            self.counts[host, "rxe0.duplicate_request"] += int(self.rng.poisson(30))
        after: dict[str, dict[str, int]] = {}
        for node in (*self.topology.host_by_name, *self.topology.switch_by_name):
            after[node] = {}
        for (node, name), count in self.counts.items():
            after[node][name] = count
        faults = ()
        if kind is not None:
            plan = FaultSpec(id="it", kind=kind, target=target, at_s=9.0, for_s=1.0, seed=1)
            receipt = msgspec.structs.replace(run.injected.faults[0].receipt, id="it", kind=kind, target=target)
            faults = (msgspec.structs.replace(run.injected.faults[0], plan=plan, receipt=receipt),)
        return changed(
            run,
            connections=connections(),
            counters_before={node: dict.fromkeys(names, 0) for node, names in after.items()},
            counters_after=after,
            faults=faults,
            series=run.fault_free if slow is None else slowed(run.fault_free, slow),
        )


def slowed(series, rank, factor=1.5):
    """Return the series with rank `rank` computing slower from iteration 70 on."""
    steps = tuple(
        msgspec.structs.replace(iteration, compute_ns=round(iteration.compute_ns * factor))
        if iteration.index >= 70
        else iteration
        for iteration in series[rank].iterations
    )
    return tuple(msgspec.structs.replace(one, iterations=steps) if one.rank == rank else one for one in series)


def campaign(seed=1):
    """Yield (kind, target, measurements) of a run for each kind of fault and each place that the workload uses."""
    topology = soft_topology()
    links = [link for link in topology.links if link.rnic in (None, "rxe0")]
    used = {pair for connection in connections() for pair in itertools.pairwise(connection.path)}
    for index, link in enumerate(links):
        for number, (u, v) in enumerate(((link.a.node, link.b.node), (link.b.node, link.a.node))):
            if (u, v) not in used:
                continue
            network = Network(seed + 100 * index + number)
            for share in (0.02, 0.002):
                yield (
                    "packet.drop",
                    link.name,
                    Network(seed + 100 * index).run((u, v), share).measured("packet.drop", link.name),
                )
            if number == 0:
                yield "link.mtu", link.name, network.run((u, v), 0.01, "mtu").measured("link.mtu", link.name)
        yield "link.down", link.name, Network(seed).run().carrier(link).measured("link.down", link.name)
    for index, host in enumerate(topology.host_by_name):
        yield "gpu.throttle", f"{host}:gpu0", Network(seed).run().measured("gpu.throttle", f"{host}:gpu0", slow=index)
        yield "host.freeze", host, Network(seed + index).run().hang(host).measured("host.freeze", host)
    for index, switch in enumerate(topology.switch_by_name):
        network = Network(seed + index).run().sessions(switch)
        yield "switch.bgp-kill", switch, network.measured("switch.bgp-kill", switch)
    for number in range(4):
        yield None, "", Network(seed + number).run().measured(None, "")
