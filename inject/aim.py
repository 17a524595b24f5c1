"""How each kind of fault is done in a soft lab: the place, the holder's request, the commands, the witnesses.

Pure. `take` is the only entrance; a new kind is one more function in `_BY_KIND`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from testbed.errors import Unsupported, UsageError
from testbed.topology import Port, Target, Topology

__all__ = ["Learn", "Place", "Request", "Shot", "Step", "Witness", "take"]

ROCE_PORT = 4791
CGROUP_ROOT = "/sys/fs/cgroup/faultbed.slice"
# A period this short lets compute bursts of a few milliseconds feel the limit; the kernel refuses a quota below 1 ms
# (kernel/sched/core.c, min_cfs_quota_period).
THROTTLE_PERIOD_US = 10_000
MIN_QUOTA_US = 1_000
MOST_FLAPS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the holder runs: on `node` (inside `netns`, if set), or on this machine beside QEMU (`local`)."""

    node: str
    netns: str | None = None
    local: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change and its revert, as commands that a person can read and type."""

    do: str
    undo: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """Counters of which one must move by `at_least` between just before arming and some time after clearing.

    The most telling come first: the first one that moved enough is named in the receipt.
    """

    any_of: tuple[str, ...]
    at_least: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn:
    """What has to be asked of an RNIC just before arming: its QP, and the PSN it expects next plus `psn_ahead`."""

    host: str
    rnic: str
    qp: int | str
    psn_ahead: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `take` needs to know of a fault that has been validated."""

    id: str
    kind: str
    target: Target
    for_s: float
    params: Mapping[str, Any]
    topology: Topology
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """How a fault is done. The fields are those of `inject.plan.PlannedFault`."""

    place: Place
    request: Mapping[str, Any]
    steps: tuple[Step, ...]
    must_move: tuple[Witness, ...]
    must_not_move: tuple[str, ...]
    restored: tuple[tuple[str, int], ...] = ()
    learn: Learn | None = None


def take(request: Request) -> Shot:
    """Choose place, commands and witnesses for a fault.

    Raises:
        UsageError: parameters that do not go together.
        Unsupported: nothing carries this target.
    """
    return _BY_KIND[request.kind](request)


def _holder(
    asked: Request, actuator: str, args: dict[str, Any], *, claims: str, edges: list[list[Any]] | None = None
) -> dict[str, Any]:
    return {
        "do": "prepare",
        "id": asked.id,
        "actuator": actuator,
        "claims": claims,
        "args": args,
        "edges": edges or [[0.0, True]],
        "window_s": asked.for_s,
    }


def _rnic_counters(topology: Topology, *names: str) -> tuple[str, ...]:
    """One counter of every RNIC, then the next: the order in which they are believed."""
    return tuple(f"{host.name}/{rnic.name}.{name}" for name in names for host in topology.hosts for rnic in host.rnics)


def _on_switch(asked: Request, switch: str) -> Place:
    carrier = asked.topology.switch_by_name[switch].carrier
    if carrier is None:
        raise Unsupported(f"{asked.where}.target: switch {switch} is not carried by a machine of this lab")
    return Place(node=carrier, netns=switch)


def _flap_edges(asked: Request) -> list[list[Any]]:
    period_s, count = asked.params.get("period"), asked.params.get("count")
    if period_s is None:
        if count not in (None, 1):
            raise UsageError(f"{asked.where}.count: {count} flaps need a period")
        return [[0.0, True]]
    edges: list[list[Any]] = []
    for k in itertools.count():
        down_s, up_s = round(k * period_s, 6), round((k + asked.params["duty"]) * period_s, 6)
        if down_s >= asked.for_s or k == count:
            return edges
        if k == MOST_FLAPS:
            raise UsageError(f"{asked.where}.period: more than {MOST_FLAPS} flaps in one window; lengthen the period")
        edges.append([down_s, True])
        if up_s < asked.for_s:
            edges.append([up_s, False])
    return edges


def _link_flap(asked: Request) -> Shot:
    target = asked.target
    if target.link is None or target.port is None:
        raise UsageError(f"{asked.where}.target: {target.text} is not one link")
    send_err = _rnic_counters(asked.topology, "send_err")
    flaps = sum(on for _, on in _flap_edges(asked))
    if target.kind == "rnic":
        carrier = f"{target.node}/{target.port.netdev}"
        return Shot(
            place=Place(node=target.node, local=True),
            request=_holder(
                asked,
                "qmp",
                {"host": target.node, "netdev": target.port.netdev},
                claims=carrier,
                edges=_flap_edges(asked),
            ),
            steps=(Step(do=_set_link(carrier, up=False), undo=_set_link(carrier, up=True)),),
            must_move=(Witness(any_of=(f"{carrier}.carrier_changes",), at_least=flaps),),
            must_not_move=send_err,
            restored=((f"{carrier}.carrier", 1),),
        )
    place, port, far = _on_switch(asked, target.node), target.port, target.link.other(target.node)
    if target.link.is_uplink:
        # A veth end that goes down takes its peer's carrier (drivers/net/veth.c, veth_close): another port's counter.
        witness = Witness(any_of=(f"{far.node}/{far.netdev}.carrier_down_count",), at_least=flaps)
    else:
        # Over a dgram socket the host's carrier stays up: only its traffic can tell.
        witness = Witness(
            any_of=(
                f"{far.node}/{far.netdev}.carrier_changes",
                *_rnic_counters(asked.topology, "out_of_seq_request", "completer_retry_err"),
            )
        )
    restored = [(f"{target.node}/{port.netdev}.up", 1)]
    if target.link.is_uplink:
        restored.append((f"{far.node}/{far.netdev}.carrier", 1))
    command = f"ip -n {place.netns} link set dev {port.netdev}"
    return Shot(
        place=place,
        request=_holder(
            asked,
            "link",
            {"netns": place.netns, "device": port.netdev},
            claims=f"{place.netns}/{port.netdev}",
            edges=_flap_edges(asked),
        ),
        steps=(Step(do=f"{command} down", undo=f"{command} up"),),
        must_move=(witness,),
        must_not_move=send_err,
        restored=tuple(restored),
    )


def _set_link(carrier: str, *, up: bool) -> str:
    return f"QMP set_link {carrier} up={str(up).lower()}"


def _hop(asked: Request) -> tuple[Place, Port, str]:
    """The switch port where packets of this fault pass, and the nftables hook there."""
    target, towards = asked.target, asked.params["direction"] == "to"
    if target.link is None or target.port is None:
        raise UsageError(f"{asked.where}.target: {target.text} is not one link")
    port = target.link.a if target.kind == "rnic" else target.port
    # Towards an RNIC is out of the switch port that faces it; out of a named port is towards what it faces.
    return _on_switch(asked, port.node), port, "egress" if towards else "ingress"


def _packet_drop(asked: Request) -> Shot:
    params, where, target = asked.params, asked.where, asked.target
    share, psn, qp = params.get("share"), params.get("psn"), params.get("qp")
    if (share is None) == (psn is None):
        raise UsageError(f"{where}: packet.drop takes either share or psn")
    if psn is not None and qp is None:
        raise UsageError(f"{where}.psn: a PSN means nothing without its QP; add qp (or qp = any)")
    place, port, hook = _hop(asked)
    ahead = int(psn) if isinstance(psn, str) else None
    learn = None
    if ahead is not None or qp == "any":
        link = target.link
        if link is None or link.rnic is None or params["direction"] != "to":
            raise UsageError(f"{where}: a relative psn, or qp = any, needs one receiving RNIC; aim `to` an RNIC")
        learn = Learn(host=link.b.node, rnic=link.rnic, qp=qp if qp is not None else "any", psn_ahead=ahead)
    table = f"faultbed_{hashlib.sha256(asked.id.encode()).hexdigest()[:8]}"
    match = [f"udp dport {ROCE_PORT}"]
    # Base transport header behind the UDP header: destination QP in bytes 5-7, PSN in bytes 9-11 (InfiniBand 9.2).
    if qp is not None:
        match.append(f"@th,104,24 {'@qp@' if qp == 'any' else qp}")
    if psn is not None:
        match.append(f"@th,136,24 {'@psn@' if ahead is not None else psn}")
        match.append("limit rate 1/hour burst 1 packets")
    elif share is not None and share < 1:
        match.append(f"numgen random mod 1000000 < {max(1, round(share * 1_000_000))}")
    ruleset = (
        f"table netdev {table} {{\n  flags owner\n  counter hits {{ }}\n  chain hop {{\n"
        f'    type filter hook {hook} device "{port.netdev}" priority -300; policy accept;\n'
        f'    {" ".join(match)} counter name "hits" drop\n  }}\n}}\n'
    )
    inside = f"ip netns exec {place.netns}"
    return Shot(
        place=place,
        request=_holder(
            asked,
            "hop",
            {"netns": place.netns, "device": port.netdev, "hook": hook, "table": table, "ruleset": ruleset},
            claims=f"{place.netns}/{table}",
        ),
        steps=(
            Step(
                do=f"{inside} nft -f - <<'END'\n{ruleset}END",
                undo=f"{inside} nft delete table netdev {table}   # or the holder's socket closes",
            ),
        ),
        must_move=(
            Witness(any_of=_rnic_counters(asked.topology, "out_of_seq_request", "rcvd_seq_err", "completer_retry_err")),
        ),
        must_not_move=_rnic_counters(asked.topology, "send_err"),
        learn=learn,
    )


def _gpu_throttle(asked: Request) -> Shot:
    target = asked.target
    if target.gpu is None:
        raise UsageError(f"{asked.where}.target: {target.text} is not a GPU")
    left = (100 - asked.params["percent"]) / 100
    period_us = max(THROTTLE_PERIOD_US, round(MIN_QUOTA_US / left))
    value = f"{round(period_us * left)} {period_us}"
    cgroup = f"{CGROUP_ROOT}/faultbed-{target.gpu.name}.service"
    others = tuple(
        f"{host.name}/{gpu.name}.nr_throttled"
        for host in asked.topology.hosts
        for gpu in host.gpus
        if (host.name, gpu.name) != (target.node, target.gpu.name)
    )
    return Shot(
        place=Place(node=target.node),
        request=_holder(asked, "cgroup", {"cgroup": cgroup, "value": value}, claims=cgroup),
        steps=(Step(do=f"echo {value} > {cgroup}/cpu.max", undo=f"echo max 100000 > {cgroup}/cpu.max"),),
        must_move=(Witness(any_of=(f"{target.node}/{target.gpu.name}.nr_throttled",)),),
        must_not_move=others,
        restored=((f"{target.node}/{target.gpu.name}.quota_us", -1),),
    )


_BY_KIND: Mapping[str, Callable[[Request], Shot]] = {
    "link.flap": _link_flap,
    "packet.drop": _packet_drop,
    "gpu.throttle": _gpu_throttle,
}
