"""Which counters a fault may move, so that effects of one fault never count as evidence of another one. Pure.

Two faults overlap if one was on, or had ended less than `TAIL_S` before, while the counters of the other were compared.
A counter that the first one may have moved is then no evidence of the other, whichever of them moved it. A loss shows
only at the RNIC that receives the packets, which counts a gap (`out_of_seq_request`), so the direction matters.

`may_move` is conservative: it is true even if a fault moves a counter only under some conditions. A fault without any
evidence of its own is not proven, and its receipt says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from faultbed.inject.kinds.catalogue import Trait, has_trait
from faultbed.testbed.observe.counters import MLX5

if TYPE_CHECKING:
    from faultbed.inject.mechanisms.planned_fault import PlannedFault
    from faultbed.testbed.model.topology import Link, Topology

__all__ = ["LEAD_S", "NOT_OWN", "REMOVAL_S", "TAIL_S", "may_move", "own_evidence"]

LEAD_S = 4.0
"""Seconds before a fault when its target is inspected, its baseline is read and its holder receives the time."""

TAIL_S = 4.0
"""How long counters may move after a fault has ended: retransmission timers, and BGP's hold time of 3 s."""

REMOVAL_S = 1.0
"""How long after its planned end a fault may be removed."""

NOT_OWN = "no evidence of its own"
"""Beginning of the doubt that another fault may have moved all of a fault's witnesses."""

_GAP = {"out_of_seq_request", MLX5["out_of_seq_request"]}
# Counters of packets that were lost, late, or not answered; each by the name of rxe and of mlx5.
_TROUBLE = {
    name
    for rxe in ("rcvd_seq_err", "completer_retry_err", "retry_exceeded_err", "duplicate_request", "rcvd_rnr_err")
    for name in (rxe, MLX5.get(rxe, rxe))
} | {"rnr_nak_retry_err"}
_MARKS = {
    "InECT1Pkts": Trait.MARKS_ECT1,
    "InCEPkts": Trait.MARKS_CE,
    "np_ecn_marked_roce_packets": Trait.MARKS_CE,
}
# Only a fault that names them as its own witness moves these.
_EXACT = {"boots", "nr_throttled", "xids", "thermal_slowdown_us", "remapped_rows"} | {
    f"ecc_{kind}{total}" for kind in ("corrected", "uncorrected") for total in ("", "_total")
}
_CARRIER = {"carrier_changes", "carrier_down_count", "link_downed", MLX5.get("link_downed", "link_downed")}


def own_evidence(
    fault: PlannedFault, others: Sequence[PlannedFault], topology: Topology, *, lead_s: float = 0.0
) -> tuple[PlannedFault, tuple[str, ...]]:
    """Return a fault with only the witnesses that none of the others may have moved, and a doubt for each it lost.

    Args:
        fault: the fault to prove.
        others: faults that overlapped with it.
        topology: their lab.
        lead_s: seconds from the reading of the fault's baseline until the fault began.

    Returns:
        The fault, and one sentence for each witness that is lost. A state that another fault holds is not
        expected to be restored by this one.
    """
    apart_s = math.ceil(TAIL_S + lead_s + REMOVAL_S)
    witnesses, doubts = [], []
    for witness in fault.mechanism.must_move:
        takers = {key: [other for other in others if may_move(other, key, topology)] for key in witness.any_of}
        if left := tuple(key for key, moved_by in takers.items() if not moved_by):
            witnesses.append(dataclasses.replace(witness, any_of=left))
        else:
            doubts.append(_doubt(next(iter(takers)), next(iter(takers.values()))[0], apart_s))
    states = []
    for state in fault.mechanism.while_on:
        if held_by := [other for other in others if state in other.mechanism.while_on]:
            doubts.append(_doubt(state[0], held_by[0], apart_s))
        else:
            states.append(state)
    others_states = {key for other in others for key, _ in (*other.mechanism.while_on, *other.mechanism.restored)}
    restored = tuple(state for state in fault.mechanism.restored if state[0] not in others_states)
    mechanism = dataclasses.replace(
        fault.mechanism, must_move=tuple(witnesses), while_on=tuple(states), restored=restored
    )
    return dataclasses.replace(fault, mechanism=mechanism), tuple(doubts)


def _doubt(key: str, other: PlannedFault, apart_s: int) -> str:
    return (
        f"{NOT_OWN}: {other.kind} on {other.target.text} may have moved {key}, because it was on then or shortly "
        f"before; leave at least {apart_s} s between the end of one of the two faults and the begin of the other"
    )


def may_move(fault: PlannedFault, key: str, topology: Topology) -> bool:
    """Return whether a fault may move a counter (`node/name`, as in `faultbed.testbed.observe.counters`)."""
    node, _, name = key.partition("/")
    device, _, counter = name.rpartition(".")
    if counter in _GAP:
        # A loss lists the counters of all RNICs that might show it; the direction says which one may.
        return _may_open_gap(fault, node, device)
    if any(key in witness.any_of for witness in fault.mechanism.must_move):
        return True
    if counter in _TROUBLE or counter == "tx_packets":
        may = not has_trait(fault.kind, Trait.NO_PACKET)
    elif counter in _CARRIER:
        may = has_trait(fault.kind, Trait.CARRIER) and any(
            _is_at(link, node, device) for link in _links(fault, topology)
        )
    elif counter in _MARKS:
        may = has_trait(fault.kind, _MARKS[counter]) and _may_reach(fault, node, topology)
    elif device == "tcp" or counter == "InNoRoutes":
        may = has_trait(fault.kind, Trait.ROUTES) or node in _nodes(fault)
    elif counter == "FragFails":
        may = has_trait(fault.kind, Trait.FRAGMENTS) and node in _nodes(fault)
    else:
        may = counter not in _EXACT and node in _nodes(fault)
    return may


def _may_open_gap(fault: PlannedFault, host: str, rnic: str) -> bool:
    """Return whether packets towards an RNIC may be lost or reordered."""
    if has_trait(fault.kind, Trait.NO_PACKET):
        return False
    return _towards(fault) in (None, f"{host}:{rnic}")


def _towards(fault: PlannedFault) -> str | None:
    """Return the RNIC (`host1:rxe0`) that receives the packets of a fault; None: several, or unknown."""
    if not has_trait(fault.kind, Trait.ONE_HOP) or fault.spec.params.get("direction", "to") != "to":
        return None
    if dst := fault.spec.params.get("dst"):
        return str(dst)
    link = fault.target.link
    if link is None or link.rnic is None:
        return None
    # A port named from the host's end stands for packets towards the switch.
    return f"{link.b.node}:{link.rnic}" if fault.target.node != link.b.node or fault.target.kind == "rnic" else None


def _may_reach(fault: PlannedFault, node: str, topology: Topology) -> bool:
    """Return whether packets that a fault has marked may be counted at a node: a switch on the way, or a receiver."""
    if node in topology.switch_by_name:
        return not _is_beside(fault, node, topology)
    towards = _towards(fault)
    if has_trait(fault.kind, Trait.SENDS):
        return fault.target.node == node
    return towards is None or towards.partition(":")[0] == node


def _is_beside(fault: PlannedFault, switch: str, topology: Topology) -> bool:
    """Return whether packets that a fault has sent to one switch cannot cross `switch`, a neighbour of it.

    Paths go up and then down (`faultbed.testbed.routing.valley_free`), so none crosses two switches of one role and
    zone.
    """
    link = fault.target.link
    if link is None or not link.is_uplink or fault.spec.params.get("direction", "to") != "to":
        return False
    if not has_trait(fault.kind, Trait.ONE_HOP) or fault.target.node not in (link.a.node, link.b.node):
        return False
    entered, other = topology.switch_by_name[link.other(fault.target.node).node], topology.switch_by_name[switch]
    return entered.name != switch and (entered.role, entered.zone) == (other.role, other.zone)


def _links(fault: PlannedFault, topology: Topology) -> Sequence[Link]:
    target = fault.target
    if target.link is not None:
        return (target.link,)
    return tuple(link for link in topology.links if target.node in (link.a.node, link.b.node))


def _is_at(link: Link, node: str, device: str) -> bool:
    """Return whether a device, by its network or RDMA name, is at an end of a link."""
    ends = {(link.a.node, link.a.netdev), (link.b.node, link.b.netdev), (link.b.node, link.rnic)}
    return (node, device) in ends


def _nodes(fault: PlannedFault) -> set[str]:
    """Return the nodes on which a fault changes something."""
    link = fault.target.link
    return {fault.target.node, fault.place.name, *((link.a.node, link.b.node) if link is not None else ())}
