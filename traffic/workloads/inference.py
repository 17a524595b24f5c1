"""An inference job: for each request a prefill in bulk, then tokens one by one.

All ranks form one tensor-parallel group, or the first `prefill_ranks` of them prefill and the others decode. In the
second case the KV cache of a request goes from prefill rank i to decode rank i (modulo their number). The next request
is prefilled while the tokens of the previous one are decoded, so bulk and latency-sensitive traffic overlap. The
model's compute time is a pause (modelled).

Time to first token runs from the start of a request's prefill to its first token on the last rank. Time per output
token (TPOT) is measured from token to token on each rank; the slowest rank counts. If prefill and decode are on
different hosts, the time to first token compares their clocks: `clock_error_ns` is the error of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from faultbed.testbed.errors import UsageError
from faultbed.testbed.finite import require_finite
from faultbed.traffic.engine import traffic_metrics
from faultbed.traffic.engine.engine_client import TrafficLab
from faultbed.traffic.engine.run_results import Iteration
from faultbed.traffic.engine.running_traffic import OnEvent, Running
from faultbed.traffic.traces import Operation, Trace
from faultbed.traffic.workloads import replay
from faultbed.traffic.workloads.ranks import RanksSpec, check_queue_pairs, place
from faultbed.traffic.workloads.ranks_result import RanksResult, common_results
from faultbed.traffic.workloads.replay_result import Execution
from faultbed.traffic.workloads.service_level import kept_of

__all__ = ["InferenceResult", "InferenceSpec", "check", "request", "run", "start"]

MAX_TOKENS = 200
MIN_GROUP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSpec(RanksSpec):
    """`requests` in sequence: a prefill, then `tokens` tokens, of which the user waits for the first.

    A prefill is an all-reduce of `prefill_bytes` over its group after `prefill_ms` of compute. A token is one of
    `decode_bytes` after `decode_ms`. Each prefill rank sends `kv_bytes` to its decode rank. `slo_ttft_ms` and
    `slo_tpot_ms` are service level objectives of a request; 0 means none.
    """

    prefill_ranks: int = 0
    prefill_bytes: int = 4 << 20
    kv_bytes: int = 1 << 20
    decode_bytes: int = 65536
    tokens: int = 16
    requests: int = 10
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceResult(RanksResult):
    """Result of an inference job.

    Times are in ns; `ttft_ns` has one value per request, `tpot_ns` one tuple per request.

    `slo_attainment` is the share of all requests that met every objective. The mean TPOT of a request counts.
    """

    spec: InferenceSpec
    requests_completed: int
    ttft_ns: tuple[int, ...]
    tpot_ns: tuple[tuple[int, ...], ...]
    ttft_p50_ns: float
    ttft_p99_ns: float
    tpot_p50_ns: float
    tpot_p95_ns: float
    tpot_p99_ns: float
    slo_attainment: float

    @property
    def slo_attainment_range(self) -> tuple[float, float]:
        """Lowest and highest attainment that the errors of the clocks leave open."""
        kept = kept_of(
            self.ttft_ns,
            self.tpot_ns,
            slo_ttft_ms=self.spec.slo_ttft_ms,
            slo_tpot_ms=self.spec.slo_tpot_ms,
            error_ns=2 * max(self.clock_error_ns.values(), default=0),
        )
        low, high = kept.requests - kept.may_have_missed, kept.requests + kept.may_have_kept
        return low / self.spec.requests, high / self.spec.requests


def check(spec: InferenceSpec, ranks: int) -> None:
    """Reject a spec that is invalid on every lab.

    Raises:
        UsageError: a value is invalid; the message names it.
    """
    require_finite(spec)
    check_queue_pairs(spec)
    groups = (spec.prefill_ranks, ranks - spec.prefill_ranks) if spec.prefill_ranks else (ranks,)
    if any(group < MIN_GROUP for group in groups):
        sizes = " and ".join(str(group) for group in groups)
        raise UsageError(f"an inference job needs groups of at least 2 ranks, got {sizes} of {ranks}")
    if not 1 <= spec.tokens <= MAX_TOKENS:
        raise UsageError(f"a request has 1 to {MAX_TOKENS} tokens, got {spec.tokens}")
    if spec.requests < 1:
        raise UsageError(f"an inference job has at least 1 request, got {spec.requests}")
    for name in ("prefill_bytes", "kv_bytes", "decode_bytes"):
        size = getattr(spec, name)
        if size <= 0 or size % 4:
            raise UsageError(f"{name} must be a multiple of 4 above 0, got {size}")
    for name in ("prefill_ms", "decode_ms", "slo_ttft_ms", "slo_tpot_ms"):
        if getattr(spec, name) < 0:
            raise UsageError(f"{name} cannot be negative, got {getattr(spec, name):g}")
    if spec.slo_tpot_ms and spec.tokens == 1:
        raise UsageError("slo_tpot_ms needs at least 2 tokens: with 1 no time from token to token is measured")


def request(spec: InferenceSpec, ranks: int) -> Trace:
    """Return the operations of one request as a trace; the last `tokens` operations are the tokens."""
    prefill = tuple(range(spec.prefill_ranks or ranks))
    decode = tuple(range(spec.prefill_ranks, ranks)) if spec.prefill_ranks else prefill
    parts: list[tuple[str, tuple[int, ...], int, float]] = [
        ("all-reduce", prefill, spec.prefill_bytes, spec.prefill_ms)
    ]
    if spec.prefill_ranks:
        parts += [("p2p", (src, decode[src % len(decode)]), spec.kv_bytes, 0.0) for src in prefill]
    parts += [("all-reduce", decode, spec.decode_bytes, spec.decode_ms)] * spec.tokens
    operations = tuple(
        Operation(
            record=number,
            collective=name,
            members=members,
            size_bytes=size,
            pauses_ns=(round(pause_ms * 1e6),) * len(members),
            not_before_ns=(0,) * len(members),
        )
        for number, (name, members, size, pause_ms) in enumerate(parts)
    )
    return Trace(source="inference", format="made", ranks=ranks, operations=operations)


def start(lab: TrafficLab, spec: InferenceSpec, on_event: OnEvent | None = None) -> Running[InferenceResult]:
    """Start an inference job.

    Raises:
        UsageError: the spec names something that the lab does not have; nothing was started.
        LabError: the job could not be started; nothing is left running.
    """
    ranks = len(place(lab, spec))
    check(spec, ranks)
    trace = request(spec, ranks)
    return replay.start_trace(
        lab, spec, trace, lambda done: _result(spec, done), repeat=spec.requests, on_event=on_event
    )


def run(lab: TrafficLab, spec: InferenceSpec, on_event: OnEvent | None = None) -> InferenceResult:
    """Run an inference job and wait for its end. Raises the exceptions of `start`."""
    with start(lab, spec, on_event) as running:
        return running.wait(replay.timeout_s(running, spec.requests))


def _result(spec: InferenceSpec, done: Execution) -> InferenceResult:
    ((_, running),) = done.runs
    rows = list(zip(*done.iterations[0], strict=False))  # one row per request that every rank has finished
    tokens = list(enumerate(done.trace.operations))[-spec.tokens :]
    phases = done.batches[0].phases
    ttft_ns, tpot_ns = [], []
    for row in rows:
        ends = [
            [_ended_ns(row[member], phases[index][place]) for place, member in enumerate(operation.members)]
            for index, operation in tokens
        ]
        ttft_ns.append(max(ends[0]) - min(row[member].start_ns for member in done.trace.operations[0].members))
        tpot_ns.append(tuple(_slowest(later, sooner) for sooner, later in pairwise(ends)))
    all_ns = [time_ns for operation in tpot_ns for time_ns in operation]
    kept = kept_of(ttft_ns, tpot_ns, slo_ttft_ms=spec.slo_ttft_ms, slo_tpot_ms=spec.slo_tpot_ms)
    return InferenceResult(
        **common_results(running, done.ranks),
        spec=spec,
        requests_completed=len(rows),
        ttft_ns=tuple(ttft_ns),
        tpot_ns=tuple(tpot_ns),
        ttft_p50_ns=traffic_metrics.percentile(ttft_ns, 50),
        ttft_p99_ns=traffic_metrics.percentile(ttft_ns, 99),
        tpot_p50_ns=traffic_metrics.percentile(all_ns, 50),
        tpot_p95_ns=traffic_metrics.percentile(all_ns, 95),
        tpot_p99_ns=traffic_metrics.percentile(all_ns, 99),
        slo_attainment=kept.requests / spec.requests,
    )


def _ended_ns(item: Iteration, phase: int) -> int:
    return item.end_ns - item.comm_ns + item.phases_ns[phase]


def _slowest(later: Sequence[int], sooner: Sequence[int]) -> int:
    return max(b - a for a, b in zip(sooner, later, strict=True))
