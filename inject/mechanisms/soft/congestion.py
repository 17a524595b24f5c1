"""Faults of congestion: a short queue, elephants of others, one uplink for all, receivers that are slow or late."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping

from inject.mechanisms.mechanism import (
    Place,
    Request,
    Shot,
    Step,
    Witness,
    held,
    link_of,
    on_host,
    on_switch,
    rnic_counters,
)
from inject.mechanisms.soft.hop import detour_act, detour_request, detour_steps, hop_of, ruleset
from inject.mechanisms.soft.host import ENGINE
from inject.mechanisms.soft.processes import limited
from inject.node.inside import ip
from inject.node.machine.limit import RANKS_CGROUP
from inject.node.network.latereceives import FILE
from inject.node.network.steer import PRIORITY, TABLE
from testbed.errors import UsageError

__all__ = ["BY_KIND"]

_LOSS = ("out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "duplicate_request")
_MTU_BYTES = 4200
_DATAGRAM_BYTES = 4000
# Of the datagrams that were to be sent at least this share must have come: else the load was not what was asked for.
_ARRIVED = 0.1
# Traffic, not keepalives: of these an uplink sends a few a second.
_PACKETS = 100


def _shallow(asked: Request) -> Shot:
    link_of(asked)
    hop = hop_of(asked)
    packets, rate_mbit = asked.params["packets"], asked.params["rate"]
    rules = ruleset(asked, hop, ["meta protocol ip"], detour_act(asked, hop))
    # netem's limit is of packets, tbf's of bytes (tc-netem(8), tc-tbf(8)); what is above it is dropped at the tail.
    queue = f"netem limit {packets} rate {round(rate_mbit * 1_000_000)}bit"
    drain_ms = packets * _MTU_BYTES * 8 / (rate_mbit * 1000)
    return Shot(
        place=hop.place,
        request=detour_request(asked, hop, rules, queue=queue, count="drops", drain_ms=drain_ms),
        steps=detour_steps(asked, hop, rules, queue=queue),
        must_move=(Witness(any_of=rnic_counters(asked.topology, *_LOSS)),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"device": hop.port.netdev, "hook": hop.hook, "queue": "netem"},
    )


def _background(asked: Request) -> Shot:
    target = asked.target
    if target.rnic is None:
        raise UsageError(f"{asked.where}.target: {target.text} is not an RNIC")
    racks = {host.name: host.rack for host in asked.topology.hosts}
    others = [host for host in asked.topology.hosts if host.name != target.node]
    if not others:
        raise UsageError(f"{asked.where}.target: there is no other host that could send to {target.text}")
    # The same RNIC of a host of another rack: across uplinks, where elephants meet others.
    source = min(others, key=lambda host: racks[host.name] == racks[target.node])
    names = {rnic.name: rnic for rnic in source.rnics}
    rnic = names.get(target.rnic.name, source.rnics[0])
    rate_bps = round(asked.params["rate"] * 1e6)
    expected = rate_bps * asked.for_s / 8 / _DATAGRAM_BYTES
    args = {
        "sources": [[None, rnic.ip]],
        "destination": target.rnic.ip,
        "rate_bps": rate_bps,
        "flows": asked.params["flows"],
        "size_bytes": _DATAGRAM_BYTES,
    }
    return Shot(
        place=Place(node=source.name),
        request=held(asked, "background", args, claims=f"{source.name}/background/{target.rnic.ip}"),
        steps=(
            Step(
                do=f"{asked.params['flows']} UDP flows, {rnic.ip} to {target.rnic.ip}, {rate_bps} bit/s, ECT(1)",
                undo="kill %1   # they also end with the holder",
            ),
        ),
        must_move=(Witness(any_of=(f"{target.node}/ip.InECT1Pkts",), at_least=max(1, round(expected * _ARRIVED))),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"source": rnic.ip, "destination": target.rnic.ip},
    )


def _incast(asked: Request) -> Shot:
    target = asked.target
    if target.rnic is None:
        raise UsageError(f"{asked.where}.target: {target.text} is not an RNIC")
    own = asked.topology.rnic_link(target.node, target.rnic.name).a.node
    carrier = on_switch(asked, own).node
    others = [one for one in asked.topology.switches if one.name != own and one.carrier == carrier]
    if len(others) < 2:  # noqa: PLR2004 - many to one
        raise UsageError(f"{asked.where}.target: an incast needs two other switches at least that could send")
    rate_bps, period_s = round(asked.params["rate"] * 1e6), asked.params["period"] / 1000
    burst_s = period_s * asked.params["duty"]
    addresses = {one.name: str(ipaddress.ip_interface(one.loopback).ip) for one in others}
    expected = rate_bps * asked.params["duty"] * asked.for_s / 8 / _DATAGRAM_BYTES
    args = {
        "sources": [[name, address] for name, address in addresses.items()],
        "destination": target.rnic.ip,
        "rate_bps": rate_bps,
        "flows": 1,
        "size_bytes": _DATAGRAM_BYTES,
        "burst_s": burst_s,
        "period_s": period_s,
    }
    return Shot(
        place=Place(node=carrier),
        request=held(asked, "background", args, claims=f"{carrier}/incast/{target.rnic.ip}"),
        steps=(
            Step(
                do=f"UDP from {', '.join(addresses)} to {target.rnic.ip}, {rate_bps} bit/s together for {burst_s:g} s "
                f"in every {period_s:g} s, ECT(1)",
                undo="kill %1   # they also end with the holder",
            ),
        ),
        must_move=(Witness(any_of=(f"{target.node}/ip.InECT1Pkts",), at_least=max(1, round(expected * _ARRIVED))),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"source": ", ".join(addresses.values()), "destination": target.rnic.ip},
    )


def _collision(asked: Request) -> Shot:
    link, port = link_of(asked)
    switch = asked.topology.switch_by_name[port.node]
    uplinks = [each for each in asked.topology.links_of(switch.name) if each.is_uplink]
    if not link.is_uplink or switch.role != "rtsw":
        raise UsageError(f"{asked.where}.target: {asked.target.text} is not an uplink of an RTSW, named from its end")
    if len(uplinks) < 2:  # noqa: PLR2004 - a collision needs a choice
        raise UsageError(f"{asked.where}.target: {switch.name} has one uplink: everything takes it anyway")
    behind = {each.b.node for each in asked.topology.links_of(switch.name) if not each.is_uplink}
    prefixes = sorted(
        {
            str(ipaddress.ip_interface(rnic.address).network)
            for host in asked.topology.hosts
            if host.name not in behind
            for rnic in host.rnics
        }
    )
    if not prefixes:
        raise UsageError(f"{asked.where}.target: no host is beyond the uplinks of {switch.name}")
    place = on_switch(asked, switch.name)
    args = {
        "netns": place.netns,
        "device": port.netdev,
        "prefixes": prefixes,
    }
    at = ip(place.netns)
    return Shot(
        place=place,
        request=held(asked, "steer", args, claims=f"{place.name}/steer"),
        steps=(
            *(
                Step(
                    do=f"{at} route add {prefix} via <as it is> dev {port.netdev} table {TABLE}",
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
        must_not_move=rnic_counters(asked.topology, "send_err"),
        restored=((f"{switch.name}/ip.steered", 0),),
        shows={"netns": place.netns, "uplinks": port.netdev},
        while_on=((f"{switch.name}/ip.steered", 1),),
    )


def _slow(asked: Request) -> Shot:
    return limited(asked, ENGINE, RANKS_CGROUP, asked.params["percent"])


def _late(asked: Request) -> Shot:
    late_ms = asked.params.get("late") or 0
    told = rnic_counters(asked.topology, "rcvd_rnr_err", but=asked.target.node)
    if not told:
        raise UsageError(f"{asked.where}.target: there is no other host that could send to {asked.target.text}")
    return Shot(
        place=on_host(asked),
        request=held(asked, "late_receives", {"late_ms": late_ms}, claims=f"{asked.target.node}/receives"),
        steps=(Step(do=f"echo {late_ms} > {FILE}   # the traffic engine looks for it", undo=f"rm -f {FILE}"),),
        must_move=(Witness(any_of=told),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        of_workload=True,
        shows={"file": FILE},
    )


BY_KIND: Mapping[str, Callable[[Request], Shot]] = {
    "congestion.shallow-queue": _shallow,
    "congestion.background": _background,
    "congestion.incast": _incast,
    "congestion.hash-collision": _collision,
    "congestion.slow-receiver": _slow,
    "congestion.late-receives": _late,
}
