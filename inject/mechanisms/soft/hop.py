"""The software hop: where packets of a fault pass, how they are told from all others, and the nftables rules for it.

The place is the switch port that faces the target: towards the target is its egress, from it its ingress. Everything
is selected by nftables, so that one grammar of filters serves every packet fault, and so that a packet that is not
selected takes exactly the way it would have taken.

What nftables cannot do itself (delay, duplicate, drop in bursts, limit a rate) is done on a *detour*: an ifb device
of the fault's own, with the queue that does it. Selected packets take the detour and come back to the port; the port's
own queue stays as it is (ifb: drivers/net/ifb.c).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inject.mechanisms.mechanism import Learn, Place, Request, Step, held, link_of, on_switch, rnic_counters
from inject.node.inside import inside, ip
from inject.node.network.detour import GUEST, OWN, REDIRECTION
from inject.selection import Selection, by_share
from testbed.errors import UsageError
from testbed.model.topology import Port, Target

__all__ = [
    "ACTS",
    "CORRUPTED_ID",
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

ROCE_PORT = 4791
MARK = 0xFB000001

# Base transport header behind the UDP header: opcode in byte 0, destination QP in bytes 5-7, PSN in bytes 9-11
# (InfiniBand 9.2); AETH syndrome in the byte after it (9.3.4): 000xxxxx ACK, 001xxxxx RNR NAK, 011xxxxx NAK.
_OPCODE, _QP, _PSN, _SYNDROME = "@th,64,8", "@th,104,24", "@th,136,24", "@th,160,8"
OPCODES: Mapping[str, tuple[str, ...]] = {
    "any": (),
    "data": (f"{_OPCODE} {{ 0x00-0x0b, 0x16-0x17 }}",),
    "ack": (f"{_OPCODE} 0x11", f"{_SYNDROME} < 0x20"),
    "nak": (f"{_OPCODE} 0x11", f"{_SYNDROME} 0x60-0x7f"),
    "rnr-nak": (f"{_OPCODE} 0x11", f"{_SYNDROME} 0x20-0x3f"),
    "cnp": (f"{_OPCODE} 0x81",),
    "read-request": (f"{_OPCODE} 0x0c",),
    "read-response": (f"{_OPCODE} 0x0d-0x10",),
    "atomic": (f"{_OPCODE} 0x12-0x14",),
}
"""RC opcodes by class (InfiniBand 9.2.1, table 38); CNP: annex A17.9.3."""

CORRUPTED_ID = 0xBEEF
"""What `packet.corrupt` makes of the IP identification."""

PASSED = 'counter name "passed"'
"""Counts what a share, or every n-th, is taken of."""

_LONG_SET = re.compile(r"\{ ((?:\d+, ){7}\d+)(?:, \d+){8,} \}")

ACTS: Mapping[str, str] = {
    "drop": 'counter name "hits" drop',
    # rxe ignores CE: nothing but the receiver's IP layer shows it.
    "mark": 'ip ecn set ce counter name "hits"',
    # The identification is covered by the ICRC and by nothing else that RoCE looks at (InfiniBand annex A17.3.3).
    "corrupt": f'ip id set {CORRUPTED_ID:#x} counter name "hits"',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A switch port, its nftables hook, and the far end of what passes there (None: anywhere)."""

    place: Place
    port: Port
    hook: str
    far: str | None


def hop_of(asked: Request) -> Hop:
    """The place of a packet fault."""
    link, named = link_of(asked)
    towards = asked.params.get("direction", "to") == "to"
    port = link.a if asked.target.kind == "rnic" else named
    far = link.other(port.node).node if towards else None
    return Hop(place=on_switch(asked, port.node), port=port, hook="egress" if towards else "ingress", far=far)


def matches(asked: Request) -> tuple[list[str], Learn | None]:
    """The nftables expressions that select a fault's packets, and what has to be learned for them."""
    params, where = asked.params, asked.where
    psn, qp, share, every = (params.get(name) for name in ("psn", "qp", "share", "every"))
    if psn is not None and qp is None:
        raise UsageError(f"{where}.psn: a PSN means nothing without its QP; add qp (or qp = any)")
    if sum(x is not None for x in (psn, share, every)) > 1:
        raise UsageError(f"{where}: {asked.kind} takes either share, every or psn, not two of them")
    if psn is None and params.get("round", 1) != 1:
        raise UsageError(f"{where}.round: a transmission of which packet? add psn and qp")
    ahead = int(psn) if isinstance(psn, str) else None
    learn = None
    if ahead is not None or qp == "any":
        link = asked.target.link
        if link is None or link.rnic is None or params["direction"] != "to":
            raise UsageError(f"{where}: a relative psn, or qp = any, needs one receiving RNIC; aim `to` an RNIC")
        learn = Learn(host=link.b.node, rnic=link.rnic, qp=qp if qp is not None else "any", psn_ahead=ahead)
    match = [*_ends(asked), f"udp dport {ROCE_PORT}", *OPCODES[params.get("opcode", "any")]]
    if qp is not None:
        match.append(f"{_QP} {'@qp@' if qp == 'any' else qp}")
    if psn is not None:
        # Counted from 0: this transmission and no other, until 2^31 of them have come.
        match += [f"{_PSN} {'@psn@' if ahead is not None else psn}", f"numgen inc mod {1 << 31} {params['round'] - 1}"]
    elif every is not None:
        match += [PASSED, f"numgen inc mod {every} {every - 1}"]
    elif (selection := selection_of(asked)) is not None:
        match += [PASSED, selection.expression()]
    return match, learn


def one_packet(asked: Request) -> int | None:
    """Return how many hits complete a packet fault: 1 for one packet by its PSN, None for all that passes meanwhile."""
    return 1 if asked.params.get("psn") is not None else None


def selection_of(asked: Request) -> Selection | None:
    """Return the draw of the packets that a share takes; None without a share, or if it takes all."""
    share = asked.params.get("share")
    return by_share(share, asked.seed) if share is not None and share < 1 else None


def ends_of(asked: Request) -> dict[str, Target]:
    """The RNICs `src` and `dst`, those of them that were said.

    Raises:
        UsageError: one is no RNIC of this lab, or no such packet passes the hop.
    """
    params, where, link = asked.params, asked.where, asked.target.link
    found: dict[str, Target] = {}
    for name in ("src", "dst"):
        if (text := params.get(name)) is None:
            continue
        try:
            end = asked.topology.resolve(text)
        except UsageError as error:
            raise UsageError(f"{where}.{name}: {error}") from None
        if end.rnic is None:
            raise UsageError(f'{where}.{name}: "{text}" is a {end.kind}, not an RNIC; write one like host1:rxe0')
        alone = "dst" if params.get("direction", "to") == "to" else "src"
        if link is not None and link.rnic is not None and name == alone and end.link != link:
            raise UsageError(
                f"{where}.{name}: no packet {'to' if name == 'dst' else 'of'} {text} passes there: it is the link of "
                f"{link.b.node}:{link.rnic}"
            )
        found[name] = end
    if len({end.text for end in found.values()}) == 1 < len(found):
        raise UsageError(f"{where}.dst: {params['dst']} sends nothing to itself over the fabric")
    if "src" in found and params.get("qp") == "any":
        raise UsageError(f"{where}.src: the lowest connected QP may be of another sender; name the qp")
    return found


def _ends(asked: Request) -> list[str]:
    fields = {"src": "saddr", "dst": "daddr"}
    return [f"ip {fields[name]} {end.rnic.ip}" for name, end in ends_of(asked).items() if end.rnic is not None]


def counters_of_ends(asked: Request, *names: str) -> tuple[str, ...]:
    """Counters of the RNICs whose packets may pass the hop; first of those that are surely an end of each of them.

    The RNIC whose link it is, and `src` and `dst`. Where both ends are known, nobody else can tell of it; where one is,
    no other RNIC of its host: soft RoCE does not talk to itself over the fabric.
    """
    link = asked.target.link
    known = [f"{end.node}/{end.rnic.name}" for end in ends_of(asked).values() if end.rnic is not None]
    if link is not None and link.rnic is not None:
        known.insert(0, f"{link.b.node}/{link.rnic}")
    known = list(dict.fromkeys(known))
    sure = tuple(f"{end}.{name}" for end in known for name in names)
    if len(known) > 1:
        return sure
    host = known[0].partition("/")[0] if known else None
    return (*sure, *rnic_counters(asked.topology, *names, but=host))


def table_of(asked: Request) -> str:
    """The name of the fault's nftables table; `faultbed_` is the mark that `heal` goes by."""
    return f"faultbed_{_digest(asked)}"


def device_of(asked: Request) -> str:
    """The name of the fault's ifb device; `fbvia` is the mark that `heal` goes by."""
    return f"fbvia{_digest(asked)}"


def ruleset(asked: Request, hop: Hop, match: list[str], act: str) -> str:
    """A table with one rule."""
    passed = "  counter passed { }\n" if PASSED in match else ""
    return (
        f"table netdev {table_of(asked)} {{\n  flags owner\n  counter hits {{ }}\n{passed}  chain hop {{\n"
        f'    type filter hook {hop.hook} device "{hop.port.netdev}" priority -300; policy accept;\n'
        f"    {' '.join([*match, act])}\n  }}\n}}\n"
    )


def hop_request(asked: Request, hop: Hop, rules: str) -> dict[str, Any]:
    """The holder's request for a fault that nftables does alone."""
    table = table_of(asked)
    args = {
        "netns": hop.place.netns,
        "device": hop.port.netdev,
        "hook": hop.hook,
        "table": table,
        "ruleset": rules,
    }
    return held(asked, "hop", args, claims=f"{hop.place.name}/{table}")


def hop_steps(asked: Request, hop: Hop, rules: str) -> tuple[Step, ...]:
    """The same for people, without the many positions of a draw: those are in the request."""
    nft = f"{inside(hop.place.netns)}nft"
    rules = _LONG_SET.sub(r"{ \1, ... }", rules)
    return (
        Step(
            do=f"{nft} -f - <<'END'\n{rules}END",
            undo=f"{nft} delete table netdev {table_of(asked)}   # or the holder's socket closes",
        ),
    )


def detour_act(asked: Request, hop: Hop) -> str:
    """What the rule does with a packet that takes the detour.

    It is dyed with ECT(1), which nobody else uses here and rxe ignores: the receiver's IP layer counts it, and so is a
    witness that the packets went this way and arrived. Egress: a mark, by which tc redirects; ingress: straight on.
    """
    dye = 'ip ecn set ect1 counter name "hits"'
    return f"{dye} meta mark set {MARK:#x}" if hop.hook == "egress" else f'{dye} fwd to "{device_of(asked)}"'


def detour_request(asked: Request, hop: Hop, rules: str, *, queue: str, count: str, drain_ms: float) -> dict[str, Any]:
    """The holder's request for a fault on a detour with the queue discipline `queue`.

    `count` is what it is counted by: `hits` (packets sent there), or `drops` or `overlimits` of the queue; `drain_ms`
    how long the last packet may stay inside.
    """
    args = {
        **hop_request(asked, hop, rules)["args"],
        "via": device_of(asked),
        "mark": MARK,
        "queue": queue,
        "count": count,
        "drain_s": drain_ms / 1000,
    }
    # On egress the redirection is the one filter of the port's clsact.
    claims = (
        f"{hop.place.name}/{hop.port.netdev}/detour" if hop.hook == "egress" else f"{hop.place.name}/{args['table']}"
    )
    return held(asked, "detour", args, claims=claims)


def detour_steps(asked: Request, hop: Hop, rules: str, *, queue: str) -> tuple[Step, ...]:
    """The same for people."""
    netns, via, port = hop.place.netns, device_of(asked), hop.port.netdev
    tc = f"tc -n {netns}" if netns else "tc"
    steps = [
        Step(do=f"{ip(netns)} link add {via} up type ifb", undo=f"{ip(netns)} link del {via}"),
        Step(do=f"{tc} qdisc add dev {via} root {queue}", undo="# goes with the device"),
    ]
    if hop.hook == "egress":
        if netns:  # a port of a soft switch has a clsact
            prio, undo = GUEST, f"{tc} filter del dev {port} egress protocol ip prio {GUEST}"
        else:
            prio, undo = OWN, "# goes with clsact"
            making = f"{tc} qdisc add dev {port} clsact"
            losing = "# unless it has one, which stays: to make one loses what passes meanwhile"
            steps.append(Step(do=f"{making}   {losing}", undo=f"{tc} qdisc del dev {port} clsact"))
        redirection = REDIRECTION.format(prio=prio, mark=MARK, via=via)
        steps.append(Step(do=f"{tc} filter add dev {port} egress {redirection}", undo=undo))
    return (*steps, *hop_steps(asked, hop, rules))


def _digest(asked: Request) -> str:
    return hashlib.sha256(asked.id.encode()).hexdigest()[:8]
