"""Run flows between RNICs, one or several at once.

Several flows form a traffic matrix (`faultbed.traffic.flows.matrix`: incast, permutation and so on), or bulk traffic
with latency probes next to it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.selectors import select_one
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.engine import traffic_metrics
from faultbed.traffic.engine.engine_client import Engines, TrafficLab, endpoint
from faultbed.traffic.engine.run_results import (
    Connection,
    Endpoint,
    Iteration,
    Outcome,
    QpError,
    Rebuild,
    Sample,
    Window,
)
from faultbed.traffic.engine.running_traffic import OnEvent, Running, begin
from faultbed.traffic.engine.samples import samples_of
from faultbed.traffic.engine.task_specs import ConnectionSpec, Plan, TaskPlan, shared_flow_label
from faultbed.traffic.flows.flow_spec import (
    ATOMIC_BYTES,
    CHECKED,
    MEMORIES,
    SPREADS,
    TRANSPORTS,
    VERBS,
    FlowSpec,
    check,
    check_on,
    is_probe,
    shape,
)
from faultbed.traffic.flows.rnr_outcome import Rnr, rnr_of
from faultbed.traffic.probes.rtt import Echo, echoes

__all__ = [
    "ATOMIC_BYTES",
    "CHECKED",
    "MEMORIES",
    "SPREADS",
    "TRANSPORTS",
    "VERBS",
    "FlowResult",
    "FlowSpec",
    "FlowsResult",
    "Latency",
    "QpTotal",
    "check",
    "check_on",
    "engine_spec",
    "start",
    "start_all",
]

RD_ATOMIC = 16
"""Maximum number of outstanding reads and atomics of a QP; further ones wait in its send queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QpTotal:
    """Acknowledged messages and bytes of one QP."""

    connection: int
    messages: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Times of messages from posting to completion, in ns, over the `count` times in `FlowResult.latencies_ns`."""

    count: int
    min_ns: float
    mean_ns: float
    stdev_ns: float
    p50_ns: float
    p95_ns: float
    p99_ns: float
    p999_ns: float
    max_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowResult:
    """Result of a flow.

    `goodput_bps` counts acknowledged payload from the start to the last completion, or to the flow's end if it stood
    still before.

    `sent` are the messages that the sender completed, `sent_totals` the same for each QP. Over RC all of them have
    arrived. Over UC and UD, `messages`, `size_bytes`, `goodput_bps` and `totals` count what arrived. `messages` are
    whole messages, even if they were split. `last_value` is the value that the last atomic read before it added 1.
    `rnr` is the outcome of late receives.

    For a flow with `check`, `checked_bytes` were verified, and `wrong_bytes` of them differed from what was sent. Over
    UC and UD all arriving bytes are verified, and a message that arrives twice counts once. Without `check` a copy
    cannot be distinguished from a message.

    `samples` are those of both ends: what the sender completed, and over UC and UD what arrived at the receiver.
    """

    spec: FlowSpec
    outcome: Outcome
    where: str | None
    window: Window
    sent: int
    messages: int
    size_bytes: int
    goodput_bps: float
    latency: Latency | None
    last_value: int | None
    totals: tuple[QpTotal, ...]
    sent_totals: tuple[QpTotal, ...]
    samples: tuple[Sample, ...]
    connections: tuple[Connection, ...]
    qp_errors: tuple[QpError, ...]
    rebuilds: tuple[Rebuild, ...]
    clock_error_ns: Mapping[str, int]
    rnr: Rnr | None = None
    checked_bytes: int | None = None
    wrong_bytes: int | None = None
    echoes: tuple[Echo, ...] = ()
    latencies_ns: tuple[int, ...] = ()
    latencies_every: int = 1
    """`latencies_ns` are the times of every `latencies_every`-th message in the order of completion (so that they fit
    the engine's memory), and the time so far of messages that never completed. `latency` summarises them."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, ready for JSON, without the time of each message."""
        return {name: value for name, value in asdict(self).items() if name != "latencies_ns"}


def engine_spec(spec: FlowSpec) -> dict[str, Any]:
    """Return the configuration of a flow for the engines at both ends."""
    depth, chain = shape(spec)
    return {
        "verb": spec.verb,
        "transport": spec.transport,
        "admit": spec.admit,
        "gpu": None,
        "spread": spec.spread,
        "part_bytes": spec.part_bytes,
        "qps": spec.qps,
        "depth": depth,
        "batch": chain,
        "rate_bps": spec.rate_bps,
        "on_ns": round(spec.on_s * 1e9),
        "off_ns": round(spec.off_s * 1e9),
        "latency": spec.latency,
        "late_ns": round(spec.late_receives_ms * 1e6),
        "messages": spec.messages,
        "duration_ms": None if spec.duration_s is None else round(spec.duration_s * 1000),
        "op_deadline_ms": round(spec.op_deadline_s * 1000),
        "qp": {**spec.qp.to_dict(), "rd_atomic": RD_ATOMIC if spec.verb in ("read", "atomic") else 1},
    }


def _tasks(lab: TrafficLab, spec: FlowSpec, suffix: str) -> tuple[TaskPlan, TaskPlan]:
    check(spec)
    check_on(lab.kind, transport=spec.transport, qp=spec.qp, entropy=spec.entropy)
    src, dst = endpoint(lab.topology, spec.src), endpoint(lab.topology, spec.dst)
    if src == dst:
        raise UsageError(f"a flow needs two RNICs, got {src.name} twice")
    common = engine_spec(spec)
    receiver_counts = spec.transport != "rc"
    verifies = spec.check and spec.verb != "read"
    kinds = {
        "echo": spec.echo,
        "numbered": receiver_counts and spec.check,
        "unreliable": receiver_counts,
        "admitted": spec.admit,
        "checked": spec.check,
        "flow": True,
    }
    kind = next(name for name, applies in kinds.items() if applies)
    tx_spec, rx_spec = common, common
    if spec.memory == "cuda":
        tx_spec, rx_spec = ({**common, "gpu": _gpu_of(lab.topology, end)} for end in (src, dst))
    tx = TaskPlan(name=f"tx{suffix}", kind=f"{kind}_tx", endpoint=src, spec=tx_spec, active=True)
    reports = receiver_counts or verifies
    after = tx.name if reports else None
    rx = TaskPlan(name=f"rx{suffix}", kind=f"{kind}_rx", endpoint=dst, spec=rx_spec, active=reports, stops_after=after)
    return tx, rx


def _gpu_of(topology: Topology, end: Endpoint) -> dict[str, Any]:
    """Return the GPU at the same position in its host as an RNIC, in the form that an engine expects."""
    host = topology.host_by_name[end.host]
    place = [rnic.name for rnic in host.rnics].index(end.rnic)
    gpu = host.gpus[place] if place < len(host.gpus) else None
    if gpu is None or gpu.kind == "soft":
        present = "only a soft GPU" if gpu else "no GPU"
        raise UsageError(f"{end.name} has {present} at its position, but GPU memory needs a real GPU; use host memory")
    return {"number": place, "pcie": gpu.pcie}


def _plan(lab: TrafficLab, title: str, specs: Sequence[FlowSpec], suffixes: Sequence[str]) -> Plan:
    tasks: list[TaskPlan] = []
    connections: list[ConnectionSpec] = []
    turns = itertools.count()
    admits = {(spec.dst, spec.admit) for spec in specs if spec.admit}
    if len({dst for dst, _ in admits}) < len(admits):
        raise UsageError("all admitted flows to an RNIC must have the same number of grants; give them one value")
    for spec, suffix in zip(specs, suffixes, strict=True):
        ends = _tasks(lab, spec, suffix)
        tasks += ends
        for _ in range(spec.qps):
            label = shared_flow_label(spec.qp, spec.entropy, next(turns)) if spec.entropy else 0
            connections.append(
                ConnectionSpec(index=len(connections), src=ends[0].name, dst=ends[1].name, flow_label=label)
            )
    return Plan(
        what=title,
        tasks=tuple(tasks),
        connections=tuple(connections),
        peer_deadline_s=max(spec.peer_deadline_s for spec in specs),
        stall_deadline_s=max(spec.stall_deadline_s for spec in specs),
    )


def _resolved(topology: Topology, spec: FlowSpec) -> FlowSpec:
    """Resolve the selectors of a flow to RNICs."""
    return replace(spec, src=select_one(topology, spec.src), dst=select_one(topology, spec.dst))


def start(lab: TrafficLab, spec: FlowSpec, on_event: OnEvent | None = None) -> Running[FlowResult]:
    """Start a flow on a lab.

    Raises:
        UsageError: the spec names something that the lab does not have; nothing was started.
        LabError: the flow could not be started; nothing is left running.
    """
    spec = _resolved(lab.topology, spec)
    plan = _plan(lab, f"flow {spec.src} -> {spec.dst}", [spec], [""])
    return begin(lab, plan, lambda running: _finish(running, spec, ""), on_event)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowsResult:
    """Results of several flows that ran at once.

    `goodput_bps` is the sum over the flows. `jain_index` is the fairness of the flows that are not probes (1: all
    equal; 1/n: one has all).
    """

    outcome: Outcome
    where: str | None
    flows: tuple[FlowResult, ...]
    goodput_bps: float
    jain_index: float | None

    @property
    def ranks(self) -> tuple[str, ...]:
        """RNICs at the ends of the flows, sources first, each once."""
        sources, sinks = ([getattr(flow.spec, end) for flow in self.flows] for end in ("src", "dst"))
        return tuple(dict.fromkeys([*sources, *sinks]))

    @property
    def without_probes(self) -> Sequence[FlowResult]:
        """The flows that are not probes; all if there are only probes."""
        return _without_probes(self.flows)

    @property
    def iterations(self) -> tuple[tuple[Iteration, ...], ...]:
        """Iterations of each of `ranks`: flows have none."""
        return ((),) * len(self.ranks)

    def samples_of(self, rank: int) -> tuple[Sample, ...]:
        """Return the samples of the goodput of one of `ranks` over all flows; probes only if there is nothing else.

        Over RC the sender counts, because it gets acknowledgements. Over UC and UD only the receiver knows what has
        arrived. Probes are left out because they would hide that the bulk flows stand still.
        """
        name = self.ranks[rank]
        return tuple(
            sample
            for flow in self.without_probes
            for sample in flow.samples
            if sample.endpoint == name and (flow.spec.transport == "rc" or name == flow.spec.dst)
        )

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Connections of all flows."""
        return tuple(connection for flow in self.flows for connection in flow.connections)

    @property
    def qp_errors(self) -> tuple[QpError, ...]:
        """QP errors of all flows."""
        return tuple(error for flow in self.flows for error in flow.qp_errors)

    @property
    def rebuilds(self) -> tuple[Rebuild, ...]:
        """Rebuilds of all flows."""
        return tuple(rebuild for flow in self.flows for rebuild in flow.rebuilds)

    @property
    def clock_error_ns(self) -> Mapping[str, int]:
        """Clock error of each host, in ns."""
        return self.flows[0].clock_error_ns

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, ready for JSON."""
        return {**asdict(self), "flows": [flow.to_dict() for flow in self.flows]}


def _without_probes(flows: Sequence[FlowResult]) -> Sequence[FlowResult]:
    """Return the flows that are not probes; all if there are only probes."""
    return [flow for flow in flows if not is_probe(flow.spec)] or flows


def start_all(
    lab: TrafficLab,
    specs: Sequence[FlowSpec],
    on_event: OnEvent | None = None,
    *,
    engines: Engines | None = None,
) -> Running[FlowsResult]:
    """Start several flows at once, on new engines unless `engines` are given.

    Raises:
        UsageError: there is no spec, or one names something that the lab does not have; nothing was started.
        LabError: the flows could not be started; nothing is left running.
    """
    if not specs:
        raise UsageError("no flow is given; name at least one")
    specs = [_resolved(lab.topology, spec) for spec in specs]
    suffixes = [str(number) for number in range(len(specs))]
    plan = _plan(lab, f"{len(specs)} flows", specs, suffixes)

    def finish(running: Running[FlowsResult]) -> FlowsResult:
        flows = tuple(_finish(running, *pair) for pair in zip(specs, suffixes, strict=True))
        wrong = [flow for flow in flows if flow.wrong_bytes]
        return FlowsResult(
            outcome="failed" if wrong else running.outcome,
            where=running.failure or (wrong[0].where if wrong else None),
            flows=flows,
            goodput_bps=sum(flow.goodput_bps for flow in flows),
            jain_index=traffic_metrics.jain_index([flow.goodput_bps for flow in _without_probes(flows)]),
        )

    return begin(lab, plan, finish, on_event, engines)


def _finish(running: Running[Any], spec: FlowSpec, suffix: str) -> FlowResult:
    task = f"tx{suffix}"
    samples = samples_of(running, (task, f"rx{suffix}"))
    own = {connection.index for connection in running.plan.connections if connection.src == task}
    done = sent = running.done.get(task, {})
    if done and spec.transport != "rc":
        arrived = running.done.get(f"rx{suffix}", {})
        done = (
            {**arrived, "start_ns": sent["start_ns"], "end_ns": max(sent["end_ns"], arrived["end_ns"])}
            if arrived
            else {}
        )
    if not done:  # the flow failed, so only its samples are known
        window = Window(start_ns=running.started_ns, end_ns=running.ended_ns)
        arriving = task if spec.transport == "rc" else f"rx{suffix}"
        size = sum(sample.size_bytes for sample in samples if sample.task == arriving)
    else:
        window = Window(start_ns=done["start_ns"], end_ns=done["end_ns"])
        size = sum(item["messages"] for item in done["totals"]) * spec.part_bytes
    totals = _totals(done, spec.part_bytes)
    checked = running.done.get(task if spec.verb == "read" else f"rx{suffix}", {}) if spec.check else {}
    wrong = checked.get("wrong_bytes")
    problem = f"{spec.src} -> {spec.dst}: {wrong} of {checked.get('checked_bytes')} bytes are wrong" if wrong else None
    errors = tuple(item for item in running.qp_errors if item.connection in own)
    counts = [total.messages for total in totals] or [0]
    return FlowResult(
        spec=spec,
        outcome="failed" if wrong else running.outcome,
        where=running.failure or problem,
        window=window,
        sent=sum(item["messages"] for item in sent.get("totals", ())) // (spec.qps if spec.spread == "split" else 1),
        messages=min(counts) if spec.spread == "split" else sum(counts),
        size_bytes=size,
        goodput_bps=traffic_metrics.goodput_bps(size, window.duration_ns),
        latency=_latency(done.get("latencies_ns") or ()),
        latencies_ns=tuple(done.get("latencies_ns") or ()),
        latencies_every=done.get("latencies_every") or 1,
        last_value=done.get("last_value"),
        rnr=rnr_of(sent.get("rnr") or {}, errors) if spec.late_receives_ms else None,
        checked_bytes=checked.get("checked_bytes"),
        wrong_bytes=wrong,
        totals=totals,
        sent_totals=_totals(sent, spec.part_bytes),
        samples=samples,
        connections=tuple(item for item in running.connections if item.index in own),
        qp_errors=errors,
        rebuilds=tuple(item for item in running.rebuilds if item.connection in own),
        clock_error_ns=running.clock_error_ns,
        echoes=_echoes(running, suffix) if spec.echo else (),
    )


def _echoes(running: Running[Any], suffix: str) -> tuple[Echo, ...]:
    tx, rx = f"tx{suffix}", f"rx{suffix}"
    arrived = running.stamps.get(rx, ())
    probes = echoes(running.stamps.get(tx, ()), arrived, offset_ns=running.offset_ns(tx))
    if rx in running.done:
        return probes
    # The responder was lost during the flow: probes after its last report are unknown, not lost.
    last_ns = max((row[2] for row in arrived), default=0) + running.offset_ns(rx)
    return tuple(echo for echo in probes if echo.came or echo.sent_ns < last_ns)


def _totals(done: Mapping[str, Any], part_bytes: int) -> tuple[QpTotal, ...]:
    return tuple(
        QpTotal(connection=item["conn"], messages=item["messages"], size_bytes=item["messages"] * part_bytes)
        for item in done.get("totals", ())
    )


def _latency(times_ns: Sequence[int]) -> Latency | None:
    if not times_ns:
        return None
    ordered = sorted(times_ns)
    p50, p95, p99, p999 = (traffic_metrics.percentile(ordered, percent) for percent in (50, 95, 99, 99.9))
    return Latency(
        count=len(ordered),
        min_ns=ordered[0],
        mean_ns=statistics.fmean(ordered),
        stdev_ns=statistics.pstdev(ordered),
        p50_ns=p50,
        p95_ns=p95,
        p99_ns=p99,
        p999_ns=p999,
        max_ns=ordered[-1],
    )
