"""Flows between RNICs over reliable connections: one, or several at once; what they are, and what they leave behind.

Several flows make a traffic matrix (`traffic.matrix`: incast, permutation and so on), or bulk with probes beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from testbed.errors import UsageError
from testbed.topology import Topology
from traffic import metrics
from traffic.engine import Engines, TrafficLab, endpoint
from traffic.plan import Cable, Plan, QpParams, TaskPlan
from traffic.results import Connection, Endpoint, Outcome, QpError, Rebuild, Sample, Window
from traffic.rnr import Rnr, rnr_of
from traffic.rtt import Echo, echoes
from traffic.run import OnEvent, Running, begin
from traffic.samples import samples_of

__all__ = [
    "ATOMIC_BYTES",
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
    "check_qp",
    "engine_spec",
    "start",
    "start_all",
]

VERBS = ("write", "send", "read", "atomic", "write-imm")
MEMORIES = ("host", "cuda")
SPREADS = ("each", "round-robin", "split")
TRANSPORTS = {"rc": VERBS, "uc": ("write", "send"), "ud": ("send",)}
"""What each transport carries here."""
CHECKED = ("send", "write-imm", "read")
"""Of which every byte can be checked."""
MAX_CHECKED_BYTES = 256 << 20
ATOMIC_BYTES = 8
RD_ATOMIC = 16
"""Reads and atomics that a QP has outstanding; further ones wait in its send queue."""

MAX_QPS = 64
MAX_MESSAGE_BYTES = 1 << 30
CHAIN_BYTES = 256 * 1024
MAX_CHAIN = 32
MAX_DEPTH_BYTES = 8 << 20
LATE_DEPTH = 4
"""Of a flow whose receives are late: what is outstanding at its end takes a receive each to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpec:
    """Messages of `message_bytes` from `src` to `dst` (with `read`: from `dst` to `src`) on `qps` queue pairs.

    `verb` is write, write-imm (with immediate), send, read or atomic (fetch-and-add, 8 bytes). `spread` is how messages
    get on the QPs: each QP on its own, in turn, or every message split over all of them. `rate_bps` paces the payload
    (0: as fast as it goes); with `on_s` the flow is silent for `off_s` after every burst of `on_s`. `latency` times
    every message, from its posting to its completion, which makes it a probe when `depth` is 1.

    `transport` is rc, uc (writes and sends) or ud (sends of at most an MTU). Over the latter two nothing is
    acknowledged, sent again or held back: what came is counted by the receiver.

    With `echo` every datagram is answered by a process at the other end, and both ends keep its times (`traffic.rtt`).

    With `admit`, all flows to an RNIC that have it send a chain when its host grants them one, and at most `admit` of
    those are under way (`traffic.node.admission`).

    With `late_receives_ms` the receiver of sends or writes with immediate is slow: there is one receive at a time,
    posted so long after the message before it came, and nobody tells the sender. Its RNIC meets RNR NAKs;
    `FlowResult.rnr` says what came of it. `qp.min_rnr_timer` is how long it waits after each, `qp.rnr_retry` how often
    (7: for ever, until `op_deadline_s`).

    With `check` every byte of every message is looked at: of send, write-imm and read over rc, in host memory. What is
    wrong makes the flow a failure. It costs both ends their CPU, message by message.

    `memory` is host, or cuda: of the GPU that stands at the RNIC's place in its host, at both ends (rack labs only; not
    yet run on hardware).

    Give `duration_s` or `messages` (in all, over the QPs). `depth` is the number of outstanding messages a QP, `chain`
    how many are posted by one call with one completion at the end; 0 chooses both by message size.
    """

    src: str
    dst: str
    message_bytes: int = 65536
    verb: str = "write"
    transport: str = "rc"
    qps: int = 1
    spread: str = "each"
    admit: int = 0
    memory: str = "host"
    rate_bps: float = 0.0
    on_s: float = 0.0
    off_s: float = 0.0
    latency: bool = False
    late_receives_ms: float = 0.0
    check: bool = False
    echo: bool = False
    duration_s: float | None = None
    messages: int | None = None
    depth: int = 0
    chain: int = 0
    qp: QpParams = field(default_factory=QpParams)
    op_deadline_s: float = 10.0
    peer_deadline_s: float = 30.0
    stall_deadline_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QpTotal:
    """What one QP carried (acknowledged), between its first and its last completion."""

    connection: int
    messages: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Times of messages from posting to completion, in ns, over `count` of them (the first 200,000)."""

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
    """A flow that is over. `goodput_bps` counts acknowledged payload from the start to the last completion.

    `sent` are the messages that the sender was done with, `sent_totals` by QP. Over RC they have arrived; otherwise
    `messages`, `size_bytes`, `goodput_bps` and `totals` are of what came. `messages` are whole ones, also where they
    were split. `last_value` is what the last atomic found before it added 1; `rnr` is what late receives came to.
    Of a flow with `check`, `checked_bytes` were looked at, and `wrong_bytes` of them were others than were sent.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def check_qp(qp: QpParams) -> None:
    """Refuse connection parameters that mean something else than they say.

    Raises:
        UsageError: out of range, or for ever.
    """
    if not 1 <= qp.timeout <= 31:  # noqa: PLR2004  # 5 bits; 0 is for ever
        raise UsageError(f"QP timeout must be 1 to 31 (4.096 us x 2^timeout), got {qp.timeout}")
    if not 0 <= qp.retry_cnt <= 6:  # noqa: PLR2004
        said = "rxe takes 7 as for ever, which hides a dead peer"
        raise UsageError(f"retry_cnt must be 0 to 6, got {qp.retry_cnt}: {said}")
    if not 0 <= qp.rnr_retry <= 7:  # noqa: PLR2004  # 7 hides no dead peer: who says "not ready" is there
        raise UsageError(f"rnr_retry must be 0 to 6, or 7 for ever, got {qp.rnr_retry}")
    if qp.mtu not in (1024, 2048, 4096):
        raise UsageError(f"path MTU must be 1024, 2048 or 4096, got {qp.mtu}")
    if not 0 <= qp.min_rnr_timer <= 31:  # noqa: PLR2004
        raise UsageError(f"min_rnr_timer must be 0 to 31, got {qp.min_rnr_timer}")


def check(spec: FlowSpec) -> None:
    """Refuse what cannot be meant.

    Raises:
        UsageError: in one sentence.
    """
    if spec.verb not in VERBS:
        raise UsageError(f'no verb "{spec.verb}"; there is {", ".join(VERBS)}')
    if spec.spread not in SPREADS:
        raise UsageError(f'no way "{spec.spread}" to spread messages over QPs; there is {", ".join(SPREADS)}')
    _check_transport(spec)
    if spec.verb == "atomic" and spec.message_bytes != ATOMIC_BYTES:
        raise UsageError(f"an atomic has {ATOMIC_BYTES} bytes, got {spec.message_bytes}")
    if not 0 < spec.message_bytes <= MAX_MESSAGE_BYTES:
        raise UsageError(f"message size must be 1 byte to {MAX_MESSAGE_BYTES} bytes, got {spec.message_bytes}")
    if not 1 <= spec.qps <= MAX_QPS:
        raise UsageError(f"a flow has 1 to {MAX_QPS} QPs, got {spec.qps}")
    if (spec.duration_s is None) == (spec.messages is None):
        raise UsageError("give a flow either a duration or a number of messages")
    if spec.duration_s is not None and spec.duration_s <= 0:
        raise UsageError(f"a flow's duration must be above 0 s, got {spec.duration_s:g} s")
    if spec.messages is not None and spec.messages < spec.qps:
        raise UsageError(f"{spec.messages} messages cannot be spread over {spec.qps} QPs")
    if spec.depth < 0 or spec.chain < 0 or (spec.depth and spec.chain > spec.depth):
        raise UsageError(f"chain ({spec.chain}) cannot be longer than depth ({spec.depth}), nor either be negative")
    check_qp(spec.qp)
    _check_memory(spec)
    _check_pace(spec)
    _check_late(spec)
    _check_check(spec)


def _check_transport(spec: FlowSpec) -> None:
    if spec.transport not in TRANSPORTS:
        raise UsageError(f'no transport "{spec.transport}"; there is {", ".join(TRANSPORTS)}')
    if spec.verb not in TRANSPORTS[spec.transport]:
        raise UsageError(f"{spec.transport} carries {' and '.join(TRANSPORTS[spec.transport])}, not {spec.verb}")
    if spec.admit < 0 or (spec.admit and (spec.transport != "rc" or spec.verb != "write" or spec.spread != "each")):
        raise UsageError("admission is for writes over rc, each QP on its own, and grants at least 1 chain at a time")
    if spec.admit and (spec.rate_bps or spec.on_s or spec.latency):
        raise UsageError(
            "an admitted flow sends when it is granted to: it has no rate, no bursts and no times of its own"
        )
    if spec.echo and (spec.transport != "ud" or spec.duration_s is None):
        raise UsageError("an echo is of datagrams (ud), for a duration: its end waits for the last answers")
    if spec.transport == "rc":
        return
    if spec.transport == "ud" and spec.message_bytes > spec.qp.mtu:
        raise UsageError(f"a datagram has at most the MTU of {spec.qp.mtu} bytes, got {spec.message_bytes}")
    if spec.latency or spec.spread == "split":
        raise UsageError(f"over {spec.transport} nobody knows when a message has come, nor which parts are of one")


def _check_memory(spec: FlowSpec) -> None:
    if spec.memory not in MEMORIES:
        raise UsageError(f'no memory "{spec.memory}"; there is {", ".join(MEMORIES)}')
    if spec.memory == "cuda" and (spec.transport != "rc" or spec.admit or spec.verb in ("send", "write-imm")):
        raise UsageError("memory of a GPU is for writes, reads and atomics over rc, without admission")


def _check_pace(spec: FlowSpec) -> None:
    if spec.spread == "split" and spec.message_bytes % spec.qps:
        raise UsageError(f"a message of {spec.message_bytes} bytes cannot be split evenly over {spec.qps} QPs")
    if spec.rate_bps < 0 or spec.on_s < 0 or spec.off_s < 0:
        raise UsageError("a flow's rate, on and off times cannot be negative")
    if (spec.on_s > 0) != (spec.off_s > 0):
        raise UsageError("a flow with bursts needs both, an on time and an off time")


def _check_late(spec: FlowSpec) -> None:
    if spec.late_receives_ms < 0:
        raise UsageError(f"receives cannot come before their time, got {spec.late_receives_ms:g} ms")
    if not spec.late_receives_ms:
        return
    if spec.transport != "rc" or spec.verb not in ("send", "write-imm"):
        raise UsageError("late receives are of send and write-imm over rc: only there is a sender told to wait")
    if spec.late_receives_ms >= spec.op_deadline_s * 1e3:
        raise UsageError(
            f"a receive every {spec.late_receives_ms:g} ms is later than the {spec.op_deadline_s:g} s in which a "
            "message has to be done"
        )


def _check_check(spec: FlowSpec) -> None:
    if not spec.check:
        return
    if spec.transport != "rc" or spec.verb not in CHECKED or spec.memory != "host":
        raise UsageError(
            f"bytes are checked of {', '.join(CHECKED)} over rc, in host memory: who looks must know when one has come"
        )
    if spec.late_receives_ms or spec.chain > 1:
        raise UsageError("a flow that is checked goes message by message, and its receives are never late")
    needed = spec.qps * 2 * _shape(spec)[0] * spec.message_bytes
    if needed > MAX_CHECKED_BYTES:
        raise UsageError(
            f"a checked flow has memory for each message under way: {needed} bytes, and {MAX_CHECKED_BYTES} are the "
            "most; take a smaller depth"
        )


def _shape(spec: FlowSpec) -> tuple[int, int]:
    """Depth and chain length: several chains in flight, a chain short enough for 100 ms samples to mean something."""
    # A chain would be a burst, and one time for all.
    alone = spec.rate_bps or spec.on_s or spec.latency or spec.late_receives_ms or spec.check
    chain = spec.chain or (1 if alone else max(1, min(MAX_CHAIN, CHAIN_BYTES // spec.message_bytes)))
    deep = LATE_DEPTH if spec.late_receives_ms else max(4, min(128, MAX_DEPTH_BYTES // spec.message_bytes))
    depth = spec.depth or deep
    chain = min(chain, max(1, depth // 2))
    return depth // chain * chain, chain


def engine_spec(spec: FlowSpec) -> dict[str, Any]:
    """What the engines at both ends of a flow are told of it."""
    depth, chain = _shape(spec)
    return {
        "verb": spec.verb,
        "transport": spec.transport,
        "admit": spec.admit,
        "gpu": None,
        "spread": spec.spread,
        "part_bytes": spec.message_bytes // spec.qps if spec.spread == "split" else spec.message_bytes,
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
    src, dst = endpoint(lab.topology, spec.src), endpoint(lab.topology, spec.dst)
    if src == dst:
        raise UsageError(f"a flow needs two RNICs, got {src.name} twice")
    common = engine_spec(spec)
    counts = spec.transport != "rc"
    looks = spec.check and spec.verb != "read"
    kinds = {"echo": spec.echo, "unreliable": counts, "admitted": spec.admit, "checked": spec.check, "flow": True}
    kind = next(name for name, wanted in kinds.items() if wanted)
    there, here = common, common
    if spec.memory == "cuda":
        there, here = ({**common, "gpu": _gpu_at(lab.topology, end)} for end in (src, dst))
    tx = TaskPlan(name=f"tx{suffix}", kind=f"{kind}_tx", endpoint=src, spec=there, active=True)
    tells = counts or looks
    after = tx.name if tells else None
    rx = TaskPlan(name=f"rx{suffix}", kind=f"{kind}_rx", endpoint=dst, spec=here, active=tells, stops_after=after)
    return tx, rx


def _gpu_at(topology: Topology, end: Endpoint) -> dict[str, Any]:
    """The GPU at an RNIC's place in its host, as an engine is told of it."""
    host = topology.host_by_name[end.host]
    place = [rnic.name for rnic in host.rnics].index(end.rnic)
    gpu = host.gpus[place] if place < len(host.gpus) else None
    if gpu is None or gpu.kind == "soft":
        said = "only a soft GPU" if gpu else "no GPU"
        raise UsageError(f"{end.name} has {said} at its place; memory of a GPU needs a real one: use host memory")
    return {"number": place, "pcie": gpu.pcie}


def _plan(lab: TrafficLab, what: str, specs: Sequence[FlowSpec], suffixes: Sequence[str]) -> Plan:
    tasks: list[TaskPlan] = []
    cables: list[Cable] = []
    admits = {(spec.dst, spec.admit) for spec in specs if spec.admit}
    if len({dst for dst, _ in admits}) < len(admits):
        raise UsageError("all admitted flows to an RNIC must have the same number of grants")
    for spec, suffix in zip(specs, suffixes, strict=True):
        ends = _tasks(lab, spec, suffix)
        tasks += ends
        for _ in range(spec.qps):
            cables.append(Cable(index=len(cables), src=ends[0].name, dst=ends[1].name))
    return Plan(
        what=what,
        tasks=tuple(tasks),
        cables=tuple(cables),
        peer_deadline_s=max(spec.peer_deadline_s for spec in specs),
        stall_deadline_s=max(spec.stall_deadline_s for spec in specs),
    )


def start(lab: TrafficLab, spec: FlowSpec, on_event: OnEvent | None = None) -> Running[FlowResult]:
    """Start a flow on a lab.

    Raises:
        UsageError: the spec asks for something that is not there; nothing was started.
        LabError: it could not be started; nothing is left running.
    """
    plan = _plan(lab, f"flow {spec.src} -> {spec.dst}", [spec], [""])
    return begin(lab, plan, lambda running: _finish(running, spec, ""), on_event)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowsResult:
    """Several flows that ran at once and are over.

    `goodput_bps` is the sum of the flows', `jain_index` how even they are (1: all alike; 1/n: one has all).
    """

    outcome: Outcome
    where: str | None
    flows: tuple[FlowResult, ...]
    goodput_bps: float
    jain_index: float

    @property
    def ranks(self) -> tuple[str, ...]:
        """The RNICs at their ends, sources first, each once."""
        sources, sinks = ([getattr(one.spec, end) for one in self.flows] for end in ("src", "dst"))
        return tuple(dict.fromkeys([*sources, *sinks]))

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Of all flows."""
        return tuple(sample for one in self.flows for sample in one.samples)

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Of all flows."""
        return tuple(connection for one in self.flows for connection in one.connections)

    @property
    def qp_errors(self) -> tuple[QpError, ...]:
        """Of all flows."""
        return tuple(error for one in self.flows for error in one.qp_errors)

    @property
    def rebuilds(self) -> tuple[Rebuild, ...]:
        """Of all flows."""
        return tuple(rebuild for one in self.flows for rebuild in one.rebuilds)

    @property
    def clock_error_ns(self) -> Mapping[str, int]:
        """By host: how wrong its times may be, in ns."""
        return self.flows[0].clock_error_ns

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def start_all(
    lab: TrafficLab,
    specs: Sequence[FlowSpec],
    on_event: OnEvent | None = None,
    *,
    engines: Engines | None = None,
) -> Running[FlowsResult]:
    """Start several flows at once; on `engines` where some are lent.

    Raises:
        UsageError: a spec asks for something that is not there, or there is none; nothing was started.
        LabError: it could not be started; nothing is left running.
    """
    if not specs:
        raise UsageError("no flow at all: name at least one")
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
            jain_index=metrics.jain_index([flow.goodput_bps for flow in flows]),
        )

    return begin(lab, plan, finish, on_event, engines)


def _finish(running: Running[Any], spec: FlowSpec, suffix: str) -> FlowResult:
    task = f"tx{suffix}"
    samples = samples_of(running, (task, f"rx{suffix}"))
    own = {cable.index for cable in running.plan.cables if cable.src == task}
    part_bytes = spec.message_bytes // spec.qps if spec.spread == "split" else spec.message_bytes
    done = sent = running.done.get(task, {})
    if done and spec.transport != "rc":
        came = running.done.get(f"rx{suffix}", {})
        done = {**came, "start_ns": sent["start_ns"], "end_ns": max(sent["end_ns"], came["end_ns"])} if came else {}
    if not done:  # failed: what the samples saw is what there is
        window = Window(start_ns=running.started_ns, end_ns=running.ended_ns)
        size = sum(sample.size_bytes for sample in samples)
    else:
        window = Window(start_ns=done["start_ns"], end_ns=done["end_ns"])
        size = sum(item["messages"] for item in done["totals"]) * part_bytes
    totals = _totals(done, part_bytes)
    looked = running.done.get(task if spec.verb == "read" else f"rx{suffix}", {}) if spec.check else {}
    wrong = looked.get("wrong_bytes")
    said = f"{spec.src} -> {spec.dst}: {wrong} of {looked.get('checked_bytes')} bytes are wrong" if wrong else None
    errors = tuple(item for item in running.qp_errors if item.connection in own)
    counts = [total.messages for total in totals] or [0]
    return FlowResult(
        spec=spec,
        outcome="failed" if wrong else running.outcome,
        where=running.failure or said,
        window=window,
        sent=sum(item["messages"] for item in sent.get("totals", ())) // (spec.qps if spec.spread == "split" else 1),
        messages=min(counts) if spec.spread == "split" else sum(counts),
        size_bytes=size,
        goodput_bps=metrics.goodput_bps(size, window.duration_ns),
        latency=_latency(done.get("latencies_ns") or ()),
        last_value=done.get("last_value"),
        rnr=rnr_of(sent.get("rnr") or {}, errors) if spec.late_receives_ms else None,
        checked_bytes=looked.get("checked_bytes"),
        wrong_bytes=wrong,
        totals=totals,
        sent_totals=_totals(sent, part_bytes),
        samples=samples,
        connections=tuple(item for item in running.connections if item.index in own),
        qp_errors=errors,
        rebuilds=tuple(item for item in running.rebuilds if item.connection in own),
        clock_error_ns=running.clock_error_ns,
        echoes=echoes(sent.get("stamps", ()), running.done.get(f"rx{suffix}", {}).get("stamps", ())),
    )


def _totals(done: Mapping[str, Any], part_bytes: int) -> tuple[QpTotal, ...]:
    return tuple(
        QpTotal(connection=item["conn"], messages=item["messages"], size_bytes=item["messages"] * part_bytes)
        for item in done.get("totals", ())
    )


def _latency(times_ns: Sequence[int]) -> Latency | None:
    if not times_ns:
        return None
    ordered = sorted(times_ns)
    p50, p95, p99, p999 = (metrics.percentile(ordered, percent) for percent in (50, 95, 99, 99.9))
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
