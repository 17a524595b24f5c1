"""Burn-in: latency and bandwidth between every two RNICs of different hosts, one pair at a time, and the outliers.

Each ordered pair gets a reliable connection and two measurements: small writes, one at a time (their mean time is the
round trip to the remote RNIC), and large writes, several in flight. A pair is compared with the other pairs of its kind
(same rack, across racks, across zones). The result is a ratio, because absolute values do not carry over between
machines. Outliers are measured again; only a pair that is an outlier every time is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Any

from faultbed.testbed.model.topology import Host, Topology
from faultbed.traffic.engine.engine_client import TrafficLab, endpoint
from faultbed.traffic.engine.running_traffic import OnEvent, begin
from faultbed.traffic.engine.task_specs import ConnectionSpec, Plan, QpParams, TaskPlan
from faultbed.traffic.flows.flow_run import FlowSpec, engine_spec

__all__ = ["SHAPES", "Burnin", "Outlier", "Pair", "Shape", "ends_in_common", "measure", "outliers", "pairs_of"]

LATENCY_BYTES = 64
BANDWIDTH_DEPTH = 4
QP = QpParams(timeout=18)
"""1.07 s until a packet is retransmitted, so that a host without CPU time shows as a slow pair, not a dead one."""
PAIR_TIMEOUT_S = 60.0
"""Timeout for both measurements of one pair. The stall deadline ends a pair without any progress sooner."""
MAX_DEAD = 6
"""Dead pairs cost half a minute each; after this many, the remaining pairs are left unmeasured."""
DEAD_END = 2
"""An RNIC in this many dead pairs is not tried further: its other pairs would most likely be dead, too."""
PAIRS_AT_ONCE = 256
"""Pairs whose queue pairs exist at the same time. A lab of 32 hosts would otherwise need 126,976."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How much is measured for each pair."""

    latency_messages: int
    bandwidth_bytes: int
    bandwidth_messages: int


SHAPES = {
    "soft": Shape(latency_messages=16, bandwidth_bytes=64 << 10, bandwidth_messages=8),
    "rack": Shape(latency_messages=256, bandwidth_bytes=1 << 20, bandwidth_messages=256),
}
"""Shape by kind of lab. Soft RNICs take long enough for 512 KiB. At 400 Gb/s that takes 10 us, less than the overhead
of the sender's program, which would hide a link of half the speed. Racks therefore transfer 256 MiB in 5.4 ms
(calculated; not yet run on hardware)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Measurements of one ordered pair of RNICs; None if the pair got nothing through."""

    src: str
    dst: str
    kind: str
    latency_us: float | None
    goodput_bps: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A pair that stands out, and how many times worse than `usual` it is (`ratio` None: nothing got through)."""

    pair: Pair
    what: str
    value: float | None
    usual: float
    ratio: float | None


def ends_in_common(pairs: Iterable[AbstractSet[str]]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the end that most pairs share, with their number; then the same for the remaining pairs, and so on.

    If equally many pairs share each of several ends, these ends are yielded together.
    """
    left = list(pairs)
    while left:
        counts = Counter(end for pair in left for end in pair)
        most = max(counts.values())
        ends = tuple(sorted(end for end, count in counts.items() if count == most))
        yield ends, most
        left = [pair for pair in left if pair.isdisjoint(ends)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Burnin:
    """A complete burn-in: the last measurement of each pair, and the pairs that were outliers every time.

    `unmeasured` are the pairs (src, dst) that were not tried because too many others were dead.
    """

    pairs: tuple[Pair, ...]
    outliers: tuple[Outlier, ...]
    rounds: int
    unmeasured: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, ready for JSON."""
        return asdict(self)


def pairs_of(topology: Topology) -> list[tuple[str, str, str]]:
    """Return every ordered pair of RNICs of different hosts, as (src, dst, kind)."""
    rnics = [(host, f"{host.name}:{rnic.name}") for host in topology.hosts for rnic in host.rnics]
    return [
        (src, dst, _kind(src_host, dst_host))
        for src_host, src in rnics
        for dst_host, dst in rnics
        if src_host.name != dst_host.name
    ]


def _kind(src: Host, dst: Host) -> str:
    if src.rack == dst.rack:
        return "same rack"
    return "across racks" if src.zone == dst.zone else "across zones"


def measure(
    lab: TrafficLab,
    *,
    worse_than: float,
    shape: Shape = SHAPES["soft"],
    leave_out: Collection[str] = (),
    rounds: int = 3,
    on_event: OnEvent | None = None,
) -> Burnin:
    """Measure all pairs, and the outliers again.

    Args:
        lab: the lab; it should carry no other traffic.
        worse_than: ratio to the usual value of its kind from which a pair is an outlier.
        shape: how much is measured for each pair.
        leave_out: RNICs that are known to be broken; pairs with them are not measured.
        rounds: how often a pair must be an outlier to be reported.
        on_event: called with every event of the traffic.

    Raises:
        LabError: the measurement could not be started.
    """
    all_pairs = [pair for pair in pairs_of(lab.topology) if pair[0] not in leave_out and pair[1] not in leave_out]
    results = {(pair.src, pair.dst): pair for pair in _round(lab, all_pairs, shape, on_event)}
    suspects = outliers(list(results.values()), worse_than=worse_than)
    done = 1
    while suspects and done < rounds:
        repeated = [item for item in all_pairs if (item[0], item[1]) in {(x.pair.src, x.pair.dst) for x in suspects}]
        for pair in _round(lab, repeated, shape, on_event):
            results[pair.src, pair.dst] = _better(results[pair.src, pair.dst], pair)
        suspects = outliers(list(results.values()), worse_than=worse_than)
        done += 1
    unmeasured = tuple((src, dst) for src, dst, _ in all_pairs if (src, dst) not in results)
    return Burnin(pairs=tuple(results.values()), outliers=tuple(suspects), rounds=done, unmeasured=unmeasured)


def outliers(pairs: Sequence[Pair], *, worse_than: float) -> list[Outlier]:
    """Return the pairs that got nothing through or are `worse_than` times worse than the best quarter of their kind."""
    results = []
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        pairs_of_kind = [pair for pair in pairs if pair.kind == kind]
        usual_us = _usual(sorted(pair.latency_us for pair in pairs_of_kind if pair.latency_us is not None))
        usual_bps = _usual(
            sorted((pair.goodput_bps for pair in pairs_of_kind if pair.goodput_bps is not None), reverse=True)
        )
        for pair in pairs_of_kind:
            if not pair.goodput_bps or usual_bps > worse_than * pair.goodput_bps:
                rate = pair.goodput_bps or None
                ratio = usual_bps / rate if rate else None
                results.append(Outlier(pair=pair, what="goodput_bps", value=rate, usual=usual_bps, ratio=ratio))
            elif not pair.latency_us or pair.latency_us > worse_than * usual_us:
                time_us = pair.latency_us or None
                ratio = time_us / usual_us if time_us else None
                results.append(Outlier(pair=pair, what="latency_us", value=time_us, usual=usual_us, ratio=ratio))
    return results


def _usual(best_first: Sequence[float]) -> float:
    """Return the last value of the best quarter: the best of up to 4, the second best of 5 to 8; 0 without values."""
    return best_first[(len(best_first) - 1) // 4] if best_first else 0.0


def _better(first: Pair, second: Pair) -> Pair:
    """Combine the better latency and the better rate of two measurements: noise makes a pair slower, never faster."""
    latencies = [latency_us for latency_us in (first.latency_us, second.latency_us) if latency_us is not None]
    rates = [goodput_bps for goodput_bps in (first.goodput_bps, second.goodput_bps) if goodput_bps is not None]
    return Pair(
        src=first.src,
        dst=first.dst,
        kind=first.kind,
        latency_us=min(latencies, default=None),
        goodput_bps=max(rates, default=None),
    )


def _round(
    lab: TrafficLab, pairs: Sequence[tuple[str, str, str]], shape: Shape, on_event: OnEvent | None
) -> list[Pair]:
    """Measure pairs in order. A dead pair ends an attempt, and a new attempt continues with the pair after it."""
    results: list[Pair] = []
    left, dead, dead_ends = list(pairs), 0, Counter[str]()
    while left and dead < MAX_DEAD:
        chunk = left[:PAIRS_AT_ONCE]
        done = _attempt(lab, chunk, shape, on_event)
        measured = [_pair(item, done, shape) for item in chunk]
        dead_at = next((i for i, x in enumerate(measured) if x.latency_us is None or x.goodput_bps is None), len(chunk))
        tried = measured[: dead_at + 1]
        results += tried
        if dead_at < len(chunk):
            dead += 1
            dead_ends.update(chunk[dead_at][:2])
        left = [pair for pair in left[len(tried) :] if max(dead_ends[pair[0]], dead_ends[pair[1]]) < DEAD_END]
    return results


def _attempt(
    lab: TrafficLab, pairs: Sequence[tuple[str, str, str]], shape: Shape, on_event: OnEvent | None
) -> dict[str, Mapping[str, Any]]:
    """Run all pairs in sequence and return the `done` events by task. A task that a stall prevented has no event."""
    plan = _plan(lab.topology, pairs, shape)
    with begin(lab, plan, lambda running: dict(running.done), on_event) as running:
        return running.wait(len(pairs) * PAIR_TIMEOUT_S + plan.stall_deadline_s)


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


def _task(src: str, dst: str, measurement: str) -> str:
    return f"{measurement} {src} {dst}"


def _plan(topology: Topology, pairs: Sequence[tuple[str, str, str]], shape: Shape) -> Plan:
    connections: list[ConnectionSpec] = []
    large = _spec(shape.bandwidth_bytes, shape.bandwidth_messages, BANDWIDTH_DEPTH)
    tasks = [
        TaskPlan(name=f"rx {dst}", kind="flow_rx", endpoint=endpoint(topology, dst), spec=large, active=False)
        for dst in dict.fromkeys(dst for _, dst, _ in pairs)
    ]
    specs = {"latency": _spec(LATENCY_BYTES, shape.latency_messages, 1), "bandwidth": large}
    for src, dst, _ in pairs:
        for measurement, spec in specs.items():
            name = _task(src, dst, measurement)
            tasks.append(TaskPlan(name=name, kind="flow_tx", endpoint=endpoint(topology, src), spec=spec, active=True))
            connections.append(ConnectionSpec(index=len(connections), src=name, dst=f"rx {dst}"))
    return Plan(
        what=f"burn-in of {len(pairs)} pairs",
        tasks=tuple(tasks),
        connections=tuple(connections),
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
