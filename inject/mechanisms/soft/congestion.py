"""Faults of congestion: short queue, background flows, incast, one uplink for all, slow or late receivers."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping

from faultbed.inject.mechanisms.mechanism import (
    Mechanism,
    Place,
    Request,
    Step,
    Witness,
    holder_request,
    link_of,
    on_host,
    on_switch,
    rnic_counters,
)
from faultbed.inject.mechanisms.soft.hop import LOSS_COUNTERS, detour_act, detour_request, detour_steps, hop_of, ruleset
from faultbed.inject.mechanisms.soft.host import ENGINE
from faultbed.inject.mechanisms.soft.processes import limited
from faultbed.inject.node.inside import ip
from faultbed.inject.node.machine.limit import RANKS_CGROUP
from faultbed.inject.node.network.latereceives import FILE
from faultbed.inject.node.network.steer import PRIORITY, TABLE
from faultbed.testbed.errors import UsageError

__all__ = ["BY_KIND"]

# Size of the largest packet, for the time that a full queue needs to drain.
_MTU_BYTES = 4200
_DATAGRAM_BYTES = 4000
# At least this share of the datagrams must arrive. Otherwise the load was not the requested one.
_ARRIVED = 0.1
# More packets than BGP's keepalives, which are only a few a second: the witness must be real traffic.
_PACKETS = 100


def _shallow(request: Request) -> Mechanism:
    link_of(request)
    hop = hop_of(request)
    packets, rate_mbit = request.spec.params["packets"], request.spec.params["rate"]
    rules = ruleset(request, hop, ["meta protocol ip"], detour_act(request, hop))
    # netem limits packets, tbf bytes (tc-netem(8), tc-tbf(8)); what exceeds the limit is dropped at the tail.
    queue = f"netem limit {packets} rate {round(rate_mbit * 1_000_000)}bit"
    drain_ms = packets * _MTU_BYTES * 8 / (rate_mbit * 1000)
    return Mechanism(
        place=hop.place,
        request=detour_request(request, hop, rules, queue=queue, count="drops", drain_ms=drain_ms),
        steps=detour_steps(request, hop, rules, queue=queue),
        must_move=(Witness(any_of=rnic_counters(request.topology, *LOSS_COUNTERS)),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"device": hop.port.netdev, "hook": hop.hook, "queue": "netem"},
    )


def _background(request: Request) -> Mechanism:
    target = request.target
    if target.rnic is None:
        raise UsageError(f"{request.where}.target: {target.text} is not an RNIC; name one, such as host1:rxe0")
    racks = {host.name: host.rack for host in request.topology.hosts}
    candidates = [host for host in request.topology.hosts if host.name != target.node]
    if not candidates:
        raise UsageError(f"{request.where}.target: no other host can send to {target.text}; it needs two")
    # The same RNIC of a host in another rack, so that the flows cross uplinks and compete with others there.
    source = min(candidates, key=lambda host: racks[host.name] == racks[target.node])
    names = {rnic.name: rnic for rnic in source.rnics}
    rnic = names.get(target.rnic.name, source.rnics[0])
    rate_bps = round(request.spec.params["rate"] * 1e6)
    expected = rate_bps * request.spec.for_s / 8 / _DATAGRAM_BYTES
    args = {
        "sources": [[None, rnic.ip]],
        "destination": target.rnic.ip,
        "rate_bps": rate_bps,
        "flows": request.spec.params["flows"],
        "size_bytes": _DATAGRAM_BYTES,
    }
    return Mechanism(
        place=Place(node=source.name),
        request=holder_request(request, "background", args, claims=f"{source.name}/background/{target.rnic.ip}"),
        steps=(
            Step(
                do=f"{request.spec.params['flows']} UDP flows, {rnic.ip} to {target.rnic.ip}, {rate_bps} bit/s, ECT(1)",
                undo="kill %1   # they also end with the holder",
            ),
        ),
        must_move=(Witness(any_of=(f"{target.node}/ip.InECT1Pkts",), at_least=max(1, round(expected * _ARRIVED))),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"source": rnic.ip, "destination": target.rnic.ip},
    )


def _incast(request: Request) -> Mechanism:
    target = request.target
    if target.rnic is None:
        raise UsageError(f"{request.where}.target: {target.text} is not an RNIC; name one, such as host1:rxe0")
    own = request.topology.rnic_link(target.node, target.rnic.name).a.node
    carrier = on_switch(request, own).node
    senders = [switch for switch in request.topology.switches if switch.name != own and switch.carrier == carrier]
    if len(senders) < 2:  # noqa: PLR2004 - many to one
        raise UsageError(f"{request.where}.target: an incast needs at least two other switches that can send")
    rate_bps, period_s = round(request.spec.params["rate"] * 1e6), request.spec.params["period"] / 1000
    burst_s = period_s * request.spec.params["duty"]
    addresses = {switch.name: str(ipaddress.ip_interface(switch.loopback).ip) for switch in senders}
    expected = rate_bps * request.spec.params["duty"] * request.spec.for_s / 8 / _DATAGRAM_BYTES
    args = {
        "sources": [[name, address] for name, address in addresses.items()],
        "destination": target.rnic.ip,
        "rate_bps": rate_bps,
        "flows": 1,
        "size_bytes": _DATAGRAM_BYTES,
        "burst_s": burst_s,
        "period_s": period_s,
    }
    return Mechanism(
        place=Place(node=carrier),
        request=holder_request(request, "background", args, claims=f"{carrier}/incast/{target.rnic.ip}"),
        steps=(
            Step(
                do=f"UDP from {', '.join(addresses)} to {target.rnic.ip}, {rate_bps} bit/s together for {burst_s:g} s "
                f"in every {period_s:g} s, ECT(1)",
                undo="kill %1   # they also end with the holder",
            ),
        ),
        must_move=(Witness(any_of=(f"{target.node}/ip.InECT1Pkts",), at_least=max(1, round(expected * _ARRIVED))),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"source": ", ".join(addresses.values()), "destination": target.rnic.ip},
    )


def _collision(request: Request) -> Mechanism:
    link, port = link_of(request)
    switch = request.topology.switch_by_name[port.node]
    uplinks = [link for link in request.topology.links_of(switch.name) if link.is_uplink]
    if not link.is_uplink or switch.role != "rtsw":
        raise UsageError(
            f"{request.where}.target: {request.target.text} is not an uplink of an RTSW, named from the RTSW's end"
        )
    if len(uplinks) < 2:  # noqa: PLR2004 - a collision needs a choice
        raise UsageError(f"{request.where}.target: {switch.name} has one uplink, which carries all; it needs two")
    behind = {link.b.node for link in request.topology.links_of(switch.name) if not link.is_uplink}
    prefixes = sorted(
        {
            str(ipaddress.ip_interface(rnic.address).network)
            for host in request.topology.hosts
            if host.name not in behind
            for rnic in host.rnics
        }
    )
    if not prefixes:
        raise UsageError(f"{request.where}.target: no host is beyond the uplinks of {switch.name}; choose another")
    place = on_switch(request, switch.name)
    args = {
        "netns": place.netns,
        "device": port.netdev,
        "prefixes": prefixes,
    }
    at = ip(place.netns)
    return Mechanism(
        place=place,
        request=holder_request(request, "steer", args, claims=f"{place.name}/steer"),
        steps=(
            *(
                Step(
                    do=f"{at} route add {prefix} via <same next hop> dev {port.netdev} table {TABLE}",
                    undo=f"{at} route del {prefix} table {TABLE}",
                )
                for prefix in prefixes
            ),
            Step(
                do=f"{at} rule add priority {PRIORITY} lookup {TABLE}",
                undo=f"{at} rule del priority {PRIORITY}",
            ),
        ),
        must_move=(Witness(any_of=(f"{switch.name}/{port.netdev}.tx_packets",), at_least=_PACKETS),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        restored=((f"{switch.name}/ip.steered", 0),),
        shows={"netns": place.netns, "uplinks": port.netdev},
        while_on=((f"{switch.name}/ip.steered", 1),),
    )


def _slow(request: Request) -> Mechanism:
    return limited(request, ENGINE, RANKS_CGROUP, request.spec.params["percent"])


def _late(request: Request) -> Mechanism:
    late_ms = request.spec.params.get("late") or 0
    witnesses = rnic_counters(request.topology, "rcvd_rnr_err", but=request.target.node)
    if not witnesses:
        raise UsageError(f"{request.where}.target: there is no other host that could send to {request.target.text}")
    return Mechanism(
        place=on_host(request),
        request=holder_request(
            request, "late_receives", {"late_ms": late_ms}, claims=f"{request.target.node}/receives"
        ),
        steps=(Step(do=f"echo {late_ms} > {FILE}   # the traffic engine reads this file", undo=f"rm -f {FILE}"),),
        must_move=(Witness(any_of=witnesses),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        of_workload=True,
        shows={"file": FILE},
    )


BY_KIND: Mapping[str, Callable[[Request], Mechanism]] = {
    "congestion.shallow-queue": _shallow,
    "congestion.background": _background,
    "congestion.incast": _incast,
    "congestion.hash-collision": _collision,
    "congestion.slow-receiver": _slow,
    "congestion.late-receives": _late,
}
