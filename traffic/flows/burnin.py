"""Latency and bandwidth between every two RNICs of different hosts, one pair after the other, and who falls out.

Each ordered pair gets a reliable connection and two measurements: small writes one at a time (their mean is a round
trip to the RNIC and back), and large writes kept in flight. Pairs are compared with the others of their kind (same
rack, or across racks), by ratio to the median: no figure of one machine means anything on another one. What falls out
is measured again; only a pair that falls out every time is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from testbed.model.topology import Topology
from traffic.engine.engine_client import TrafficLab, endpoint
from traffic.engine.running_traffic import OnEvent, begin
from traffic.engine.task_specs import Cable, Plan, QpParams, TaskPlan
from traffic.flows.flow_run import FlowSpec, engine_spec

__all__ = ["SHAPES", "Burnin", "Outlier", "Pair", "Shape", "measure", "outliers", "pairs_of"]

LATENCY_BYTES = 64
BANDWIDTH_DEPTH = 4
QP = QpParams(timeout=18)
"""1.07 s until a packet is sent again, so that a starved machine shows a slow pair, not a dead one."""
PATIENCE_S = 60.0
"""For one pair, both measurements; what does not move at all is ended sooner."""
MOST_DEAD = 6
"""Pairs that get nothing through cost half a minute each: after so many the rest is left unmeasured."""
DEAD_END = 2
"""An RNIC that is in so many dead pairs is not tried with others: it is known by then, and they would be dead, too."""
PAIRS_AT_ONCE = 256
"""Pairs whose queue pairs are there at the same time: all of a lab of 32 hosts would be 126,976."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How much is measured of each pair."""

    latency_messages: int
    bandwidth_bytes: int
    bandwidth_messages: int


SHAPES = {
    "soft": Shape(latency_messages=16, bandwidth_bytes=64 << 10, bandwidth_messages=8),
    "rack": Shape(latency_messages=256, bandwidth_bytes=1 << 20, bandwidth_messages=256),
}
"""By kind of lab. 512 KiB take soft RNICs long enough, but 10 us at 400 Gb/s, less than the sender's own program takes:
a link of half the speed would not fall out. 256 MiB are 5.4 ms (reckoned; not yet run on hardware)."""


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
    """A pair that falls out: `ratio` is how many times worse than `usual` for its kind (None: nothing got through)."""

    pair: Pair
    what: str
    value: float | None
    usual: float
    ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Burnin:
    """A whole burn-in: the last measurement of each pair, and the pairs that fell out each time.

    `unmeasured` are the pairs, as (src, dst), that were not tried because too many others were dead.
    """

    pairs: tuple[Pair, ...]
    outliers: tuple[Outlier, ...]
    rounds: int
    unmeasured: tuple[tuple[str, str], ...] = ()

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
    shape: Shape = SHAPES["soft"],
    leave_out: Collection[str] = (),
    rounds: int = 3,
    on_event: OnEvent | None = None,
) -> Burnin:
    """Measure all pairs, and those that fall out again.

    Args:
        lab: the lab; nothing else should run on it.
        worse_than: the ratio to what is usual for its kind from which a pair falls out.
        shape: how much is measured of each pair.
        leave_out: RNICs that are known to be broken: pairs with them are not measured.
        rounds: how often a pair must fall out to be told.
        on_event: told of every event of the traffic.

    Raises:
        LabError: it could not be started.
    """
    everyone = [pair for pair in pairs_of(lab.topology) if pair[0] not in leave_out and pair[1] not in leave_out]
    found = {(pair.src, pair.dst): pair for pair in _round(lab, everyone, shape, on_event)}
    suspects = outliers(list(found.values()), worse_than=worse_than)
    done = 1
    while suspects and done < rounds:
        again = [item for item in everyone if (item[0], item[1]) in {(x.pair.src, x.pair.dst) for x in suspects}]
        for pair in _round(lab, again, shape, on_event):
            found[pair.src, pair.dst] = _better(found[pair.src, pair.dst], pair)
        suspects = outliers(list(found.values()), worse_than=worse_than)
        done += 1
    unmeasured = tuple((src, dst) for src, dst, _ in everyone if (src, dst) not in found)
    return Burnin(pairs=tuple(found.values()), outliers=tuple(suspects), rounds=done, unmeasured=unmeasured)


def outliers(pairs: Sequence[Pair], *, worse_than: float) -> list[Outlier]:
    """The pairs that are `worse_than` times worse than the best quarter of their kind, or got nothing through."""
    found = []
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        same = [pair for pair in pairs if pair.kind == kind]
        usual_us = _usual(sorted(pair.latency_us for pair in same if pair.latency_us is not None))
        usual_bps = _usual(sorted((pair.goodput_bps for pair in same if pair.goodput_bps is not None), reverse=True))
        for pair in same:
            if not pair.goodput_bps or usual_bps > worse_than * pair.goodput_bps:
                rate = pair.goodput_bps or None
                ratio = usual_bps / rate if rate else None
                found.append(Outlier(pair=pair, what="goodput_bps", value=rate, usual=usual_bps, ratio=ratio))
            elif not pair.latency_us or pair.latency_us > worse_than * usual_us:
                time_us = pair.latency_us or None
                ratio = time_us / usual_us if time_us else None
                found.append(Outlier(pair=pair, what="latency_us", value=time_us, usual=usual_us, ratio=ratio))
    return found


def _usual(best_first: Sequence[float]) -> float:
    """The worst of the best quarter (of up to seven the best or the second); 0 of nothing."""
    return best_first[(len(best_first) - 1) // 4] if best_first else 0.0


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


def _round(
    lab: TrafficLab, pairs: Sequence[tuple[str, str, str]], shape: Shape, on_event: OnEvent | None
) -> list[Pair]:
    """Measure pairs in order. One that gets nothing through ends its attempt; the next one goes on behind it."""
    found: list[Pair] = []
    left, dead, dead_ends = list(pairs), 0, Counter[str]()
    while left and dead < MOST_DEAD:
        some = left[:PAIRS_AT_ONCE]
        done = _attempt(lab, some, shape, on_event)
        measured = [_pair(item, done, shape) for item in some]
        whole = next((i for i, x in enumerate(measured) if x.latency_us is None or x.goodput_bps is None), len(some))
        tried = measured[: whole + 1]
        found += tried
        if whole < len(some):
            dead += 1
            dead_ends.update(some[whole][:2])
        left = [pair for pair in left[len(tried) :] if max(dead_ends[pair[0]], dead_ends[pair[1]]) < DEAD_END]
    return found


def _attempt(
    lab: TrafficLab, pairs: Sequence[tuple[str, str, str]], shape: Shape, on_event: OnEvent | None
) -> dict[str, Mapping[str, Any]]:
    """What the tasks said that got done, one pair after the other; the rest when nothing moved any more is missing."""
    plan = _plan(lab.topology, pairs, shape)
    with begin(lab, plan, lambda running: dict(running.done), on_event) as running:
        return running.wait(len(pairs) * PATIENCE_S + plan.stall_deadline_s)


def _pair(item: tuple[str, str, str], done: Mapping[str, Mapping[str, Any]], shape: Shape) -> Pair:
    src, dst, kind = item
    small, large = done.get(_task(src, dst, "latency")), done.get(_task(src, dst, "bandwidth"))
    bits = 8 * shape.bandwidth_bytes * shape.bandwidth_messages
    return Pair(
        src=src,
        dst=dst,
        kind=kind,
        latency_us=None if small is None else _seconds(small) / shape.latency_messages * 1e6,
        goodput_bps=None if large is None else bits / max(1e-9, _seconds(large)),
    )


def _seconds(done: Mapping[str, Any]) -> float:
    return float(done["end_ns"] - done["start_ns"]) / 1e9


def _task(src: str, dst: str, what: str) -> str:
    return f"{what} {src} {dst}"


def _plan(topology: Topology, pairs: Sequence[tuple[str, str, str]], shape: Shape) -> Plan:
    cables: list[Cable] = []
    large = _spec(shape.bandwidth_bytes, shape.bandwidth_messages, BANDWIDTH_DEPTH)
    tasks = [
        TaskPlan(name=f"rx {dst}", kind="flow_rx", endpoint=endpoint(topology, dst), spec=large, active=False)
        for dst in dict.fromkeys(dst for _, dst, _ in pairs)
    ]
    specs = {"latency": _spec(LATENCY_BYTES, shape.latency_messages, 1), "bandwidth": large}
    for src, dst, _ in pairs:
        for what, spec in specs.items():
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
