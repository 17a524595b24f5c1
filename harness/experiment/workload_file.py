"""The workload of an experiment file: a collective, a flow or flows, a job on a grid of ranks, or a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from faultbed.harness.experiment.flow_words import FlowWords
from faultbed.harness.experiment.job_words import parse_grid, parse_phase, storage_of
from faultbed.harness.experiment.replayed import Replay, digest, spec_of
from faultbed.harness.quantities import parse_duration_ns, parse_size_bytes
from faultbed.harness.strict import Section, convert, fail, one_of, positive, read
from faultbed.testbed.errors import UsageError
from faultbed.traffic.engine.task_specs import QpParams, check_qp
from faultbed.traffic.flows.flow_run import SPREADS, TRANSPORTS, VERBS, FlowSpec, check
from faultbed.traffic.flows.matrix import PATTERNS, ZONE_PATTERNS
from faultbed.traffic.schedules import COLLECTIVES, MAX_QPS_PER_PEER, algorithms_for
from faultbed.traffic.schedules import SPREADS as SPREAD_OF_RANKS
from faultbed.traffic.traces import FORMATS
from faultbed.traffic.workloads.collective import AUTO, REDOPS
from faultbed.traffic.workloads.elastic.machine import MODES as RESTARTS
from faultbed.traffic.workloads.elastic.machine import WITHOUT_SPARE, Policy
from faultbed.traffic.workloads.elastic.resilience import Resilience
from faultbed.traffic.workloads.elastic.resilience import check as check_resilience
from faultbed.traffic.workloads.inference import InferenceSpec
from faultbed.traffic.workloads.job import JobPhase, JobSpec
from faultbed.traffic.workloads.job import check as check_job
from faultbed.traffic.workloads.ranking import RankingSpec
from faultbed.traffic.workloads.ranks import ITEM_BYTES, MAX_RANKS, WARMUP, RanksSpec, check_queue_pairs
from faultbed.traffic.workloads.replay_batches import check as check_replay
from faultbed.traffic.workloads.storage_service import LEAST_KEPT, Storage
from faultbed.traffic.workloads.storage_service import check as check_storage

__all__ = ["KEYS", "Collective", "Flow", "Job", "Workload", "duration_ns", "kinds_in", "workload_of"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective, repeated. Exactly one of `iterations` and `duration_ns` is set.

    `ranks` are RNICs (`host1:rxe0`) in rank order; empty: the first RNIC of each host. `compute_units` is the work of
    each rank's GPU before each iteration (0: none); a unit is one block of the soft GPU's matrix product. `warmup`
    iterations come first and are not counted. The other fields are as in
    `faultbed.traffic.workloads.collective.CollectiveSpec`, and `qps_per_peer`, `spread` and `entropy` as in
    `faultbed.traffic.workloads.ranks.RanksSpec`.
    """

    collective: str
    algorithm: str
    size_bytes: int
    dtype: str
    op: str
    root: int
    skew: float
    in_place: bool
    ranks: tuple[str, ...]
    ranks_per_rnic: int = 1
    iterations: int | None
    duration_ns: int | None
    compute_units: int
    warmup: int
    qps_per_peer: int = 1
    spread: str = "split"
    entropy: int = 0
    qp: QpParams = field(default_factory=QpParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """An elephant: `qps` queue pairs with messages of `size_bytes`, `depth` outstanding on each.

    `flow` is the verb. `spread` says how messages are distributed over the queue pairs. These and the fields
    `transport` to `check` are as in `faultbed.traffic.flows.flow_spec.FlowSpec`. With `probe`, a flow of small timed
    writes runs beside each flow (`faultbed.harness.experiment.flow_words`).

    With a `pattern` (`faultbed.traffic.flows.matrix`) there are several equal flows, between the `pairs` that
    `faultbed.harness.run.prepare.bind_to_lab` resolves; `src` and `dst` are then empty.
    """

    flow: str
    src: str
    dst: str
    pattern: str | None = None
    pairs: tuple[tuple[str, str], ...] = ()
    qps: int
    spread: str
    size_bytes: int
    depth: int
    duration_ns: int
    transport: str = "rc"
    entropy: int = 0
    admit: int = 0
    rate_bps: float = 0.0
    on_s: float = 0.0
    off_s: float = 0.0
    latency: bool = False
    late_receives_ms: float = 0.0
    check: bool = False
    probe: bool = False
    qp: QpParams = field(default_factory=QpParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job on a grid of ranks (`faultbed.traffic.workloads.job.JobSpec`), which ends after its iterations.

    With `resilience` it restarts after the loss of a host (`faultbed.traffic.workloads.elastic`).
    """

    grid: tuple[tuple[str, int], ...]
    phases: tuple[JobPhase, ...]
    dtype: str
    op: str
    ranks: tuple[str, ...]
    ranks_per_rnic: int = 1
    iterations: int
    warmup: int
    compute_units: int
    storage: Storage | None = None
    resilience: Resilience | None = None
    qps_per_peer: int = 1
    spread: str = "split"
    entropy: int = 0
    qp: QpParams = field(default_factory=QpParams)


_OF_SPEC = tuple(
    flow_field.name
    for flow_field in fields(Flow)
    if flow_field.name in FlowSpec.__slots__ and flow_field.name not in ("src", "dst")
)
"""Fields that a `Flow` shares with its `FlowSpec`, under the same name and with the same value."""

Workload = Collective | Flow | Job | InferenceSpec | RankingSpec | Replay
"""An inference or ranking job ends after its requests or iterations, and has the type that traffic requires."""


def duration_ns(workload: Workload) -> int | None:
    """Return the duration of a workload; None if it ends after iterations, requests or a trace."""
    return workload.duration_ns if isinstance(workload, Collective | Flow) else None


class _RanksFile(Section, frozen=True, kw_only=True):
    ranks: tuple[str, ...] = ()
    warmup: Annotated[int, msgspec.Meta(ge=0)] = WARMUP
    qps_per_peer: Annotated[int, msgspec.Meta(ge=1, le=MAX_QPS_PER_PEER)] = 1
    spread: str = SPREAD_OF_RANKS[0]
    entropy: Annotated[int, msgspec.Meta(ge=0)] = 0
    qp: dict[str, int] = msgspec.field(default_factory=dict)


class _CollectiveFile(_RanksFile, frozen=True, kw_only=True):
    collective: str
    ranks_per_rnic: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    size: str
    algorithm: str = "auto"
    dtype: str = "fp32"
    op: str = "sum"
    root: Annotated[int, msgspec.Meta(ge=0)] = 0
    skew: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    in_place: bool = False
    iterations: Annotated[int, msgspec.Meta(ge=1)] | None = None
    duration: str | None = None
    compute_units: Annotated[int, msgspec.Meta(ge=0)] = 0


class _StorageFile(Section, frozen=True, kw_only=True):
    host: str
    ingest: str | None = None
    checkpoint: str | None = None
    keep: Annotated[int, msgspec.Meta(ge=LEAST_KEPT, le=100)] = 3
    readers: tuple[str, ...] = ()
    read_every: str = "250ms"


class _ResilienceFile(Section, frozen=True, kw_only=True):
    restart: str = "spare"
    spares: tuple[str, ...] = ()
    without_spare: str = "fail"
    most_restarts: Annotated[int, msgspec.Meta(ge=1, le=100)] = 8
    rejoin: str = "600s"


class _JobFile(_RanksFile, frozen=True, kw_only=True):
    grid: str
    ranks_per_rnic: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    phases: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    iterations: Annotated[int, msgspec.Meta(ge=1)]
    dtype: str = "fp32"
    op: str = "sum"
    compute_units: Annotated[int, msgspec.Meta(ge=0)] = 0
    storage: _StorageFile | None = None
    resilience: _ResilienceFile | None = None


class _InferenceFile(_RanksFile, frozen=True, kw_only=True):
    requests: Annotated[int, msgspec.Meta(ge=1)]
    tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    prefill_ranks: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefill: str = "4MiB"
    kv: str = "1MiB"
    decode: str = "64KiB"
    prefill_time: str = "0ms"
    decode_time: str = "0ms"
    slo_ttft: str = "0ms"
    slo_tpot: str = "0ms"


class _RankingFile(_RanksFile, frozen=True, kw_only=True):
    embedding: str
    iterations: Annotated[int, msgspec.Meta(ge=1)]
    skew: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    dense: str = "256KiB"
    dense_time: str = "0ms"


class _ReplayFile(_RanksFile, frozen=True, kw_only=True):
    replay: str
    format: str | None = None
    groups: str | None = None
    speed: float = 1.0
    compute: bool = True
    scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    shrink: bool = False
    skip_unsupported: bool = False
    repeat: Annotated[int, msgspec.Meta(ge=1)] = 1


class _FlowFile(Section, frozen=True, kw_only=True):
    flow: str
    duration: str
    src: str = ""
    dst: str = ""
    pattern: str | None = None
    spread: str = "each"
    size: str = "64KiB"
    qps: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    depth: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 16
    transport: str = "rc"
    entropy: Annotated[int, msgspec.Meta(ge=0)] = 0
    admit: Annotated[int, msgspec.Meta(ge=0)] = 0
    rate: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    on: str | None = None
    off: str | None = None
    latency: bool = False
    late_receives: str | None = None
    check: bool = False
    probe: bool = False
    qp: dict[str, int] = msgspec.field(default_factory=dict)


_NOT_OF_SPEC = frozenset({"flow", "src", "dst", "pattern", "probe"})
"""Keys of a flow in the file that are not parameters of `flow_of`."""


def kinds_in(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of workload whose own key is in a section `[workload]`. A valid section has one kind."""
    return tuple(name for name, kind in _KINDS.items() if kind.key in raw)


def workload_of(raw: dict[str, Any], source: str) -> Workload:
    """Return the workload of the section `[workload]` in the file `source`.

    Raises:
        ConfigError: a value is invalid; the message names its path.
    """
    kinds = kinds_in(raw)
    if len(kinds) != 1:
        problem = (
            'say what runs: collective = "all-reduce", or flow = "write", or a job: grid = "tp=2,dp=2" to train, '
            'requests = 50 to infer, embedding = "1MiB" to rank, or replay = "traces/job.json"'
        )
        raise fail(source, "workload", problem)
    kind = _KINDS[kinds[0]]
    return kind.workload_of(convert(raw, kind.file, source, path="workload", section=kinds[0], keys=KEYS), source)


def _flow(flow: _FlowFile, source: str) -> Flow:
    one_of(flow.flow, VERBS, source, "workload.flow")
    one_of(flow.spread, SPREADS, source, "workload.spread")
    one_of(flow.transport, tuple(TRANSPORTS), source, "workload.transport")
    if flow.pattern is not None:
        one_of(flow.pattern, (*PATTERNS, *ZONE_PATTERNS), source, "workload.pattern")
    if bool(flow.src and flow.dst) == bool(flow.pattern) or bool(flow.src) != bool(flow.dst):
        raise fail(source, "workload", 'name src and dst, or a pattern such as "incast"')

    def of(parser: Callable[[str], _T], text: str, name: str) -> _T:
        value = read(parser, text, source, f"workload.{name}")
        if not value:
            raise fail(source, f"workload.{name}", "must be more than 0")
        return value

    words = {name: getattr(flow, name) for name in _FlowFile.__struct_fields__ if name not in _NOT_OF_SPEC}
    spec = FlowWords(verb=flow.flow, **{**words, "qp": _qp(flow.qp, source)}).flow(of)
    try:
        check(spec)
    except UsageError as error:
        raise fail(source, "workload", str(error)) from error
    if flow.latency and flow.probe:
        problem = (
            "latency times the flow's own messages, probe those of the flow beside it, and latency.p50 and latency.p99 "
            "cannot mix both; leave one of them out"
        )
        raise fail(source, "workload", problem)
    return Flow(
        flow=spec.verb,
        src=flow.src,
        dst=flow.dst,
        pattern=flow.pattern,
        size_bytes=spec.message_bytes,
        duration_ns=parse_duration_ns(flow.duration),
        probe=flow.probe,
        **{name: getattr(spec, name) for name in _OF_SPEC},
    )


def _collective(collective: _CollectiveFile, source: str) -> Collective:
    if (collective.iterations is None) == (collective.duration is None):
        raise fail(source, "workload", "give either iterations or duration")
    one_of(collective.collective, COLLECTIVES, source, "workload.collective")
    one_of(collective.algorithm, (AUTO, *algorithms_for(collective.collective)), source, "workload.algorithm")
    one_of(collective.dtype, tuple(ITEM_BYTES), source, "workload.dtype")
    one_of(collective.op, REDOPS, source, "workload.op")
    return Collective(
        collective=collective.collective,
        algorithm=collective.algorithm,
        dtype=collective.dtype,
        op=collective.op,
        root=collective.root,
        skew=collective.skew,
        in_place=collective.in_place,
        size_bytes=positive(parse_size_bytes, collective.size, source, "workload.size"),
        ranks=collective.ranks,
        ranks_per_rnic=collective.ranks_per_rnic,
        iterations=collective.iterations,
        duration_ns=None
        if collective.duration is None
        else positive(parse_duration_ns, collective.duration, source, "workload.duration"),
        compute_units=collective.compute_units,
        warmup=collective.warmup,
        **_queue_pairs(collective, source),
    )


def _job(job: _JobFile, source: str) -> Job:
    one_of(job.dtype, tuple(ITEM_BYTES), source, "workload.dtype")
    one_of(job.op, REDOPS, source, "workload.op")
    phases = tuple(
        read(parse_phase, text, source, f"workload.phases[{index}]") for index, text in enumerate(job.phases)
    )
    job_workload = Job(
        grid=read(parse_grid, job.grid, source, "workload.grid"),
        phases=phases,
        dtype=job.dtype,
        op=job.op,
        ranks=job.ranks,
        ranks_per_rnic=job.ranks_per_rnic,
        iterations=job.iterations,
        warmup=job.warmup,
        compute_units=job.compute_units,
        storage=None if job.storage is None else _storage(job.storage, source),
        resilience=None if job.resilience is None else _resilience(job.resilience, source),
        **_queue_pairs(job, source),
    )
    spec = JobSpec(
        grid=job_workload.grid,
        phases=phases,
        dtype=job_workload.dtype,
        redop=job_workload.op,
        iterations=job_workload.iterations,
        ranks_per_rnic=job_workload.ranks_per_rnic,
        storage=job_workload.storage,
    )
    try:
        check_job(spec)
    except UsageError as error:
        raise fail(source, "workload", str(error)) from error
    if job_workload.resilience is not None:
        try:
            check_resilience(spec, job_workload.resilience)
        except UsageError as error:
            raise fail(source, "workload.resilience", str(error)) from error
    return job_workload


def _resilience(section: _ResilienceFile, source: str) -> Resilience:
    one_of(section.restart, RESTARTS, source, "workload.resilience.restart")
    one_of(section.without_spare, WITHOUT_SPARE, source, "workload.resilience.without_spare")
    for index, name in enumerate(section.spares):
        if name in section.spares[:index]:
            raise fail(source, f"workload.resilience.spares[{index}]", f'"{name}" appears twice; a spare is one RNIC')
    policy = msgspec.convert(
        {
            "restart": section.restart,
            "without_spare": section.without_spare,
            "most_restarts": section.most_restarts,
        },
        Policy,
    )
    rejoin_ns = positive(parse_duration_ns, section.rejoin, source, "workload.resilience.rejoin")
    return Resilience(policy=policy, spares=section.spares, rejoin_s=rejoin_ns / 1e9)


def _inference(job: _InferenceFile, source: str) -> InferenceSpec:
    def size(name: str) -> int:
        return positive(parse_size_bytes, getattr(job, name), source, f"workload.{name}")

    def time_ms(name: str) -> float:
        return read(parse_duration_ns, getattr(job, name), source, f"workload.{name}") / 1e6

    return InferenceSpec(
        ranks=job.ranks,
        warmup=job.warmup,
        **_queue_pairs(job, source),
        requests=job.requests,
        tokens=job.tokens,
        prefill_ranks=job.prefill_ranks,
        prefill_bytes=size("prefill"),
        kv_bytes=size("kv"),
        decode_bytes=size("decode"),
        prefill_ms=time_ms("prefill_time"),
        decode_ms=time_ms("decode_time"),
        slo_ttft_ms=time_ms("slo_ttft"),
        slo_tpot_ms=time_ms("slo_tpot"),
    )


def _ranking(job: _RankingFile, source: str) -> RankingSpec:
    return RankingSpec(
        ranks=job.ranks,
        warmup=job.warmup,
        **_queue_pairs(job, source),
        iterations=job.iterations,
        embedding_bytes=positive(parse_size_bytes, job.embedding, source, "workload.embedding"),
        skew=job.skew,
        dense_bytes=positive(parse_size_bytes, job.dense, source, "workload.dense"),
        dense_ms=read(parse_duration_ns, job.dense_time, source, "workload.dense_time") / 1e6,
    )


def _replay(trace: _ReplayFile, source: str) -> Replay:
    if trace.format is not None:
        one_of(trace.format, FORMATS, source, "workload.format")
    try:
        sha256 = digest(trace.replay, trace.groups, source)
    except UsageError as error:
        raise fail(source, "workload.replay", str(error)) from error
    workload = Replay(
        replay=trace.replay,
        sha256=sha256,
        format=trace.format,
        groups=trace.groups,
        speed=trace.speed,
        compute=trace.compute,
        scale=trace.scale,
        shrink=trace.shrink,
        skip_unsupported=trace.skip_unsupported,
        repeat=trace.repeat,
        warmup=trace.warmup,
        ranks=trace.ranks,
        **_queue_pairs(trace, source),
    )
    try:
        check_replay(spec_of(workload))
    except UsageError as error:
        raise fail(source, "workload", str(error)) from error
    return workload


def _storage(storage: _StorageFile, source: str) -> Storage:
    def of(parser: Callable[[str], _T], text: str, name: str) -> _T:
        return read(parser, text, source, f"workload.storage.{name}")

    made = replace(
        storage_of(storage.host, storage.ingest, storage.checkpoint, of),
        keep=storage.keep,
        readers=storage.readers,
        read_every_ns=of(parse_duration_ns, storage.read_every, "read_every"),
    )
    try:
        check_storage(made)
    except UsageError as error:
        raise fail(source, "workload.storage", str(error)) from error
    return made


def _queue_pairs(file: _RanksFile, source: str) -> dict[str, Any]:
    """Return the settings of queue pairs, which all workloads on ranks have."""
    one_of(file.spread, SPREAD_OF_RANKS, source, "workload.spread")
    words: dict[str, Any] = {
        "qps_per_peer": file.qps_per_peer,
        "spread": file.spread,
        "entropy": file.entropy,
        "qp": _qp(file.qp, source),
    }
    try:
        check_queue_pairs(RanksSpec(**words))
    except UsageError as error:
        raise fail(source, "workload", str(error)) from error
    return words


def _qp(values: dict[str, int], source: str) -> QpParams:
    try:
        params = QpParams.of(values)
        check_qp(params)
    except UsageError as error:
        raise fail(source, "workload.qp", str(error)) from error
    return params


class _Kind(NamedTuple):
    """A kind of workload: the key that no other kind has, the type of its section, and the function that reads it."""

    key: str
    file: type[Section]
    workload_of: Callable[[Any, str], Workload]


_KINDS: Mapping[str, _Kind] = {
    "collective": _Kind("collective", _CollectiveFile, _collective),
    "flow": _Kind("flow", _FlowFile, _flow),
    "job": _Kind("grid", _JobFile, _job),
    "inference": _Kind("requests", _InferenceFile, _inference),
    "ranking": _Kind("embedding", _RankingFile, _ranking),
    "replay": _Kind("replay", _ReplayFile, _replay),
}
KEYS: Mapping[str, tuple[str, ...]] = {
    **{name: kind.file.__struct_fields__ for name, kind in _KINDS.items()},
    "storage": _StorageFile.__struct_fields__,
    "resilience": _ResilienceFile.__struct_fields__,
}
"""The keys of each kind of workload and of each section within `[workload]`."""
