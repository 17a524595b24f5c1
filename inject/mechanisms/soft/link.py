"""Faults of links: down, flapping, silent in one direction, limited in rate or MTU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from faultbed.inject.mechanisms.mechanism import (
    Mechanism,
    Place,
    Request,
    Step,
    Witness,
    flap_edges,
    holder_request,
    link_of,
    on_switch,
    rnic_counters,
)
from faultbed.inject.mechanisms.soft.hop import (
    ACTS,
    detour_act,
    detour_request,
    detour_steps,
    hop_of,
    hop_request,
    hop_steps,
    ruleset,
)
from faultbed.inject.node.inside import ip

__all__ = ["BY_KIND"]

_RETRIES = ("out_of_seq_request", "completer_retry_err")
# A packet waits behind a slow link for at most this long and is then dropped, as in a switch without PFC.
_RATE_LATENCY = "latency 500ms"


def _flap(request: Request) -> Mechanism:
    """Return the mechanism that takes a link down, once or as a train of flaps."""
    edges = flap_edges(request)
    target, (link, port) = request.target, link_of(request)
    send_err = rnic_counters(request.topology, "send_err")
    flaps = sum(on for _, on in edges)
    if target.kind == "rnic":
        carrier = f"{target.node}/{port.netdev}"
        return Mechanism(
            place=Place(node=target.node, local=True),
            request=holder_request(
                request, "qmp", {"host": target.node, "netdev": port.netdev}, claims=carrier, edges=edges
            ),
            steps=(Step(do=_set_link(carrier, up=False), undo=_set_link(carrier, up=True)),),
            must_move=(Witness(any_of=(f"{carrier}.carrier_changes",), at_least=flaps),),
            # The target's own `send_err` may move: a packet in flight when the carrier goes down loses its route.
            must_not_move=tuple(key for key in send_err if key != f"{target.node}/{link.rnic}.send_err"),
            restored=((f"{carrier}.carrier", 1),),
            shows={"device": carrier},
        )
    place, far = on_switch(request, target.node), link.other(target.node)
    if link.is_uplink:
        # When one end of a veth goes down, its peer loses the carrier and counts that (drivers/net/veth.c, veth_close).
        witness = Witness(any_of=(f"{far.node}/{far.netdev}.carrier_down_count",), at_least=flaps)
    else:
        # Over a dgram socket the host's carrier stays up: only the traffic's counters show the fault.
        witness = Witness(any_of=rnic_counters(request.topology, *_RETRIES))
    restored = [(f"{target.node}/{port.netdev}.up", 1)]
    if link.is_uplink:
        restored.append((f"{far.node}/{far.netdev}.carrier", 1))
    command = f"{ip(place.netns)} link set dev {port.netdev}"
    return Mechanism(
        place=place,
        request=holder_request(
            request,
            "link",
            {"netns": place.netns, "device": port.netdev},
            claims=f"{place.name}/{port.netdev}",
            edges=edges,
        ),
        steps=(Step(do=f"{command} down", undo=f"{command} up"),),
        must_move=(witness,),
        must_not_move=send_err,
        restored=tuple(restored),
        shows={"device": port.netdev},
    )


def _set_link(carrier: str, *, up: bool) -> str:
    return f"QMP set_link {carrier} up={str(up).lower()}"


def _oneway(request: Request) -> Mechanism:
    link, _ = link_of(request)
    hop = hop_of(request)
    rules = ruleset(request, hop, [], ACTS["drop"])
    witnesses = rnic_counters(request.topology, *_RETRIES)
    if link.is_uplink:
        # No carrier changes; BGP notices by its hold timer, and both ends open a new session (RFC 4271, 6.5).
        witnesses += tuple(
            f"{end.node}/tcp.{name}" for end in (link.a, link.b) for name in ("ActiveOpens", "RetransSegs")
        )
    ends = tuple(f"{end.node}/{end.netdev}.carrier_changes" for end in (link.a, link.b))
    return Mechanism(
        place=hop.place,
        request=hop_request(request, hop, rules),
        steps=hop_steps(request, hop, rules),
        must_move=(Witness(any_of=witnesses),),
        must_not_move=(*rnic_counters(request.topology, "send_err"), *ends),
        shows={"device": hop.port.netdev, "hook": hop.hook},
    )


def _rate(request: Request) -> Mechanism:
    link_of(request)
    hop = hop_of(request)
    rules = ruleset(request, hop, ["meta protocol ip"], detour_act(request, hop))
    queue = f"tbf rate {round(request.spec.params['rate'] * 1_000_000)}bit burst 32kb {_RATE_LATENCY}"
    receivers = [hop.far] if hop.far else [hop.port.node, *(host.name for host in request.topology.hosts)]
    return Mechanism(
        place=hop.place,
        # The count is how often the limit held a packet back: a limit that was never reached has not fired.
        request=detour_request(request, hop, rules, queue=queue, count="overlimits", drain_ms=600),
        steps=detour_steps(request, hop, rules, queue=queue),
        must_move=(Witness(any_of=tuple(f"{node}/ip.InECT1Pkts" for node in receivers)),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"device": hop.port.netdev, "hook": hop.hook, "queue": "tbf"},
    )


def _mtu(request: Request) -> Mechanism:
    link, named = link_of(request)
    port = link.a if request.target.kind == "rnic" else named
    place, mtu = on_switch(request, port.node), request.spec.params["mtu"]
    state, command = f"{port.node}/{port.netdev}.mtu", f"{ip(place.netns)} link set dev {port.netdev} mtu"
    return Mechanism(
        place=place,
        request=holder_request(
            request,
            "mtu",
            {"netns": place.netns, "device": port.netdev, "mtu": mtu},
            claims=f"{place.name}/{port.netdev}/mtu",
        ),
        steps=(Step(do=f"{command} {mtu}", undo=f"{command} <previous MTU>"),),
        must_move=(Witness(any_of=(f"{port.node}/ip.FragFails",)),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"device": port.netdev, "mtu": mtu},
        while_on=((state, mtu),),
    )


BY_KIND: Mapping[str, Callable[[Request], Mechanism]] = {
    "link.down": _flap,
    "link.flap": _flap,
    "link.oneway": _oneway,
    "link.rate": _rate,
    "link.mtu": _mtu,
}
