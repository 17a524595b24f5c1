"""What an injector of another author did to a lab: a receipt from looks at the lab, without knowing the injector. Pure.

A fault of ours has a holder that reports its firing. Of `tc`, `ip link` or a vendor's tool only the lab can tell: its
state changed while the tool was at work, packets crossed what had changed, and counters of loss or of carriers moved
more than in as long a time before. All three together confirm it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["EFFECTS", "Opinion", "OutsideFault", "opinion_of"]

Result = Literal["confirmed", "mismatch", "inconclusive"]

EFFECTS = frozenset(
    {
        *("out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "duplicate_request", "retry_exceeded_err"),
        *("rcvd_rnr_err", "send_rnr_err", "retry_rnr_exceeded_err", "out_of_sequence", "packet_seq_err"),
        *("local_ack_timeout_err", "req_transport_retries_exceeded", "rnr_nak_retry_err", "out_of_buffer"),
        *("queue_drops", "rx_dropped", "tx_dropped"),
    }
)
"""Last parts of the names of counters that only a loss, or a queue pair that waits, moves (rdma_rxe and mlx5)."""
_CARRIER = frozenset({"carrier_changes", "carrier_down_count"})
_PACKETS = frozenset({"rx_packets", "tx_packets"})
_IDLE_PER_S = 20.0
"""Packets a second on a port that carries BGP, ARP and LLDP alone; traffic has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideFault:
    """What was seen of a lab around a command.

    Attributes:
        changed: each node and interface whose state was different at some time, with a line about it.
        left: differences that were still there at the end.
        before: growth of each counter (`node/name`) in the quiet time before.
        during: growth of each counter while the command was at work.
        before_s: length of the quiet time.
        during_s: length of the time at work.
        unknown: what could not be read, or counters that were reset meanwhile.
    """

    changed: Mapping[tuple[str, str], str]
    left: Sequence[str]
    before: Mapping[str, int]
    during: Mapping[str, int]
    before_s: float
    during_s: float
    unknown: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """Whether the command did something to traffic, why, which counters moved, and whether it was undone.

    `undone` None: it is unknown.
    """

    result: Result
    why: str
    moved: Mapping[str, int]
    undone: bool | None


def opinion_of(fault: OutsideFault) -> Opinion:
    """Return the opinion about a command. What could not be read makes it inconclusive, never a mismatch."""
    moved = dict(_moved(fault))
    undone = None if fault.unknown else not fault.left
    result, why = _result(fault, moved)
    return Opinion(result=result, why=why, moved=moved, undone=undone)


def _result(fault: OutsideFault, moved: Mapping[str, int]) -> tuple[Result, str]:
    effects = [name for name in moved if _last(name) in EFFECTS]
    if fault.unknown:
        return "inconclusive", f"not everything is known: {fault.unknown[0]}"
    if not fault.changed and not effects:
        return "mismatch", "nothing on the lab changed that is watched, and no counter of loss moved"
    if not fault.changed:
        return "inconclusive", f"{effects[0]} moved, but nothing on the lab changed that is watched"
    return _of_change(fault, moved, effects)


def _of_change(fault: OutsideFault, moved: Mapping[str, int], effects: Sequence[str]) -> tuple[Result, str]:
    place = next(iter(fault.changed.values()))
    is_used = _is_used(fault)
    if is_used is None:
        return "inconclusive", f"{place}; no counter shows whether traffic crosses it"
    if not is_used:
        elsewhere = f"; {effects[0]} moved for another reason" if effects else ""
        return "mismatch", f"{place}; no traffic crossed it, before or meanwhile{elsewhere}"
    if not effects:
        return "inconclusive", f"{place}; traffic crossed it, and no counter of loss moved"
    return "confirmed", f"{place}; traffic crossed it; {effects[0]} grew by {moved[effects[0]]}"


def _moved(fault: OutsideFault) -> Iterator[tuple[str, int]]:
    """Yield the counters of loss and carriers that grew faster than before, most first."""
    share = fault.during_s / fault.before_s if fault.before_s > 0 else 0.0
    grown = [
        (name, growth)
        for name, growth in fault.during.items()
        if _last(name) in EFFECTS | _CARRIER and growth > 2 * share * fault.before.get(name, 0)
    ]
    yield from sorted(grown, key=lambda item: (-item[1], item[0]))


def _is_used(fault: OutsideFault) -> bool | None:
    """Return whether traffic crossed an interface that changed, before or meanwhile; None: it has no counters.

    A link that is down carries nothing: then the time before tells. Some packets are BGP's, ARP's or LLDP's.
    """
    rates = [
        growth / length_s
        for counts, length_s in ((fault.before, fault.before_s), (fault.during, fault.during_s))
        for node, interface in fault.changed
        for name, growth in counts.items()
        if length_s > 0 and name.startswith(f"{node}/{interface}.") and _last(name) in _PACKETS
    ]
    return max(rates) > _IDLE_PER_S if rates else None


def _last(name: str) -> str:
    return name.rpartition(".")[2]
