"""The software hop: the switch port where a packet fault acts, and the nftables rules that select its packets.

The hop is the switch port that faces the target: its egress for packets towards the target, its ingress for packets
from it. nftables selects the packets, so that one grammar of filters serves every packet fault, and so that packets
that are not selected keep their usual path.

What nftables cannot do (delay, duplicate, drop in bursts, limit a rate) is done on a *detour*: an ifb device that
belongs to the fault, with a queue discipline that does it. Selected packets take the detour and come back to the port;
the port's own queue stays as it is (ifb: drivers/net/ifb.c).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faultbed.inject.mechanisms.mechanism import (
    LateBinding,
    Place,
    Request,
    Step,
    holder_request,
    link_of,
    on_switch,
    rnic_counters,
)
from faultbed.inject.node.inside import inside, ip
from faultbed.inject.node.network.detour import OWN_CLSACT_PRIO, REDIRECTION, SHARED_CLSACT_PRIO
from faultbed.inject.selection import Selection, by_share
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Port, Target
from faultbed.testbed.packets.bth import ROCE_PORT

__all__ = [
    "ACTS",
    "CORRUPTED_ID",
    "LOSS_COUNTERS",
    "OPCODES",
    "Hop",
    "counters_of_ends",
    "detour_request",
    "detour_steps",
    "ends_of",
    "hop_of",
    "hop_request",
    "hop_steps",
    "matches",
    "one_packet",
    "ruleset",
    "selection_of",
]

MARK = 0xFB000001
"""Firewall mark of packets that tc redirects to a detour; `heal` recognises it."""

# Base transport header behind the UDP header: opcode in byte 0, destination QP in bytes 5-7, PSN in bytes 9-11
# (InfiniBand 9.2); AETH syndrome in the byte after it (9.3.4): 000xxxxx ACK, 001xxxxx RNR NAK, 011xxxxx NAK.
_OPCODE, _QP, _PSN, _SYNDROME = "@th,64,8", "@th,104,24", "@th,136,24", "@th,160,8"
OPCODES: Mapping[str, tuple[str, ...]] = {
    "any": (),
    "data": (f"{_OPCODE} {{ 0x00-0x0b, 0x16-0x17 }}",),
    # A message's packets by their place: SEND and RDMA WRITE, with immediate data or invalidate.
    "data-first": (f"{_OPCODE} {{ 0x00, 0x06 }}",),
    "data-middle": (f"{_OPCODE} {{ 0x01, 0x07 }}",),
    "data-last": (f"{_OPCODE} {{ 0x02-0x03, 0x08-0x09, 0x16 }}",),
    "data-only": (f"{_OPCODE} {{ 0x04-0x05, 0x0a-0x0b, 0x17 }}",),
    "ack": (f"{_OPCODE} 0x11", f"{_SYNDROME} < 0x20"),
    "nak": (f"{_OPCODE} 0x11", f"{_SYNDROME} 0x60-0x7f"),
    "rnr-nak": (f"{_OPCODE} 0x11", f"{_SYNDROME} 0x20-0x3f"),
    "cnp": (f"{_OPCODE} 0x81",),
    "read-request": (f"{_OPCODE} 0x0c",),
    "read-response": (f"{_OPCODE} 0x0d-0x10",),
    "atomic": (f"{_OPCODE} 0x12-0x14",),
}
"""RC opcodes by class (InfiniBand 9.2.1, table 38); CNP: annex A17.9.3."""

LOSS_COUNTERS = ("out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "duplicate_request")
"""RNIC counters that show a loss: a gap at the receiver, a timeout at the sender, a duplicate after a lost ACK."""

CORRUPTED_ID = 0xBEEF
"""The IP identification that `packet.corrupt` writes."""

PASSED = 'counter name "passed"'
"""nftables expression that counts the packets from which a share, or every n-th, is taken."""

_LONG_SET = re.compile(r"\{ ((?:\d+, ){7}\d+)(?:, \d+){8,} \}")

ACTS: Mapping[str, str] = {
    "drop": 'counter name "hits" drop',
    # rxe ignores CE: only the receiver's IP layer counts it.
    "mark": 'ip ecn set ce counter name "hits"',
    # Only the ICRC covers the identification; nothing else in RoCE reads it (InfiniBand annex A17.3.3).
    "corrupt": f'ip id set {CORRUPTED_ID:#x} counter name "hits"',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A switch port, its nftables hook, and the node that the packets passing there go to (None: any node)."""

    place: Place
    port: Port
    hook: str
    far: str | None


def hop_of(request: Request) -> Hop:
    """Return the hop of a packet fault."""
    link, named = link_of(request)
    towards = request.spec.params.get("direction", "to") == "to"
    port = link.a if request.target.kind == "rnic" else named
    far = link.other(port.node).node if towards else None
    return Hop(place=on_switch(request, port.node), port=port, hook="egress" if towards else "ingress", far=far)


def matches(request: Request) -> tuple[list[str], LateBinding | None]:
    """Return the nftables expressions that select a fault's packets, and what is bound only when it is armed.

    Raises:
        UsageError: the parameters contradict each other, or select packets of no RNIC.
    """
    _check_selection(request)
    params = request.spec.params
    psn, qp, every = (params.get(name) for name in ("psn", "qp", "every"))
    late_binding = _late_binding(request)
    ahead = late_binding.psn_ahead if late_binding is not None else None
    match = [*_ends(request), f"udp dport {ROCE_PORT}", *OPCODES[params.get("opcode", "any")]]
    if qp is not None:
        match.append(f"{_QP} {'@qp@' if qp == 'any' else qp}")
    if psn is not None:
        # numgen counts the transmissions of this packet from 0 and wraps after 2^31: only the requested one matches.
        match += [f"{_PSN} {'@psn@' if ahead is not None else psn}", f"numgen inc mod {1 << 31} {params['round'] - 1}"]
    elif every is not None:
        match += [PASSED, f"numgen inc mod {every} {every - 1}"]
    elif (selection := selection_of(request)) is not None:
        match += [PASSED, selection.expression()]
    return match, late_binding


def _check_selection(request: Request) -> None:
    """Refuse parameters that select packets in contradictory ways."""
    params, where = request.spec.params, request.where
    psn, share, every = (params.get(name) for name in ("psn", "share", "every"))
    if psn is not None and params.get("qp") is None:
        raise UsageError(f"{where}.psn: a PSN means nothing without its QP; add qp (or qp = any)")
    if sum(parameter is not None for parameter in (psn, share, every)) > 1:
        raise UsageError(f"{where}: {request.spec.kind} takes only one of share, every and psn; remove the others")
    if psn is None and params.get("round", 1) != 1:
        raise UsageError(f"{where}.round: it counts the transmissions of one packet; add psn and qp")


def _late_binding(request: Request) -> LateBinding | None:
    """Return what is known only when the fault is armed: a PSN relative to the current one, or a QP by its place."""
    psn, qp = request.spec.params.get("psn"), request.spec.params.get("qp")
    ahead = int(psn) if isinstance(psn, str) else None
    if ahead is None and not isinstance(qp, str):
        return None
    link = request.target.link
    if link is None or link.rnic is None or request.spec.params["direction"] != "to":
        raise UsageError(
            f"{request.where}: a relative psn, or qp = any, needs one receiving RNIC; name one, with direction = to"
        )
    return LateBinding(host=link.b.node, rnic=link.rnic, qp=qp if qp is not None else "any", psn_ahead=ahead)


def one_packet(request: Request) -> int | None:
    """Return how many hits complete a packet fault: 1 for one packet by its PSN, None for all in the window."""
    return 1 if request.spec.params.get("psn") is not None else None


def selection_of(request: Request) -> Selection | None:
    """Return which packets the parameter `share` takes; None without a share, or if it is 1 (all packets)."""
    share = request.spec.params.get("share")
    return by_share(share, request.spec.seed) if share is not None and share < 1 else None


def ends_of(request: Request) -> dict[str, Target]:
    """Return the RNICs that `src` and `dst` name, if they are set.

    Raises:
        UsageError: a name is no RNIC of this lab, or no packet between these RNICs passes the hop.
    """
    params, where, link = request.spec.params, request.where, request.target.link
    ends: dict[str, Target] = {}
    for name in ("src", "dst"):
        if (text := params.get(name)) is None:
            continue
        try:
            end = request.topology.resolve(text)
        except UsageError as error:
            raise UsageError(f"{where}.{name}: {error}") from None
        if end.rnic is None:
            raise UsageError(f'{where}.{name}: "{text}" is a {end.kind}, not an RNIC; name one, such as host1:rxe0')
        end_at_link = "dst" if params.get("direction", "to") == "to" else "src"
        if link is not None and link.rnic is not None and name == end_at_link and end.link != link:
            raise UsageError(
                f"{where}.{name}: no packet {'to' if name == 'dst' else 'of'} {text} passes the link of "
                f"{link.b.node}:{link.rnic}; remove it or change the target"
            )
        ends[name] = end
    if len({end.text for end in ends.values()}) == 1 < len(ends):
        raise UsageError(f"{where}.dst: {params['dst']} sends nothing to itself over the fabric; change it")
    if "src" in ends and isinstance(params.get("qp"), str):
        raise UsageError(f"{where}.src: a connected QP of that number may belong to another sender; set qp to a number")
    return ends


def _ends(request: Request) -> list[str]:
    fields = {"src": "saddr", "dst": "daddr"}
    return [f"ip {fields[name]} {end.rnic.ip}" for name, end in ends_of(request).items() if end.rnic is not None]


def counters_of_ends(request: Request, *names: str) -> tuple[str, ...]:
    """Return counters of the RNICs whose packets may pass the hop; known ends of these packets come first.

    Known ends are the RNIC at the link, `src` and `dst`. If both ends are known, no other RNIC can count the packets.
    If one is known, the other RNICs of its host cannot either: soft RoCE sends nothing to its own host over the fabric.
    """
    link = request.target.link
    known = [f"{end.node}/{end.rnic.name}" for end in ends_of(request).values() if end.rnic is not None]
    if link is not None and link.rnic is not None:
        known.insert(0, f"{link.b.node}/{link.rnic}")
    known = list(dict.fromkeys(known))
    sure = tuple(f"{end}.{name}" for end in known for name in names)
    if len(known) > 1:
        return sure
    host = known[0].partition("/")[0] if known else None
    return (*sure, *rnic_counters(request.topology, *names, but=host))


def table_of(request: Request) -> str:
    """Return the name of the fault's nftables table; `heal` recognises the prefix `faultbed_`."""
    return f"faultbed_{_digest(request)}"


def device_of(request: Request) -> str:
    """Return the name of the fault's ifb device; `heal` recognises the prefix `fbvia`."""
    return f"fbvia{_digest(request)}"


def ruleset(request: Request, hop: Hop, match: list[str], act: str) -> str:
    """Return an nftables table with one rule."""
    passed = "  counter passed { }\n" if PASSED in match else ""
    return (
        f"table netdev {table_of(request)} {{\n  flags owner\n  counter hits {{ }}\n{passed}  chain hop {{\n"
        f'    type filter hook {hop.hook} device "{hop.port.netdev}" priority -300; policy accept;\n'
        f"    {' '.join([*match, act])}\n  }}\n}}\n"
    )


def hop_request(request: Request, hop: Hop, rules: str) -> dict[str, Any]:
    """Return the holder request of a fault that only needs an nftables table."""
    table = table_of(request)
    args = {
        "netns": hop.place.netns,
        "device": hop.port.netdev,
        "hook": hop.hook,
        "table": table,
        "ruleset": rules,
    }
    return holder_request(request, "hop", args, claims=f"{hop.place.name}/{table}")


def hop_steps(request: Request, hop: Hop, rules: str) -> tuple[Step, ...]:
    """Return the commands for people. A long set of positions is abbreviated here; the request has all of them."""
    nft = f"{inside(hop.place.netns)}nft"
    rules = _LONG_SET.sub(r"{ \1, ... }", rules)
    return (
        Step(
            do=f"{nft} -f - <<'END'\n{rules}END",
            undo=f"{nft} delete table netdev {table_of(request)}   # or the holder's socket closes",
        ),
    )


def detour_act(request: Request, hop: Hop) -> str:
    """Return the nftables statements that send a packet on the detour.

    They mark the packet with ECT(1), which nothing else uses here and rxe ignores. The receiver's IP layer counts that
    mark, which proves that packets took the detour and arrived. On egress they also set a firewall mark, by which tc
    redirects the packet. On ingress they forward the packet to the detour's device themselves.
    """
    set_ect1 = 'ip ecn set ect1 counter name "hits"'
    if hop.hook == "egress":
        return f"{set_ect1} meta mark set {MARK:#x}"
    return f'{set_ect1} fwd to "{device_of(request)}"'


def detour_request(
    request: Request, hop: Hop, rules: str, *, queue: str, count: str, drain_ms: float
) -> dict[str, Any]:
    """Return the holder request of a fault on a detour with the queue discipline `queue`.

    `count` names what counts as a hit: `hits` (packets sent on the detour), or `drops` or `overlimits` of the queue.
    `drain_ms` is how long the last packet may stay in the queue.
    """
    args = {
        **hop_request(request, hop, rules)["args"],
        "via": device_of(request),
        "mark": MARK,
        "queue": queue,
        "count": count,
        "drain_s": drain_ms / 1000,
    }
    # On egress the redirection is the one filter of the port's clsact.
    claims = (
        f"{hop.place.name}/{hop.port.netdev}/detour" if hop.hook == "egress" else f"{hop.place.name}/{args['table']}"
    )
    return holder_request(request, "detour", args, claims=claims)


def detour_steps(request: Request, hop: Hop, rules: str, *, queue: str) -> tuple[Step, ...]:
    """Return the commands for people: device, queue, redirection (on egress only) and rules."""
    netns, via, port = hop.place.netns, device_of(request), hop.port.netdev
    tc = f"tc -n {netns}" if netns else "tc"
    steps = [
        Step(do=f"{ip(netns)} link add {via} up type ifb", undo=f"{ip(netns)} link del {via}"),
        Step(do=f"{tc} qdisc add dev {via} root {queue}", undo="# removed with the device"),
    ]
    if hop.hook == "egress":
        if netns:  # a port of a soft switch has a clsact
            prio = SHARED_CLSACT_PRIO
            undo = f"{tc} filter del dev {port} egress protocol ip prio {prio}"
        else:
            prio, undo = OWN_CLSACT_PRIO, "# removed with clsact"
            condition = "# unless it exists already: adding a clsact drops the packets that are passing the port"
            steps.append(
                Step(do=f"{tc} qdisc add dev {port} clsact   {condition}", undo=f"{tc} qdisc del dev {port} clsact")
            )
        redirection = REDIRECTION.format(prio=prio, mark=MARK, via=via)
        steps.append(Step(do=f"{tc} filter add dev {port} egress {redirection}", undo=undo))
    return (*steps, *hop_steps(request, hop, rules))


def _digest(request: Request) -> str:
    return hashlib.sha256(request.id.encode()).hexdigest()[:8]
