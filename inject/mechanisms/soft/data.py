"""Faults of data: packets taken out of the hop, changed with their ICRC made anew, and put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from inject.mechanisms.mechanism import Request, Shot, Step, Witness, held, rnic_counters
from inject.mechanisms.soft.hop import (
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
from inject.node.inside import ip
from testbed.errors import UsageError

__all__ = ["BY_KIND"]


def _corrupt(asked: Request) -> Shot:
    if all(asked.params.get(name) is None for name in ("share", "every", "psn")):
        raise UsageError(f"{asked.where}: data.corrupt takes share, every or psn")
    link = asked.target.link
    asked = dataclasses.replace(asked, params={**asked.params, "opcode": "data", "direction": "to"})
    hop = hop_of(asked)
    if link is None or link.rnic is None or hop.far != link.b.node:
        raise UsageError(f"{asked.where}.target: data is wrong at a receiver; take an RNIC, or the port that faces it")
    match, learn = matches(asked)
    via = device_of(asked)
    # What was put back is dyed, and never taken out again.
    rules = ruleset(asked, hop, ["ip ecn != ect1", *match], f'counter name "hits" fwd to "{via}"')
    args = {**hop_request(asked, hop, rules)["args"], "via": via}
    change = f"{ip(hop.place.netns)} link"
    return Shot(
        place=hop.place,
        request=held(asked, "tamper", args, claims=f"{hop.place.name}/{table_of(asked)}"),
        steps=(
            Step(do=f"{change} add {via} mtu 65000 up type dummy", undo=f"{change} del {via}"),
            Step(do=f"# change what comes out of {via}, and send it out of {hop.port.netdev}", undo="kill %1"),
            *hop_steps(asked, hop, rules),
        ),
        must_move=(
            Witness(any_of=(f"{hop.far}/ip.InECT1Pkts",)),
            Witness(any_of=(f"{link.b.node}/{link.rnic}.duplicate_request",)),
        ),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"device": hop.port.netdev, "hook": hop.hook},
        learn=learn,
        complete_after=one_packet(asked),
        selection=selection_of(asked),
    )


BY_KIND: Mapping[str, Callable[[Request], Shot]] = {
    "data.corrupt": _corrupt,
}
