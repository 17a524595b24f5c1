"""A collective over ranks, one RNIC a rank, iterated: what it is, how it is started, what it leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from testbed.errors import UsageError
from traffic import metrics, schedule
from traffic.engine import TrafficLab, endpoint
from traffic.flow import check_qp
from traffic.plan import Cable, Plan, QpParams, TaskPlan
from traffic.results import Connection, Endpoint, Iteration, Outcome, QpError, Rebuild, Sample, Window
from traffic.run import OnEvent, Running, begin
from traffic.samples import iterations_of, samples_of

__all__ = ["ITEM_BYTES", "CollectiveResult", "CollectiveSpec", "start"]

ITEM_BYTES = 4
"""Bytes of an fp32."""
MAX_BYTES = 1 << 30
MAX_RANKS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpec:
    """`size_bytes` of fp32 summed over `ranks` (RNIC names in rank order; empty: the first RNIC of every host).

    Give `duration_s` or `iterations`. With `compute_units` above 0 every iteration begins with that much work on the
    host's GPU `gpu`. `segment_bytes` is the pipelining grain, `slots` how many segments may be under way a connection.
    """

    collective: str = "all-reduce"
    algorithm: str = "ring"
    ranks: tuple[str, ...] = ()
    size_bytes: int = 1 << 20
    duration_s: float | None = None
    iterations: int | None = None
    compute_units: int = 0
    gpu: str = "gpu0"
    segment_bytes: int = 65536
    slots: int = 16
    qp: QpParams = field(default_factory=QpParams)
    op_deadline_s: float = 10.0
    peer_deadline_s: float = 30.0
    stall_deadline_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveResult:
    """A collective job that is over.

    `iterations[r]` are rank r's. `time_ns` is the median time of an operation (`metrics.operation_times_ns`), and
    algbw and busbw are those of nccl-tests for it, in GB/s (10^9 bytes). `wrong_elements` is summed over all ranks and
    iterations; `checked_elements` says how many were looked at.
    """

    spec: CollectiveSpec
    outcome: Outcome
    where: str | None
    window: Window
    ranks: tuple[str, ...]
    iterations: tuple[tuple[Iteration, ...], ...]
    iterations_completed: int
    wrong_elements: int
    checked_elements: int
    time_ns: float
    algbw_gbytes_per_s: float
    busbw_gbytes_per_s: float
    straggler: metrics.Straggler | None
    samples: tuple[Sample, ...]
    connections: tuple[Connection, ...]
    qp_errors: tuple[QpError, ...]
    rebuilds: tuple[Rebuild, ...]
    clock_error_ns: Mapping[str, int]

    @property
    def job_time_ns(self) -> int:
        """Job completion time: from the first rank's start to the last rank's last result."""
        return self.window.duration_ns

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def _check(spec: CollectiveSpec) -> None:
    if spec.size_bytes <= 0 or spec.size_bytes % ITEM_BYTES:
        raise UsageError(
            f"the size of a collective must be a multiple of {ITEM_BYTES} bytes (fp32) above 0, got {spec.size_bytes}"
        )
    if spec.size_bytes > MAX_BYTES:
        raise UsageError(f"the size of a collective is at most {MAX_BYTES} bytes, got {spec.size_bytes}")
    if (spec.duration_s is None) == (spec.iterations is None):
        raise UsageError("give a collective either a duration or a number of iterations")
    if spec.duration_s is not None and spec.duration_s <= 0:
        raise UsageError(f"a collective's duration must be above 0 s, got {spec.duration_s:g} s")
    if spec.iterations is not None and spec.iterations < 1:
        raise UsageError(f"a collective needs at least 1 iteration, got {spec.iterations}")
    if spec.segment_bytes < ITEM_BYTES or spec.segment_bytes % ITEM_BYTES:
        raise UsageError(f"segment size must be a multiple of {ITEM_BYTES} bytes above 0, got {spec.segment_bytes}")
    if not 2 <= spec.slots <= 1024:  # noqa: PLR2004
        raise UsageError(f"slots must be 2 to 1024, got {spec.slots}")
    if spec.compute_units < 0:
        raise UsageError(f"compute units cannot be negative, got {spec.compute_units}")
    check_qp(spec.qp)


def _ranks(lab: TrafficLab, spec: CollectiveSpec) -> tuple[Endpoint, ...]:
    names = spec.ranks or tuple(host.name for host in lab.topology.hosts)
    ranks = tuple(endpoint(lab.topology, name) for name in names)
    twice = {rank.name for rank in ranks if ranks.count(rank) > 1}
    if twice:
        raise UsageError(f"an RNIC is one rank only: {', '.join(sorted(twice))} is named twice")
    if len(ranks) > MAX_RANKS:
        raise UsageError(f"at most {MAX_RANKS} ranks, got {len(ranks)}")
    if spec.compute_units:
        for rank in ranks:
            if all(gpu.name != spec.gpu for gpu in lab.topology.host_by_name[rank.host].gpus):
                raise UsageError(f"{rank.host} has no GPU {spec.gpu}; leave out the compute phase, or name another")
    return ranks


def start(lab: TrafficLab, spec: CollectiveSpec, on_event: OnEvent | None = None) -> Running[CollectiveResult]:
    """Start a collective job on a lab.

    Raises:
        UsageError: the spec asks for something that is not there; nothing was started.
        LabError: it could not be started; nothing is left running.
    """
    _check(spec)
    ranks = _ranks(lab, spec)
    made = schedule.build(spec.collective, spec.algorithm, len(ranks))
    pairs = schedule.peers_of(made)
    cables = tuple(Cable(index=index, src=_task(src), dst=_task(dst)) for index, (src, dst) in enumerate(pairs))
    tasks = []
    for rank, place in enumerate(ranks):
        lanes: list[list[int | str]] = []
        for index, (src, dst) in enumerate(pairs):
            lanes += [[index, "out", dst]] if src == rank else []
            lanes += [[index, "in", src]] if dst == rank else []
        job = {
            "program": schedule.program(made, rank=rank, elements=spec.size_bytes // ITEM_BYTES),
            "lanes": lanes,
            "segment_bytes": min(spec.segment_bytes, spec.size_bytes),
            "slots": spec.slots,
            "iterations": spec.iterations,
            "duration_ms": None if spec.duration_s is None else round(spec.duration_s * 1000),
            "compute_units": spec.compute_units,
            "gpu_socket": f"/run/faultbed/{spec.gpu}.sock",
            "op_deadline_ms": round(spec.op_deadline_s * 1000),
            "qp": spec.qp.to_dict(),
        }
        tasks.append(TaskPlan(name=_task(rank), kind="rank", endpoint=place, spec=job, active=True))
    plan = Plan(
        what=f"{spec.collective} ({spec.algorithm}) over {len(ranks)} ranks",
        tasks=tuple(tasks),
        cables=cables,
        peer_deadline_s=spec.peer_deadline_s,
        stall_deadline_s=spec.stall_deadline_s,
    )
    return begin(lab, plan, lambda running: _finish(running, spec, ranks), on_event)


def _task(rank: int) -> str:
    return f"rank{rank}"


def _finish(running: Running[CollectiveResult], spec: CollectiveSpec, ranks: tuple[Endpoint, ...]) -> CollectiveResult:
    per_rank = tuple(iterations_of(running, _task(rank)) for rank in range(len(ranks)))
    times = metrics.operation_times_ns(per_rank)
    time_ns = metrics.percentile(times, 50) if times else 0.0
    ends = [done["end_ns"] for done in running.done.values()]
    starts = [done["start_ns"] for done in running.done.values()]
    return CollectiveResult(
        spec=spec,
        outcome=running.outcome,
        where=running.failure,
        window=Window(
            start_ns=min(starts, default=running.started_ns),
            end_ns=running.ended_ns if running.failure else max(ends, default=running.ended_ns),
        ),
        ranks=tuple(rank.name for rank in ranks),
        iterations=per_rank,
        iterations_completed=len(times),
        wrong_elements=sum(item.wrong_elements for rank in per_rank for item in rank),
        checked_elements=sum(len(rank) for rank in per_rank) * (spec.size_bytes // ITEM_BYTES),
        time_ns=time_ns,
        algbw_gbytes_per_s=metrics.algbw_gbytes_per_s(spec.size_bytes, time_ns),
        busbw_gbytes_per_s=metrics.busbw_gbytes_per_s(spec.collective, len(ranks), spec.size_bytes, time_ns),
        straggler=metrics.straggler(per_rank) if all(per_rank) else None,
        samples=samples_of(running),
        connections=running.connections,
        qp_errors=running.qp_errors,
        rebuilds=running.rebuilds,
        clock_error_ns=running.clock_error_ns,
    )
