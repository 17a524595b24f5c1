"""Latency and bandwidth between every two RNICs of different hosts, one pair after the other, and who falls out.

Each ordered pair gets a reliable connection and two measurements: small writes one at a time (their mean is a round
trip to the RNIC and back), and large writes kept in flight. Pairs are compared with the others of their kind (same
rack, or across racks), by ratio to the median: no figure of one machine means anything on another one. What falls out
is measured again; only a pair that falls out every time is told.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from testbed.topology import Topology
from traffic.engine import TrafficLab, endpoint
from traffic.flow import FlowSpec, engine_spec
from traffic.plan import Cable, Plan, QpParams, TaskPlan
from traffic.run import OnEvent, begin

__all__ = ["Burnin", "Outlier", "Pair", "measure", "outliers", "pairs_of"]

LATENCY_BYTES, LATENCY_MESSAGES = 64, 16
BANDWIDTH_BYTES, BANDWIDTH_MESSAGES, BANDWIDTH_DEPTH = 65536, 8, 4
QP = QpParams(timeout=18)
"""1.07 s until a packet is sent again, so that a starved machine shows a slow pair, not a dead one."""
PATIENCE_S = 60.0
"""For one pair, both measurements; what does not move at all is ended sooner."""
MOST_DEAD = 3
"""Pairs that get nothing through cost half a minute each: after so many the rest is left unmeasured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What one ordered pair of RNICs measured; None where it did not get through."""

    src: str
    dst: str
    kind: str
    latency_us: float | None
    goodput_bps: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A pair that falls out: `ratio` is how many times worse than the median of its kind (inf: nothing got through)."""

    pair: Pair
    what: str
    value: float | None
    median: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Burnin:
    """A whole burn-in: the last measurement of each pair, and the pairs that fell out each time."""

    pairs: tuple[Pair, ...]
    outliers: tuple[Outlier, ...]
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def pairs_of(topology: Topology) -> list[tuple[str, str, str]]:
    """Every ordered pair of RNICs of different hosts, as (src, dst, kind)."""
    rnics = [(host, f"{host.name}:{rnic.name}") for host in topology.hosts for rnic in host.rnics]
    return [
        (src, dst, "same rack" if one.rack == other.rack else "across racks")
        for one, src in rnics
        for other, dst in rnics
        if one.name != other.name
    ]


def measure(
    lab: TrafficLab,
    *,
    worse_than: float,
    leave_out: Collection[str] = (),
    rounds: int = 3,
    on_event: OnEvent | None = None,
) -> Burnin:
    """Measure all pairs, and those that fall out again.

    Args:
        lab: the lab; nothing else should run on it.
        worse_than: the ratio to the median of its kind from which a pair falls out.
        leave_out: RNICs that are known to be broken: pairs with them are not measured.
        rounds: how often a pair must fall out to be told.
        on_event: told of every event of the traffic.

    Raises:
        LabError: it could not be started.
    """
    everyone = [pair for pair in pairs_of(lab.topology) if pair[0] not in leave_out and pair[1] not in leave_out]
    found = {(pair.src, pair.dst): pair for pair in _round(lab, everyone, on_event)}
    suspects = outliers(list(found.values()), worse_than=worse_than)
    done = 1
    while suspects and done < rounds:
        again = [item for item in everyone if (item[0], item[1]) in {(x.pair.src, x.pair.dst) for x in suspects}]
        for pair in _round(lab, again, on_event):
            found[pair.src, pair.dst] = _better(found[pair.src, pair.dst], pair)
        suspects = outliers(list(found.values()), worse_than=worse_than)
        done += 1
    return Burnin(pairs=tuple(found.values()), outliers=tuple(suspects), rounds=done)


def outliers(pairs: Sequence[Pair], *, worse_than: float) -> list[Outlier]:
    """The pairs that are `worse_than` times worse than the median of their kind, or got nothing through."""
    found = []
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        same = [pair for pair in pairs if pair.kind == kind]
        latencies = [pair.latency_us for pair in same if pair.latency_us is not None]
        rates = [pair.goodput_bps for pair in same if pair.goodput_bps is not None]
        middle_us = statistics.median(latencies) if latencies else 0.0
        middle_bps = statistics.median(rates) if rates else 0.0
        for pair in same:
            rate_ratio = middle_bps / pair.goodput_bps if pair.goodput_bps else float("inf")
            time_ratio = pair.latency_us / middle_us if pair.latency_us and middle_us else float("inf")
            if rate_ratio > worse_than:
                found.append(
                    Outlier(pair=pair, what="goodput_bps", value=pair.goodput_bps, median=middle_bps, ratio=rate_ratio)
                )
            elif time_ratio > worse_than:
                found.append(
                    Outlier(pair=pair, what="latency_us", value=pair.latency_us, median=middle_us, ratio=time_ratio)
                )
    return found


def _better(one: Pair, other: Pair) -> Pair:
    """The better of two measurements in each respect: noise makes a pair slower, never faster."""
    latencies = [x for x in (one.latency_us, other.latency_us) if x is not None]
    rates = [x for x in (one.goodput_bps, other.goodput_bps) if x is not None]
    return Pair(
        src=one.src,
        dst=one.dst,
        kind=one.kind,
        latency_us=min(latencies, default=None),
        goodput_bps=max(rates, default=None),
    )


def _round(lab: TrafficLab, pairs: Sequence[tuple[str, str, str]], on_event: OnEvent | None) -> list[Pair]:
    """Measure pairs in order. One that gets nothing through ends its attempt; the next one goes on behind it."""
    found: list[Pair] = []
    left, dead = list(pairs), 0
    while left and dead < MOST_DEAD:
        done = _attempt(lab, left, on_event)
        measured = [_pair(item, done) for item in left]
        whole = next((i for i, x in enumerate(measured) if x.latency_us is None or x.goodput_bps is None), len(left))
        found += measured[: whole + 1]
        left = left[whole + 1 :]
        dead += 1
    return found


def _attempt(
    lab: TrafficLab, pairs: Sequence[tuple[str, str, str]], on_event: OnEvent | None
) -> dict[str, Mapping[str, Any]]:
    """What the tasks said that got done, one pair after the other; the rest when nothing moved any more is missing."""
    plan = _plan(lab.topology, pairs)
    with begin(lab, plan, lambda running: dict(running.done), on_event) as running:
        return running.wait(len(pairs) * PATIENCE_S + plan.stall_deadline_s)


def _pair(item: tuple[str, str, str], done: Mapping[str, Mapping[str, Any]]) -> Pair:
    src, dst, kind = item
    small, large = done.get(_task(src, dst, "latency")), done.get(_task(src, dst, "bandwidth"))
    bits = 8 * BANDWIDTH_BYTES * BANDWIDTH_MESSAGES
    return Pair(
        src=src,
        dst=dst,
        kind=kind,
        latency_us=None if small is None else _seconds(small) / LATENCY_MESSAGES * 1e6,
        goodput_bps=None if large is None else bits / max(1e-9, _seconds(large)),
    )


def _seconds(done: Mapping[str, Any]) -> float:
    return float(done["end_ns"] - done["start_ns"]) / 1e9


def _task(src: str, dst: str, what: str) -> str:
    return f"{what} {src} {dst}"


def _plan(topology: Topology, pairs: Sequence[tuple[str, str, str]]) -> Plan:
    tasks: list[TaskPlan] = []
    cables: list[Cable] = []
    for dst in dict.fromkeys(dst for _, dst, _ in pairs):
        spec = _spec(BANDWIDTH_BYTES, BANDWIDTH_MESSAGES, BANDWIDTH_DEPTH)
        tasks.append(
            TaskPlan(name=f"rx {dst}", kind="flow_rx", endpoint=endpoint(topology, dst), spec=spec, active=False)
        )
    shapes = {
        "latency": _spec(LATENCY_BYTES, LATENCY_MESSAGES, 1),
        "bandwidth": _spec(BANDWIDTH_BYTES, BANDWIDTH_MESSAGES, BANDWIDTH_DEPTH),
    }
    for src, dst, _ in pairs:
        for what, spec in shapes.items():
            name = _task(src, dst, what)
            tasks.append(TaskPlan(name=name, kind="flow_tx", endpoint=endpoint(topology, src), spec=spec, active=True))
            cables.append(Cable(index=len(cables), src=name, dst=f"rx {dst}"))
    return Plan(
        what=f"burn-in of {len(pairs)} pairs",
        tasks=tuple(tasks),
        cables=tuple(cables),
        peer_deadline_s=30.0,
        stall_deadline_s=30.0,
        one_by_one=True,
    )


def _spec(message_bytes: int, messages: int, depth: int) -> dict[str, Any]:
    return engine_spec(
        FlowSpec(
            src="",
            dst="",
            message_bytes=message_bytes,
            messages=messages,
            depth=depth,
            chain=1,
            op_deadline_s=20.0,
            qp=QP,
        )
    )
