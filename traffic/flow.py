"""An RC elephant flow between two RNICs: what it is, how it is started, what it leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from testbed.errors import UsageError
from traffic import metrics
from traffic.engine import TrafficLab, endpoint
from traffic.plan import Cable, Plan, QpParams, TaskPlan
from traffic.results import Connection, Outcome, QpError, Rebuild, Sample, Window
from traffic.run import OnEvent, Running, begin
from traffic.samples import samples_of

__all__ = ["FlowResult", "FlowSpec", "QpTotal", "check_qp", "start"]

MAX_QPS = 64
MAX_MESSAGE_BYTES = 1 << 30
CHAIN_BYTES = 256 * 1024
MAX_CHAIN = 32
MAX_DEPTH_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpec:
    """RDMA writes of `message_bytes` from `src` to `dst` on `qps` queue pairs.

    Give `duration_s` or `messages` (in all, over the QPs). `depth` is the number of outstanding messages a QP, `chain`
    how many are posted by one call with one completion at the end; 0 chooses both by message size.
    """

    src: str
    dst: str
    message_bytes: int = 65536
    qps: int = 1
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
class FlowResult:
    """A flow that is over. `goodput_bps` counts acknowledged payload from the start to the last completion."""

    spec: FlowSpec
    outcome: Outcome
    where: str | None
    window: Window
    size_bytes: int
    goodput_bps: float
    totals: tuple[QpTotal, ...]
    samples: tuple[Sample, ...]
    connections: tuple[Connection, ...]
    qp_errors: tuple[QpError, ...]
    rebuilds: tuple[Rebuild, ...]
    clock_error_ns: Mapping[str, int]

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
    for name, value in (("retry_cnt", qp.retry_cnt), ("rnr_retry", qp.rnr_retry)):
        if not 0 <= value <= 6:  # noqa: PLR2004
            raise UsageError(f"{name} must be 0 to 6, got {value}: rxe takes 7 as for ever, which hides a dead peer")
    if qp.mtu not in (1024, 2048, 4096):
        raise UsageError(f"path MTU must be 1024, 2048 or 4096, got {qp.mtu}")
    if not 0 <= qp.min_rnr_timer <= 31:  # noqa: PLR2004
        raise UsageError(f"min_rnr_timer must be 0 to 31, got {qp.min_rnr_timer}")


def _check(spec: FlowSpec) -> None:
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


def _shape(spec: FlowSpec) -> tuple[int, int]:
    """Depth and chain length: several chains in flight, a chain short enough for 100 ms samples to mean something."""
    chain = spec.chain or max(1, min(MAX_CHAIN, CHAIN_BYTES // spec.message_bytes))
    depth = spec.depth or max(4, min(128, MAX_DEPTH_BYTES // spec.message_bytes))
    chain = min(chain, max(1, depth // 2))
    return depth // chain * chain, chain


def start(lab: TrafficLab, spec: FlowSpec, on_event: OnEvent | None = None) -> Running[FlowResult]:
    """Start a flow on a lab.

    Raises:
        UsageError: the spec asks for something that is not there; nothing was started.
        LabError: it could not be started; nothing is left running.
    """
    _check(spec)
    src, dst = endpoint(lab.topology, spec.src), endpoint(lab.topology, spec.dst)
    if src == dst:
        raise UsageError(f"a flow needs two RNICs, got {src.name} twice")
    depth, chain = _shape(spec)
    common = {
        "message_bytes": spec.message_bytes,
        "qps": spec.qps,
        "depth": depth,
        "batch": chain,
        "messages": spec.messages,
        "duration_ms": None if spec.duration_s is None else round(spec.duration_s * 1000),
        "op_deadline_ms": round(spec.op_deadline_s * 1000),
        "qp": spec.qp.to_dict(),
    }
    plan = Plan(
        what=f"flow {src.name} -> {dst.name}",
        tasks=(
            TaskPlan(name="tx", kind="flow_tx", endpoint=src, spec=common, active=True),
            TaskPlan(name="rx", kind="flow_rx", endpoint=dst, spec=common, active=False),
        ),
        cables=tuple(Cable(index=index, src="tx", dst="rx") for index in range(spec.qps)),
        peer_deadline_s=spec.peer_deadline_s,
        stall_deadline_s=spec.stall_deadline_s,
    )
    return begin(lab, plan, lambda running: _finish(running, spec), on_event)


def _finish(running: Running[FlowResult], spec: FlowSpec) -> FlowResult:
    samples = samples_of(running)
    done = running.done.get("tx")
    if done is None:  # failed: what the samples saw is what there is
        window = Window(start_ns=running.started_ns, end_ns=running.ended_ns)
        totals: tuple[QpTotal, ...] = ()
        size = sum(sample.size_bytes for sample in samples)
    else:
        window = Window(start_ns=done["start_ns"], end_ns=done["end_ns"])
        totals = tuple(
            QpTotal(
                connection=item["conn"],
                messages=item["messages"],
                size_bytes=item["messages"] * spec.message_bytes,
            )
            for item in done["totals"]
        )
        size = sum(total.size_bytes for total in totals)
    return FlowResult(
        spec=spec,
        outcome=running.outcome,
        where=running.failure,
        window=window,
        size_bytes=size,
        goodput_bps=metrics.goodput_bps(size, window.duration_ns),
        totals=totals,
        samples=samples,
        connections=running.connections,
        qp_errors=running.qp_errors,
        rebuilds=running.rebuilds,
        clock_error_ns=running.clock_error_ns,
    )
