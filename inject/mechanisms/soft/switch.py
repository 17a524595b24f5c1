"""Faults of switches: their routing daemons, routes, ECMP hash, reboot and drain."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from faultbed.inject.mechanisms.mechanism import (
    Mechanism,
    Request,
    Step,
    Witness,
    holder_request,
    on_switch,
    rnic_counters,
)
from faultbed.inject.node.inside import inside, ip, vtysh
from faultbed.testbed.errors import UsageError

__all__ = ["BY_KIND"]

# BGP in a lab drops a silent neighbour after 3 s (playbooks/module_utils/faultbed_frr.py, timers bgp).
HOLD_S = 3.0
_FRR = "/usr/lib/frr"
# In start order.
_DAEMONS = ["mgmtd", "zebra", "bgpd"]
# More packets than BGP's keepalives, which are only a few a second: the witness must be real traffic.
_PACKETS = 100


def _sessions(request: Request) -> Witness:
    """Return the witness that BGP sessions of the target reconnect: new TCP connections at its neighbours or itself."""
    switch = request.target.node
    ends = {link.other(switch).node for link in request.topology.links_of(switch) if link.is_uplink}
    if not ends:
        raise UsageError(f"{request.where}.target: {switch} has no BGP neighbour; choose a switch with an uplink")
    peers = sorted(ends)
    return Witness(
        any_of=tuple(f"{end}/tcp.{name}" for end in (*peers, switch) for name in ("ActiveOpens", "PassiveOpens"))
    )


def _bgp_kill(request: Request) -> Mechanism:
    place = on_switch(request, request.target.node)
    args = {"find": {"daemons": ["bgpd"]}, "how": "KILL", "netns": place.netns, "again": True}
    pidfile = f"/run/frr/{place.netns}/bgpd.pid"
    return Mechanism(
        place=place,
        request=holder_request(request, "process", args, claims=f"{place.name}/bgpd"),
        steps=(
            Step(
                do=f"kill -KILL $(cat {pidfile})",
                undo=f"nsenter --net=/run/netns/{place.netns} {_FRR}/bgpd -d -N {place.netns} -i {pidfile} ...   "
                "# with its previous arguments",
            ),
        ),
        must_move=(_sessions(request),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"netns": place.netns},
    )


def _freeze(request: Request) -> Mechanism:
    if request.spec.for_s <= HOLD_S:
        raise UsageError(
            f"{request.where}.for: neighbours notice a silent switch after {HOLD_S:g} s, {request.spec.for_s:g} s show "
            "nothing; lengthen the window"
        )
    place = on_switch(request, request.target.node)
    args = {"find": {"daemons": ["bgpd", "zebra"]}, "how": "STOP", "netns": place.netns}
    pids = f"$(cat /run/frr/{place.netns}/bgpd.pid /run/frr/{place.netns}/zebra.pid)"
    return Mechanism(
        place=place,
        request=holder_request(request, "process", args, claims=f"{place.name}/bgpd"),
        steps=(Step(do=f"kill -STOP {pids}", undo=f"kill -CONT {pids}"),),
        must_move=(_sessions(request),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"netns": place.netns},
    )


def _bgp_reset(request: Request) -> Mechanism:
    place = on_switch(request, request.target.node)
    return Mechanism(
        place=place,
        request=holder_request(request, "bgp_reset", {"netns": place.netns}, claims=f"{place.name}/bgpd/sessions"),
        complete_after=1,
        steps=(Step(do=f"{vtysh(place.netns)} -c 'clear bgp *'", undo="# nothing: sessions reconnect on their own"),),
        must_move=(_sessions(request),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"netns": place.netns},
    )


def _withdraw(request: Request) -> Mechanism:
    switch = request.topology.switch_by_name[request.target.node]
    if switch.role != "rtsw":
        raise UsageError(f"{request.where}.target: {switch.name} has no host prefixes to withdraw; choose an RTSW")
    place = on_switch(request, switch.name)
    path, line = [f"router bgp {switch.asn}", "address-family ipv4 unicast"], "redistribute connected"
    shell = " ".join(f"-c '{word}'" for word in ("configure terminal", *path))
    unrouted = tuple(f"{other.name}/ip.InNoRoutes" for other in request.topology.switches if other.name != switch.name)
    return Mechanism(
        place=place,
        request=holder_request(
            request, "frr", {"netns": place.netns, "path": path, "line": line}, claims=f"{place.name}/bgpd/{line}"
        ),
        steps=(
            Step(
                do=f"{vtysh(place.netns)} {shell} -c 'no {line}'",
                undo=f"{vtysh(place.netns)} {shell} -c '{line}'",
            ),
        ),
        must_move=(Witness(any_of=(*unrouted, *rnic_counters(request.topology, "completer_retry_err"))),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"netns": place.netns, "line": line},
    )


def _hash_policy(request: Request) -> Mechanism:
    switch = request.target.node
    place = on_switch(request, switch)
    ports = [link.end(switch).netdev for link in request.topology.links_of(switch) if link.is_uplink]
    if len(ports) < 2:  # noqa: PLR2004 - a choice needs two
        raise UsageError(f"{request.where}.target: {switch} has {len(ports)} uplink: nothing is hashed; it needs two")
    path, state = "ipv4/fib_multipath_hash_policy", f"{switch}/ip.hash_policy"
    write = f"{inside(place.netns)}sysctl -w net.{path.replace('/', '.')}"
    args = {"netns": place.netns, "path": path, "value": "0", "normal": "1"}
    return Mechanism(
        place=place,
        request=holder_request(request, "sysctl", args, claims=f"{place.name}/{path}"),
        steps=(Step(do=f"{write}=0", undo=f"{write}=1"),),
        must_move=(Witness(any_of=tuple(f"{switch}/{port}.tx_packets" for port in ports), at_least=_PACKETS),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        restored=((state, 1),),
        shows={"netns": place.netns, "value": "0"},
        while_on=((state, 0),),
    )


def _reboot(request: Request) -> Mechanism:
    switch = request.target.node
    place = on_switch(request, switch)
    links = request.topology.links_of(switch)
    far = [link.other(switch) for link in links if link.is_uplink]
    if not far:
        raise UsageError(
            f"{request.where}.target: {switch} has no uplink, whose far end would show the reboot; choose another"
        )
    ports = [link.end(switch).netdev for link in links]
    link = f"{ip(place.netns)} link set dev"
    pids = " ".join(f"/run/frr/{place.netns}/{daemon}.pid" for daemon in _DAEMONS)
    return Mechanism(
        place=place,
        request=holder_request(
            request, "reboot", {"netns": place.netns, "ports": ports, "daemons": _DAEMONS}, claims=switch
        ),
        steps=(
            Step(do=f"kill -KILL $(cat {pids})", undo=f"{_FRR}/<each> -d -N {place.netns} ...   # with its arguments"),
            *(Step(do=f"{link} {port} down", undo=f"{link} {port} up") for port in ports),
        ),
        must_move=(Witness(any_of=tuple(f"{end.node}/{end.netdev}.carrier_down_count" for end in far)),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        restored=tuple((f"{switch}/{port}.up", 1) for port in ports),
        shows={"netns": place.netns, "whole": True},
    )


def _drain(request: Request) -> Mechanism:
    switch = request.topology.switch_by_name[request.target.node]
    ends = [link.other(switch.name) for link in request.topology.links_of(switch.name) if link.is_uplink]
    detour_counters = [
        f"{end.node}/{link.end(end.node).netdev}.tx_packets"
        for end in ends
        for link in request.topology.links_of(end.node)
        if link.is_uplink and link.other(end.node).node != switch.name
    ]
    # While the switch is drained, its neighbours spread no load over their ports to it. Traffic alone proves no drain:
    # ECMP moves it to the other uplinks anyway.
    shared = [f"{end.node}/{end.netdev}.multipath" for end in ends]
    if switch.role == "rtsw" or not detour_counters:
        raise UsageError(
            f"{request.where}.target: {switch.name} is the only path for some hosts: a drain would cut them off; "
            "choose another switch"
        )
    place = on_switch(request, switch.name)
    path, line = [f"router bgp {switch.asn}"], "bgp graceful-shutdown"
    shell = " ".join(f"-c '{word}'" for word in ("configure terminal", *path))
    return Mechanism(
        place=place,
        request=holder_request(
            request,
            "frr",
            {"netns": place.netns, "path": path, "line": line, "add": True},
            claims=f"{place.name}/bgpd/{line}",
        ),
        steps=(
            Step(
                do=f"{vtysh(place.netns)} {shell} -c '{line}'",
                undo=f"{vtysh(place.netns)} {shell} -c 'no {line}'",
            ),
        ),
        must_move=(Witness(any_of=tuple(detour_counters), at_least=_PACKETS),),
        # Retransmissions may move: a flow that changes its path can be reordered, and a starved machine pauses.
        must_not_move=(
            *rnic_counters(request.topology, "send_err"),
            *(f"{other_switch.name}/ip.InNoRoutes" for other_switch in request.topology.switches),
        ),
        shows={"netns": place.netns, "line": line},
        while_on=tuple((state, 0) for state in shared),
    )


BY_KIND: Mapping[str, Callable[[Request], Mechanism]] = {
    "switch.bgp-kill": _bgp_kill,
    "switch.bgp-reset": _bgp_reset,
    "switch.freeze": _freeze,
    "switch.withdraw": _withdraw,
    "switch.hash-policy": _hash_policy,
    "switch.reboot": _reboot,
    "switch.drain": _drain,
}
