"""Faults of data: one bit of a packet is flipped at the hop, and its ICRC is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from faultbed.inject.mechanisms.mechanism import Mechanism, Request, Step, Witness, holder_request, rnic_counters
from faultbed.inject.mechanisms.soft.hop import (
    device_of,
    hop_of,
    hop_request,
    hop_steps,
    matches,
    one_packet,
    ruleset,
    selection_of,
    table_of,
)
from faultbed.inject.node.inside import ip
from faultbed.testbed.errors import UsageError

__all__ = ["BY_KIND"]


def _corrupt(request: Request) -> Mechanism:
    if all(request.spec.params.get(name) is None for name in ("share", "every", "psn")):
        raise UsageError(f"{request.where}: data.corrupt needs share, every or psn; add one of them")
    link = request.target.link
    request = request.with_params({**request.spec.params, "opcode": "data", "direction": "to"})
    hop = hop_of(request)
    if link is None or link.rnic is None or hop.far != link.b.node:
        raise UsageError(f"{request.where}.target: data is corrupted at a receiver; name an RNIC, or its port")
    match, late_binding = matches(request)
    via = device_of(request)
    # Packets that were put back carry ECT(1): the rule must not take them again.
    rules = ruleset(request, hop, ["ip ecn != ect1", *match], f'counter name "hits" fwd to "{via}"')
    args = {**hop_request(request, hop, rules)["args"], "via": via}
    change = f"{ip(hop.place.netns)} link"
    return Mechanism(
        place=hop.place,
        request=holder_request(request, "tamper", args, claims=f"{hop.place.name}/{table_of(request)}"),
        steps=(
            Step(do=f"{change} add {via} mtu 65000 up type dummy", undo=f"{change} del {via}"),
            Step(do=f"# change what comes out of {via}, and send it out of {hop.port.netdev}", undo="kill %1"),
            *hop_steps(request, hop, rules),
        ),
        must_move=(
            Witness(any_of=(f"{hop.far}/ip.InECT1Pkts",)),
            Witness(any_of=(f"{link.b.node}/{link.rnic}.duplicate_request",)),
        ),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"device": hop.port.netdev, "hook": hop.hook},
        late_binding=late_binding,
        complete_after=one_packet(request),
        selection=selection_of(request),
    )


BY_KIND: Mapping[str, Callable[[Request], Mechanism]] = {
    "data.corrupt": _corrupt,
}
