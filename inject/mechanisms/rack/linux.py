"""Rack switches that are Linux machines with FRR: the software hop and the routing daemons, as in a soft lab.

Such a machine, with two or more NICs between a host and the rest of the fabric, can do packet faults that an ASIC
cannot: its kernel forwards every packet. The mechanisms are those of a soft switch
(`faultbed.inject.mechanisms.soft`); the witnesses differ. A hardware RNIC's packets bypass the IP layer of its host,
so only Linux switches count the mark of a detour (ECT(1)), and only the RNIC's own counter shows a congestion mark
(CE).

Packets that bypass the kernel (switchdev, tc offload) are not hit, and a fault without hits has not fired. Not yet run
on hardware; run over soft machines (tests/soft/test_linux_box.py).
"""

from __future__ import annotations

import dataclasses

from faultbed.inject.mechanisms import soft
from faultbed.inject.mechanisms.mechanism import (
    Mechanism,
    Place,
    Request,
    Step,
    Witness,
    flap_edges,
    holder_request,
    link_of,
)
from faultbed.inject.mechanisms.rack.rack_mechanism import (
    RackMechanism,
    ends_on_paths,
    hardware_counter,
    port_down_pattern,
)
from faultbed.inject.mechanisms.soft.hop import counters_of_ends
from faultbed.testbed.errors import Unsupported

__all__ = ["MECHANISMS", "is_linux", "resolve"]

SYS_NET = "/sys/class/net"
_HOP = "a Linux switch (FRR): nftables"
_DETOUR = f"{_HOP}, and a detour of its own"
_VTYSH = "a Linux switch (FRR): vtysh"

MECHANISMS = (
    *(RackMechanism(kind=kind, fidelity="real", by="a Linux switch: ip link") for kind in ("link.down", "link.flap")),
    RackMechanism(kind="link.oneway", fidelity="emulated", by=_HOP),
    RackMechanism(kind="link.rate", fidelity="emulated", by=_DETOUR),
    RackMechanism(kind="link.mtu", fidelity="real", by="a Linux switch (FRR): ip link"),
    *(RackMechanism(kind=f"packet.{name}", fidelity="real", by=_HOP) for name in ("drop", "mark", "corrupt", "forge")),
    *(RackMechanism(kind=f"packet.{name}", fidelity="real", by=_DETOUR) for name in ("delay", "reorder", "duplicate")),
    RackMechanism(kind="data.corrupt", fidelity="emulated", by=_HOP),
    RackMechanism(kind="congestion.shallow-queue", fidelity="emulated", by=_DETOUR),
    RackMechanism(kind="congestion.hash-collision", fidelity="emulated", by="a Linux switch (FRR): a routing rule"),
    RackMechanism(kind="switch.hash-policy", fidelity="real", by="a Linux switch (FRR): sysctl"),
    *(RackMechanism(kind=f"switch.{name}", fidelity="real", by=_VTYSH) for name in ("bgp-reset", "withdraw", "drain")),
)
_KINDS = {mechanism.kind for mechanism in MECHANISMS}

# Kinds that work on every Linux switch with FRR, whether its kernel or its ASIC forwards packets.
_OF_ANY_LINUX = {"link.down", "link.flap", "switch.bgp-reset", "switch.withdraw", "switch.drain"}
# Kinds that watchfrr undoes: it supervises FRR's daemons on a switch that is a machine of its own.
_SUPERVISED = {
    "switch.bgp-kill": "watchfrr starts a killed bgpd again at once",
    "switch.freeze": "watchfrr starts a silent bgpd again",
}
# Only rxe has these counters.
_RXE_ALONE = {"send_err"}
# Counters of the RNIC at the end of the link: the fallback witness if no IP layer counts the marked packets.
_AT_THE_RNIC = {
    "link.rate": ("out_of_seq_request", "completer_retry_err", "duplicate_request"),
    "packet.duplicate": ("duplicate_request", "out_of_seq_request"),
}


def is_linux(request: Request) -> bool:
    """Return whether the switch at which this fault acts is a Linux machine."""
    switch = request.topology.switch_by_name.get(_acting_node(request))
    return switch is not None and switch.is_linux


def resolve(request: Request) -> Mechanism:
    """Return the mechanism of a fault at a Linux switch: place, commands and witnesses.

    Raises:
        UsageError: the parameters contradict each other.
        Unsupported: the switch cannot do it, or no counter would show it.
    """
    switch = request.topology.switch_by_name[_acting_node(request)]
    lacks = f"{request.where}: {request.spec.kind} is not supported on this lab: {switch.name} runs {switch.nos}"
    if request.spec.kind not in _KINDS:
        raise Unsupported(f"{lacks}, and {_SUPERVISED.get(request.spec.kind, 'only SONiC has a mechanism')}")
    if not switch.forwards_in_kernel and request.spec.kind not in _OF_ANY_LINUX:
        raise Unsupported(f"{lacks}, and its ASIC forwards packets, not its kernel; target another switch")
    if request.spec.kind in ("link.down", "link.flap"):
        return _down(request)
    mechanism = soft.resolve(request)
    witnesses = [
        Witness(any_of=_at_target(request, _on_rack(request, witness.any_of)), at_least=witness.at_least)
        for witness in mechanism.must_move
    ]
    usable = tuple(witness for witness in witnesses if witness.any_of)
    if not usable and request.spec.kind in _AT_THE_RNIC:
        fallback = _at_target(request, _on_rack(request, counters_of_ends(request, *_AT_THE_RNIC[request.spec.kind])))
        usable = (Witness(any_of=fallback),) if fallback else ()
    if not usable:
        raise Unsupported(
            f"{request.where}: {request.spec.kind} on {request.target.text} is not supported on this lab: no counter "
            "of a hardware RNIC shows it; target a port where a Linux switch receives the packets (`direction` from, "
            "or an uplink)"
        )
    return dataclasses.replace(mechanism, must_move=usable, must_not_move=_on_rack(request, mechanism.must_not_move))


def _acting_node(request: Request) -> str:
    """Return the node at which a fault acts: the switch at the other end of an RNIC's link, or the target's node."""
    link = request.target.link
    return link.a.node if request.target.kind == "rnic" and link is not None else request.target.node


def _at_target(request: Request, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the counters at a fault's target and on the paths that use it; other jobs move the others."""
    rnics, acting = set(ends_on_paths(request)), _acting_node(request)
    switches = {acting, *(link.other(acting).node for link in request.topology.links_of(acting))}
    hosts = {rnic.partition("/")[0] for rnic in rnics}
    names = {f"{host.name}/{rnic.name}" for host in request.topology.hosts for rnic in host.rnics}
    return tuple(
        key
        for key in keys
        if (device := key.rpartition(".")[0]) in rnics
        or (device not in names and key.partition("/")[0] in switches | hosts)
    )


def _on_rack(request: Request, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return a soft lab's counters by their names on this lab; those without a counterpart are left out."""
    link = request.target.link
    names: list[str] = []
    for key in keys:
        node, _, name = key.partition("/")
        host = request.topology.host_by_name.get(node)
        device, _, counter = name.rpartition(".")
        if host is None:
            # The kernel does not count what an ASIC forwards.
            in_kernel = request.topology.switch_by_name[node].forwards_in_kernel
            if in_kernel or counter.startswith("carrier") or device == "tcp":
                names.append(key)
        elif name == "ip.InCEPkts":
            at_link = link.rnic if link is not None and link.b.node == node else None
            names += [
                f"{node}/{rnic.name}.np_ecn_marked_roce_packets"
                for rnic in host.rnics
                if not at_link or rnic.name == at_link
            ]
        elif device != "ip" and counter not in _RXE_ALONE:
            names.append(hardware_counter(key))
    return tuple(dict.fromkeys(names))


def _down(request: Request) -> Mechanism:
    """Take a port with a real cable down: the far end of the cable loses its carrier.

    `ip link set down` does not reach the wire of a ConnectX whose firmware keeps its ports up: RoCE continued in all
    three recorded trials with a ConnectX-6. The holder therefore reads that setting first, as for an RNIC's port.
    """
    edges = flap_edges(request)
    link, port = link_of(request)
    far, state = link.other(port.node), f"{port.node}/{port.netdev}"
    command = f"ip link set dev {port.netdev}"
    device, setting = f"{SYS_NET}/{port.netdev}/device", "KEEP_ETH_LINK_UP_P"
    look = (
        f"case $(readlink {device}/driver) in */mlx5_core) ;; *) echo no mlx5; exit;; esac; "
        f"at=$(basename $(readlink -f {device})); "
        "tool=$(command -v mlxconfig || command -v mstconfig || echo mlxconfig); "
        f"$tool -d $at -e query {setting}$((${{at##*.}} + 1))"
    )
    kept = (
        f"{port.node}:{port.netdev} is a ConnectX, and its firmware keeps the port up, or does not report it: set "
        f"{setting}1=0 (or {setting}2=0 for PCI function .1, the card's second port) by mlxconfig (package mstflint) "
        f"and reset the firmware, use link.oneway at this port, or take down the other end of its cable: "
        f"{far.node}:{far.netdev}"
    )
    return Mechanism(
        place=Place(node=port.node),
        request=holder_request(
            request,
            "link",
            {
                "netns": None,
                "device": port.netdev,
                "able": [["sh", "-c", look], f"^no mlx5$|{port_down_pattern(setting + '[0-9]+')}", kept],
            },
            claims=state,
            edges=edges,
        ),
        steps=(Step(do=f"{command} down", undo=f"{command} up"),),
        must_move=(
            Witness(any_of=(f"{far.node}/{far.netdev}.carrier_changes",), at_least=sum(bool(on) for _, on in edges)),
        ),
        must_not_move=(),
        restored=((f"{state}.carrier", 1),),
        shows={"device": port.netdev},
    )
