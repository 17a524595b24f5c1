"""The ECMP path of a queue pair: its UDP source port, and the path that the switches' own kernels report for it.

The source port of a connection (RC, UC) follows from the flow label of its address handle or, without a label, from
both QPNs (Linux 6.12: `rdma_get_udp_sport`, `rdma_calc_flow_label` and `rdma_flow_label_to_udp_sport` in
include/rdma/ib_verbs.h, called by `rxe_modify_qp` in drivers/infiniband/sw/rxe/rxe_verbs.c; without a label, verified
on the wire for 48 of 48 QPs).

A datagram QP of rxe keeps the port it was created with, a hash of its own QPN (`rxe_qp_init_req` in rxe_qp.c, `hash_32`
in include/linux/hash.h). Nothing changes it before the QP sends: `prepare4` in rxe_net.c takes addresses, traffic class
and hop limit from the datagram's address handle, but no flow label. On mlx5 a datagram with a flow label is sent from
the label's port (`mlx5_ah_get_udp_sport` in drivers/infiniband/hw/mlx5/ah.c; not yet run on hardware). One without a
label is sent from the smallest port of the RNIC, which is not predicted here.

The path is queried from each switch (`ip route get` with the whole 5-tuple), never guessed from a hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from faultbed.testbed.lab import Lab
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.packets.bth import ROCE_PORT
from faultbed.traffic.engine.run_results import Connection

__all__ = [
    "QUERY_TIMEOUT_S",
    "Flow5",
    "data_and_ack_paths",
    "data_paths",
    "datagram_sport",
    "paths",
    "sport_of",
    "udp_sport",
]

GOLDEN_RATIO_32 = 0x61C88647
MAX_HOPS = 6
QUERY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow5:
    """The 5-tuple of a queue pair's packets, without the protocol and destination port of RoCEv2.

    `dst_qpn` is the queue pair in their BTH, by which some routing schemes choose.
    """

    src_ip: str
    dst_ip: str
    sport: int
    dst_qpn: int = 0


def udp_sport(lqpn: int, rqpn: int, flow_label: int = 0) -> int:
    """Return the UDP source port of packets from QP `lqpn` to QP `rqpn`. A flow label other than 0 alone decides it."""
    label = flow_label
    if not label:
        product = lqpn * rqpn
        product ^= product >> 20
        product ^= product >> 40
        label = product & 0xFFFFF
    return 0xC000 | ((label & 0x3FFF) ^ ((label & 0xFC000) >> 14))


def datagram_sport(lqpn: int) -> int:
    """Return the UDP source port of the datagrams that rxe's QP `lqpn` sends. It does not depend on the destination."""
    return 0xC000 + ((lqpn * GOLDEN_RATIO_32 & 0xFFFFFFFF) >> 18)


def sport_of(connection: Connection) -> int:
    """Return the UDP source port of a connection's data packets."""
    if connection.transport == "ud" and not connection.flow_label:
        return datagram_sport(connection.lqpn)
    return udp_sport(connection.lqpn, connection.rqpn, connection.flow_label)


def paths(lab: Lab, flows: Iterable[Flow5]) -> dict[Flow5, tuple[str, ...]]:
    """Return the nodes that each flow crosses in the current routing, with the hosts at both ends.

    The path of a flow ends at a switch that has no next hop for it. A flow that a routing scheme sprays over several
    paths has none. Each machine gets one query per hop for all flows.
    """
    topology = lab.topology
    walks: dict[Flow5, list[str]] = {}
    ports: dict[Flow5, str] = {}
    for flow in flows:
        link = _host_link(topology, flow.src_ip)
        if link is not None:
            walks[flow] = [link[0], link[1]]
            ports[flow] = link[2]
    for _ in range(MAX_HOPS):
        at_switch: dict[str, list[Flow5]] = {}
        for flow, walk in walks.items():
            if walk[-1] in topology.switch_by_name:
                at_switch.setdefault(walk[-1], []).append(flow)
        if not at_switch:
            break
        for flow, device in _query_ports(lab, at_switch, ports).items():
            _step(topology, walks[flow], ports, flow, device)
    return {
        flow: () if _is_sprayed(lab, flow, walk) else tuple(name for name in walk if name)
        for flow, walk in walks.items()
    }


def data_paths(lab: Lab, connections: Iterable[Connection]) -> dict[int, tuple[str, ...]]:
    """Return the path of each connection by index; empty if it has none.

    Raises:
        LabError: a switch could not answer.
    """
    flows = {connection.index: _data_flow(connection) for connection in connections}
    by_flow = paths(lab, flows.values())
    return {index: by_flow.get(flow, ()) for index, flow in flows.items()}


def data_and_ack_paths(
    lab: Lab, connections: Iterable[Connection]
) -> dict[int, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return, by index, the path of each connection's data and the path of its ACKs; empty if there is none.

    ACKs have the same source port as data: rxe computes it from both QPNs, whichever end sends.

    Raises:
        LabError: a switch could not answer.
    """
    listed = list(connections)
    flows = {connection.index: _data_flow(connection) for connection in listed}
    acks = {
        connection.index: Flow5(
            src_ip=connection.dst_ip, dst_ip=connection.src_ip, sport=sport_of(connection), dst_qpn=connection.lqpn
        )
        for connection in listed
    }
    by_flow = paths(lab, [*flows.values(), *acks.values()])
    return {index: (by_flow.get(flow, ()), by_flow.get(acks[index], ())) for index, flow in flows.items()}


def _data_flow(connection: Connection) -> Flow5:
    return Flow5(
        src_ip=connection.src_ip, dst_ip=connection.dst_ip, sport=sport_of(connection), dst_qpn=connection.rqpn
    )


def _is_sprayed(lab: Lab, flow: Flow5, walk: Iterable[str]) -> bool:
    scheme = lab.scheme
    return scheme is not None and any(scheme.sprays(name, flow.dst_ip) for name in walk)


def _host_link(topology: Topology, address: str) -> tuple[str, str, str] | None:
    for host in topology.hosts:
        for rnic in host.rnics:
            if rnic.ip == address:
                link = topology.rnic_link(host.name, rnic.name)
                return host.name, link.a.node, link.a.netdev
    return None


def _query_ports(lab: Lab, at_switch: Mapping[str, list[Flow5]], ports: Mapping[Flow5, str]) -> dict[Flow5, str]:
    """Return the port by which each flow leaves its current switch; empty if there is none."""
    ports_by_flow: dict[Flow5, str] = {}
    for machine, nodes in lab.carried(at_switch).items():
        queries = {
            node: [
                namespace,
                [
                    [flow.src_ip, flow.dst_ip, ports[flow], flow.sport, ROCE_PORT, *_mark(lab, node, flow)]
                    for flow in at_switch[node]
                ],
            ]
            for node, namespace in nodes.items()
        }
        answer = lab.request(machine, {"do": "egress", "flows": queries}, timeout_s=QUERY_TIMEOUT_S)
        for node, devices in answer["ports"].items():
            ports_by_flow |= {flow: device or "" for flow, device in zip(at_switch[node], devices, strict=True)}
    return ports_by_flow


def _mark(lab: Lab, switch: str, flow: Flow5) -> list[int]:
    """Return the mark that the switch's scheme gives to a flow's packets, computed from their queue pair, if any."""
    mark = lab.scheme.mark(switch, flow.dst_ip, flow.dst_qpn) if lab.scheme is not None else 0
    return [mark] if mark else []


def _step(topology: Topology, walk: list[str], ports: dict[Flow5, str], flow: Flow5, device: str) -> None:
    node = walk[-1]
    for link in topology.links_of(node):
        if link.end(node).netdev == device:
            far = link.other(node)
            walk.append(far.node)
            ports[flow] = far.netdev
            return
    walk.append("")
