"""Switches of racks that are Linux machines with FRR: the software hop and the routing daemons, as in a soft lab.

Such a machine, with two RNICs or more between a host and the rest of the fabric, makes packet faults exact where an
ASIC has none: everything that it forwards passes its kernel. What is done there is what `inject.mechanisms.soft` does
in a soft switch; what differs is who can tell of it. A hardware RNIC's packets pass no IP layer of its host, so that
the dye (ECT(1)) of a detour is seen by Linux switches only, and a mark (CE) by the RNIC's own counter.

Packets must not pass the kernel by (switchdev, tc offload): a fault that hits none has not fired. Not yet run on
hardware; run over soft machines (tests/soft/test_linux_box.py).
"""

from __future__ import annotations

import dataclasses

from inject.mechanisms import soft
from inject.mechanisms.mechanism import Place, Request, Shot, Step, Witness, held, link_of, trains
from inject.mechanisms.rack.rack_mechanism import Way, hardware
from inject.mechanisms.soft.hop import counters_of_ends
from testbed.errors import Unsupported

__all__ = ["WAYS", "is_linux", "take"]

_HOP = "a Linux switch (FRR): nftables"
_DETOUR = f"{_HOP}, and a detour of its own"
_VTYSH = "a Linux switch (FRR): vtysh"

WAYS = (
    *(Way(kind=kind, fidelity="real", by="a Linux switch: ip link") for kind in ("link.down", "link.flap")),
    Way(kind="link.oneway", fidelity="emulated", by=_HOP),
    Way(kind="link.rate", fidelity="emulated", by=_DETOUR),
    Way(kind="link.mtu", fidelity="real", by="a Linux switch (FRR): ip link"),
    *(Way(kind=f"packet.{name}", fidelity="real", by=_HOP) for name in ("drop", "mark", "corrupt", "forge")),
    *(Way(kind=f"packet.{name}", fidelity="real", by=_DETOUR) for name in ("delay", "reorder", "duplicate")),
    Way(kind="data.corrupt", fidelity="emulated", by=_HOP),
    Way(kind="congestion.shallow-queue", fidelity="emulated", by=_DETOUR),
    Way(kind="congestion.hash-collision", fidelity="emulated", by="a Linux switch (FRR): a routing rule"),
    Way(kind="switch.hash-policy", fidelity="real", by="a Linux switch (FRR): sysctl"),
    *(Way(kind=f"switch.{name}", fidelity="real", by=_VTYSH) for name in ("bgp-reset", "withdraw", "drain")),
)
_KINDS = {way.kind for way in WAYS}

# What FRR and ports do whoever forwards.
_OF_ANY_LINUX = {"link.down", "link.flap", "switch.bgp-reset", "switch.withdraw", "switch.drain"}
# On a machine FRR has a guardian.
_SUPERVISED = {
    "switch.bgp-kill": "watchfrr starts a killed bgpd again at once",
    "switch.freeze": "watchfrr starts a silent bgpd again",
}
# Only rxe counts these.
_RXE_ALONE = {"send_err"}
# The last witness where no IP layer sees a dyed packet: what the RNIC at its end makes of it.
_AT_THE_RNIC = {
    "link.rate": ("out_of_seq_request", "completer_retry_err", "duplicate_request"),
    "packet.duplicate": ("duplicate_request", "out_of_seq_request"),
}


def is_linux(asked: Request) -> bool:
    """Whether the switch where this would be done is a Linux machine."""
    switch = asked.topology.switch_by_name.get(_acting(asked))
    return switch is not None and switch.is_linux


def take(asked: Request) -> Shot:
    """Choose place, commands and witnesses for a fault at a Linux switch.

    Raises:
        UsageError: parameters that do not go together.
        Unsupported: the switch has no way, or nobody could tell of it.
    """
    switch = asked.topology.switch_by_name[_acting(asked)]
    lacks = f"{asked.where}: {asked.kind} is not supported on this lab: {switch.name} runs {switch.nos}"
    if asked.kind not in _KINDS:
        raise Unsupported(f"{lacks}, and {_SUPERVISED.get(asked.kind, 'only SONiC has a way')}")
    if not switch.forwards_in_kernel and asked.kind not in _OF_ANY_LINUX:
        raise Unsupported(f"{lacks}, and its ASIC forwards: no packet passes its kernel")
    if asked.kind in ("link.down", "link.flap"):
        return _down(asked)
    shot = soft.take(asked)
    witnesses = [Witness(any_of=_seen(asked, one.any_of), at_least=one.at_least) for one in shot.must_move]
    seen = tuple(one for one in witnesses if one.any_of)
    if not seen and asked.kind in _AT_THE_RNIC:
        told = _seen(asked, counters_of_ends(asked, *_AT_THE_RNIC[asked.kind]))
        seen = (Witness(any_of=told),) if told else ()
    if not seen:
        raise Unsupported(
            f"{asked.where}: {asked.kind} on {asked.target.text} is not supported on this lab: no counter of a "
            "hardware RNIC tells of it; aim it where a Linux switch takes packets in (`direction` from, or an uplink)"
        )
    return dataclasses.replace(shot, must_move=seen, must_not_move=_seen(asked, shot.must_not_move))


def _acting(asked: Request) -> str:
    """Where a fault of the target would be done: the switch at an RNIC's cable, else the target's own machine."""
    link = asked.target.link
    return link.a.node if asked.target.kind == "rnic" and link is not None else asked.target.node


def _seen(asked: Request, keys: tuple[str, ...]) -> tuple[str, ...]:
    """A soft lab's counters by the names that they have here; those that nobody has are left out."""
    link = asked.target.link
    found: list[str] = []
    for key in keys:
        node, _, name = key.partition("/")
        host = asked.topology.host_by_name.get(node)
        device, _, counter = name.rpartition(".")
        if host is None:
            # What an ASIC forwards is not counted by the kernel beside it.
            in_kernel = asked.topology.switch_by_name[node].forwards_in_kernel
            if in_kernel or counter.startswith("carrier") or device == "tcp":
                found.append(key)
        elif name == "ip.InCEPkts":
            its = {link.rnic} if link is not None and link.rnic and link.b.node == node else None
            found += [f"{node}/{x.name}.np_ecn_marked_roce_packets" for x in host.rnics if not its or x.name in its]
        elif device != "ip" and counter not in _RXE_ALONE:
            found.append(hardware(key))
    return tuple(dict.fromkeys(found))


def _down(asked: Request) -> Shot:
    """A port with a cable: what is at its other end loses the carrier, too."""
    edges = trains(asked) if asked.kind == "link.flap" else [[0.0, True]]
    link, port = link_of(asked)
    far, state = link.other(port.node), f"{port.node}/{port.netdev}"
    command = f"ip link set dev {port.netdev}"
    return Shot(
        place=Place(node=port.node),
        request=held(asked, "link", {"netns": None, "device": port.netdev}, claims=state, edges=edges),
        steps=(Step(do=f"{command} down", undo=f"{command} up"),),
        must_move=(
            Witness(any_of=(f"{far.node}/{far.netdev}.carrier_changes",), at_least=sum(bool(on) for _, on in edges)),
        ),
        must_not_move=(),
        restored=((f"{state}.carrier", 1),),
        shows={"device": port.netdev},
    )
