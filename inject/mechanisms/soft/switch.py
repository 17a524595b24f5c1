"""Faults of switches: their BGP daemon, their routes, their hash."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inject.mechanisms.mechanism import Request, Shot, Step, Witness, held, on_switch, rnic_counters
from inject.node.inside import inside, ip, vtysh
from testbed.errors import UsageError

__all__ = ["BY_KIND"]

# BGP of a lab gives a silent neighbour up after 3 s (playbooks/module_utils/faultbed_frr.py, timers bgp).
HOLD_S = 3.0
_FRR = "/usr/lib/frr"
# In the order in which they start.
_DAEMONS = ["mgmtd", "zebra", "bgpd"]
# Traffic, not keepalives: of these an uplink sends a few a second.
_PACKETS = 100


def _sessions(asked: Request) -> Witness:
    switch = asked.target.node
    ends = {link.other(switch).node for link in asked.topology.links_of(switch) if link.is_uplink}
    if not ends:
        raise UsageError(f"{asked.where}.target: {switch} speaks BGP with nobody")
    peers = sorted(ends)
    return Witness(
        any_of=tuple(f"{end}/tcp.{name}" for end in (*peers, switch) for name in ("ActiveOpens", "PassiveOpens"))
    )


def _bgp_kill(asked: Request) -> Shot:
    place = on_switch(asked, asked.target.node)
    args = {"find": {"daemons": ["bgpd"]}, "how": "KILL", "netns": place.netns, "again": True}
    pidfile = f"/run/frr/{place.netns}/bgpd.pid"
    return Shot(
        place=place,
        request=held(asked, "process", args, claims=f"{place.name}/bgpd"),
        steps=(
            Step(
                do=f"kill -KILL $(cat {pidfile})",
                undo=f"nsenter --net=/run/netns/{place.netns} {_FRR}/bgpd -d -N {place.netns} -i {pidfile} ...   "
                "# with the arguments it had",
            ),
        ),
        must_move=(_sessions(asked),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"netns": place.netns},
    )


def _freeze(asked: Request) -> Shot:
    if asked.for_s <= HOLD_S:
        raise UsageError(
            f"{asked.where}.for: neighbours give a silent switch up after {HOLD_S:g} s: {asked.for_s:g} s show nothing"
        )
    place = on_switch(asked, asked.target.node)
    args = {"find": {"daemons": ["bgpd", "zebra"]}, "how": "STOP", "netns": place.netns}
    pids = f"$(cat /run/frr/{place.netns}/bgpd.pid /run/frr/{place.netns}/zebra.pid)"
    return Shot(
        place=place,
        request=held(asked, "process", args, claims=f"{place.name}/bgpd"),
        steps=(Step(do=f"kill -STOP {pids}", undo=f"kill -CONT {pids}"),),
        must_move=(_sessions(asked),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"netns": place.netns},
    )


def _bgp_reset(asked: Request) -> Shot:
    place = on_switch(asked, asked.target.node)
    return Shot(
        place=place,
        request=held(asked, "bgp_reset", {"netns": place.netns}, claims=f"{place.name}/bgpd/sessions"),
        complete_after=1,
        steps=(Step(do=f"{vtysh(place.netns)} -c 'clear bgp *'", undo="# sessions come back by themselves"),),
        must_move=(_sessions(asked),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"netns": place.netns},
    )


def _withdraw(asked: Request) -> Shot:
    switch = asked.topology.switch_by_name[asked.target.node]
    if switch.role != "rtsw":
        raise UsageError(f"{asked.where}.target: {switch.name} has no prefixes of hosts to withdraw; take an RTSW")
    place = on_switch(asked, switch.name)
    path, line = [f"router bgp {switch.asn}", "address-family ipv4 unicast"], "redistribute connected"
    shell = " ".join(f"-c '{word}'" for word in ("configure terminal", *path))
    others = tuple(f"{other.name}/ip.InNoRoutes" for other in asked.topology.switches if other.name != switch.name)
    return Shot(
        place=place,
        request=held(
            asked, "frr", {"netns": place.netns, "path": path, "line": line}, claims=f"{place.name}/bgpd/{line}"
        ),
        steps=(
            Step(
                do=f"{vtysh(place.netns)} {shell} -c 'no {line}'",
                undo=f"{vtysh(place.netns)} {shell} -c '{line}'",
            ),
        ),
        must_move=(Witness(any_of=(*others, *rnic_counters(asked.topology, "completer_retry_err"))),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"netns": place.netns, "line": line},
    )


def _hash_policy(asked: Request) -> Shot:
    switch = asked.target.node
    place = on_switch(asked, switch)
    ports = [link.end(switch).netdev for link in asked.topology.links_of(switch) if link.is_uplink]
    if len(ports) < 2:  # noqa: PLR2004 - a choice needs two
        raise UsageError(f"{asked.where}.target: {switch} has {len(ports)} uplink: there is nothing to hash")
    path, state = "ipv4/fib_multipath_hash_policy", f"{switch}/ip.hash_policy"
    write = f"{inside(place.netns)}sysctl -w net.{path.replace('/', '.')}"
    args = {"netns": place.netns, "path": path, "value": "0", "normal": "1"}
    return Shot(
        place=place,
        request=held(asked, "sysctl", args, claims=f"{place.name}/{path}"),
        steps=(Step(do=f"{write}=0", undo=f"{write}=1"),),
        must_move=(Witness(any_of=tuple(f"{switch}/{port}.tx_packets" for port in ports), at_least=_PACKETS),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        restored=((state, 1),),
        shows={"netns": place.netns, "value": "0"},
        while_on=((state, 0),),
    )


def _reboot(asked: Request) -> Shot:
    switch = asked.target.node
    place = on_switch(asked, switch)
    links = asked.topology.links_of(switch)
    far = [link.other(switch) for link in links if link.is_uplink]
    if not far:
        raise UsageError(f"{asked.where}.target: {switch} has no uplink whose other end could tell")
    ports = [link.end(switch).netdev for link in links]
    link = f"{ip(place.netns)} link set dev"
    pids = " ".join(f"/run/frr/{place.netns}/{daemon}.pid" for daemon in _DAEMONS)
    return Shot(
        place=place,
        request=held(asked, "reboot", {"netns": place.netns, "ports": ports, "daemons": _DAEMONS}, claims=switch),
        steps=(
            Step(do=f"kill -KILL $(cat {pids})", undo=f"{_FRR}/<each> -d -N {place.netns} ...   # as it was started"),
            *(Step(do=f"{link} {port} down", undo=f"{link} {port} up") for port in ports),
        ),
        must_move=(Witness(any_of=tuple(f"{end.node}/{end.netdev}.carrier_down_count" for end in far)),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        restored=tuple((f"{switch}/{port}.up", 1) for port in ports),
        shows={"netns": place.netns, "whole": True},
    )


def _drain(asked: Request) -> Shot:
    switch = asked.topology.switch_by_name[asked.target.node]
    ends = [link.other(switch.name) for link in asked.topology.links_of(switch.name) if link.is_uplink]
    others = [
        f"{end.node}/{link.end(end.node).netdev}.tx_packets"
        for end in ends
        for link in asked.topology.links_of(end.node)
        if link.is_uplink and link.other(end.node).node != switch.name
    ]
    # While it is drained, its neighbours spread nothing over their ports to it. Traffic alone proves no drain: ECMP
    # moves it to the other uplinks anyway.
    shared = [f"{end.node}/{end.netdev}.multipath" for end in ends]
    if switch.role == "rtsw" or not others:
        raise UsageError(f"{asked.where}.target: {switch.name} is the only way to somewhere: it cannot be drained")
    place = on_switch(asked, switch.name)
    path, line = [f"router bgp {switch.asn}"], "bgp graceful-shutdown"
    shell = " ".join(f"-c '{word}'" for word in ("configure terminal", *path))
    return Shot(
        place=place,
        request=held(
            asked,
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
        must_move=(Witness(any_of=tuple(others), at_least=_PACKETS),),
        # Not retransmissions: a flow that changes its path may overtake itself, and a starved machine pauses.
        must_not_move=(
            *rnic_counters(asked.topology, "send_err"),
            *(f"{each.name}/ip.InNoRoutes" for each in asked.topology.switches),
        ),
        shows={"netns": place.netns, "line": line},
        while_on=tuple((state, 0) for state in shared),
    )


BY_KIND: Mapping[str, Callable[[Request], Shot]] = {
    "switch.bgp-kill": _bgp_kill,
    "switch.bgp-reset": _bgp_reset,
    "switch.freeze": _freeze,
    "switch.withdraw": _withdraw,
    "switch.hash-policy": _hash_policy,
    "switch.reboot": _reboot,
    "switch.drain": _drain,
}
