"""The workload of an experiment file: a collective, a flow or flows, a job on a grid of ranks, or a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from faultbed.harness.experiment.declare.field_types import (
    Choice,
    Count,
    Duration,
    Flag,
    Number,
    Parsed,
    Rate,
    Selector,
    Several,
    Size,
)
from faultbed.harness.experiment.declare.section import OneOf, Section, Table
from faultbed.harness.experiment.job_sections import (
    ResilienceSection,
    StorageSection,
    parse_grid,
    parse_phase,
    write_grid,
    write_phase,
)
from faultbed.harness.experiment.program.command_section import Command
from faultbed.harness.experiment.rank_fields import Entropy, OnRanks, QueuePair, same_fields
from faultbed.harness.experiment.replayed import Replay
from faultbed.testbed.errors import UsageError
from faultbed.testbed.suggestions import hint
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows.flow_spec import ATOMIC_BYTES, SPREADS, TRANSPORTS, VERBS, FlowSpec, check
from faultbed.traffic.flows.matrix import PATTERNS, ZONE_PATTERNS
from faultbed.traffic.schedules import ALGORITHMS, COLLECTIVES, algorithms_for
from faultbed.traffic.workloads.collective import AUTO, REDOPS
from faultbed.traffic.workloads.elastic.resilience import Resilience
from faultbed.traffic.workloads.elastic.resilience import check as check_resilience
from faultbed.traffic.workloads.inference import MAX_TOKENS, InferenceSpec
from faultbed.traffic.workloads.job import JobPhase, JobSpec
from faultbed.traffic.workloads.job import check as check_job
from faultbed.traffic.workloads.ranking import RankingSpec
from faultbed.traffic.workloads.ranks import ITEM_BYTES, MAX_RANKS
from faultbed.traffic.workloads.storage_service import Storage

__all__ = ["WORKLOAD", "Collective", "Flow", "Inference", "Job", "Ranking", "Workload", "duration_ns"]

_DTYPE = Choice("Type of the elements.", among=tuple(ITEM_BYTES))
_OP = Choice("Operation of a reduction.", among=REDOPS)
_COMPUTE = Count(
    "Units of GPU work of each rank before each iteration; a unit is one block of the soft GPU's matrix product.",
    least=0,
    options=("--compute",),
)
_RANKS_PER_RNIC = Count("Ranks on each RNIC; the order of RNICs repeats.", least=1, most=MAX_RANKS)
_ITERATIONS = Count("Number of measured iterations.", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(OnRanks):
    """A collective, repeated. Exactly one of `iterations` and `duration_ns` is set.

    The fields are as in `faultbed.traffic.workloads.collective.CollectiveSpec` and
    `faultbed.traffic.workloads.ranks.RanksSpec`.
    """

    collective: Annotated[str, Choice("The collective.", among=COLLECTIVES)]
    size_bytes: Annotated[
        int,
        Size(
            "Bytes of the whole buffer, as nccl-tests counts them; a barrier has none.",
            key="size",
            above=0,
        ),
    ]
    algorithm: Annotated[
        str,
        Choice(
            "The algorithm; auto: the quickest by the cost model.",
            among=(AUTO, *dict.fromkeys(algorithm for _, algorithm in ALGORITHMS)),
        ),
    ] = AUTO
    dtype: Annotated[str, _DTYPE] = "fp32"
    op: Annotated[str, _OP] = "sum"
    root: Annotated[int, Count("Rank that broadcasts or reduces.", least=0)] = 0
    skew: Annotated[float, Number("Zipf exponent of the message sizes of all-to-allv; 0: equal.", least=0)] = 0.0
    in_place: Annotated[bool, Flag("One buffer for input and output.")] = False
    ranks_per_rnic: Annotated[int, _RANKS_PER_RNIC] = 1
    iterations: Annotated[int | None, _ITERATIONS] = None
    duration_ns: Annotated[
        int | None,
        Duration("How long it is repeated, instead of a number of iterations.", key="duration", above=0),
    ] = None
    compute_units: Annotated[int, _COMPUTE] = 0

    def problems(self) -> Iterable[tuple[str, str]]:
        """Return an algorithm of another collective, and a length that is given twice or not at all."""
        if (self.iterations is None) == (self.duration_ns is None):
            yield "", "give either iterations or duration"
        known = (AUTO, *algorithms_for(self.collective))
        if self.algorithm not in known:
            yield "algorithm", f'no algorithm "{self.algorithm}"; {hint(self.algorithm, known)}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow(Section):
    """An elephant: `qps` queue pairs with messages of `size_bytes`, `depth` outstanding on each.

    `flow` is the verb. The fields are as in `faultbed.traffic.flows.flow_spec.FlowSpec`. With `probe`, a flow of small
    timed writes runs beside each flow (`faultbed.harness.experiment.workload_specs.between`).

    With a `pattern` (`faultbed.traffic.flows.matrix`) there are several equal flows, between the `pairs` that
    `faultbed.harness.run.prepare.bind_to_lab` resolves; `src` and `dst` are then empty.
    """

    flow: Annotated[str, Choice("The verb.", among=VERBS, options=("--verb",))]
    duration_ns: Annotated[int, Duration("How long it sends.", key="duration", above=0, options=("--for",))]
    src: Annotated[str, Selector("RNIC that sends; of a read, the one that receives.")] = ""
    dst: Annotated[str, Selector("RNIC at the other end.")] = ""
    pattern: Annotated[
        str | None,
        Choice(
            "Many flows between the first RNICs of all hosts (in-zone, across-zones: between all RNICs), instead of "
            "src and dst.",
            among=(*PATTERNS, *ZONE_PATTERNS),
        ),
    ] = None
    pairs: tuple[tuple[str, str], ...] = ()
    spread: Annotated[str, Choice("Distribution of messages over the queue pairs.", among=SPREADS)] = "each"
    size_bytes: Annotated[int, Size("Message size; an atomic has 8 bytes.", key="size", above=0)] = 65536
    qps: Annotated[int, Count("Queue pairs of a flow.", least=1, most=1024)] = 1
    depth: Annotated[int, Count("Messages outstanding on each queue pair; 0 chooses by size.", least=0, most=4096)] = 16
    transport: Annotated[str, Choice("Transport of the queue pairs.", among=tuple(TRANSPORTS))] = "rc"
    entropy: Entropy = 0
    admit: Annotated[
        int, Count("Chains of messages that a receiver's host grants at a time; 0: no admission.", least=0)
    ] = 0
    rate_bps: Annotated[float, Rate("Payload rate of each flow; 0b/s: no limit.", key="rate", least=0)] = 0.0
    on_s: Annotated[float, Duration("Length of each burst; `off` is the pause after it.", key="on", to="s")] = 0.0
    off_s: Annotated[float, Duration("Pause after each burst.", key="off", to="s")] = 0.0
    latency: Annotated[bool, Flag("Time every message, from posting to completion.")] = False
    late_receives_ms: Annotated[
        float,
        Duration(
            "Slow receivers of send and write-imm: they post one receive at a time, this long after the last message "
            "(which causes RNR NAKs).",
            key="late_receives",
            to="ms",
        ),
    ] = 0.0
    check: Annotated[bool, Flag("Verify every byte that arrives (not for write and atomic over rc).")] = False
    probe: Annotated[bool, Flag("Add a probe to each flow: 64 B writes, one at a time, 100 per second.")] = False
    qp: Annotated[QpParams, Table("Parameters of the queue pairs.", section=QueuePair)] = field(
        default_factory=QpParams
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        """Return ends that are missing or given twice, and two measurements of latency under one name."""
        if bool(self.src and self.dst) == bool(self.pattern) or bool(self.src) != bool(self.dst):
            yield "", 'name src and dst, or a pattern such as "incast"'
        if self.latency and self.probe:
            problem = (
                "latency times the flow's own messages, probe those of the flow beside it, and latency.p50 and "
                "latency.p99 cannot mix both; leave one of them out"
            )
            yield "", problem

    def decoded(self, source: str) -> Flow:  # noqa: ARG002
        """Return the flow with the size of its messages.

        Raises:
            UsageError: its values contradict each other.
        """
        work = replace(self, size_bytes=ATOMIC_BYTES) if self.flow == "atomic" else self
        check(work.spec("", ""))
        return work

    def spec(self, src: str, dst: str) -> FlowSpec:
        """Return the flow between two RNICs as traffic takes it."""
        values = {
            **same_fields(FlowSpec, self),
            "src": src,
            "dst": dst,
            "verb": self.flow,
            "message_bytes": self.size_bytes,
            "duration_s": self.duration_ns / 1e9,
        }
        return FlowSpec(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(OnRanks):
    """A training job on a grid of ranks (`faultbed.traffic.workloads.job.JobSpec`), which ends after its iterations.

    With `resilience` it restarts after the loss of a host (`faultbed.traffic.workloads.elastic`).
    """

    grid: Annotated[
        tuple[tuple[str, int], ...],
        Parsed(
            "Dimensions of the grid of ranks, fastest first: tp=2,dp=2.",
            parser=parse_grid,
            writer=write_grid,
            example="tp=2,dp=2",
        ),
    ]
    phases: Annotated[
        tuple[JobPhase, ...],
        Several(
            "Collectives of all groups along a dimension, in order: dimension, collective, size and algorithm.",
            of=Parsed(
                "A collective along a dimension.",
                parser=parse_phase,
                writer=write_phase,
                example="dp:all-reduce:1MiB:ring",
            ),
            least=1,
            options=("--phase",),
        ),
    ]
    iterations: Annotated[int, _ITERATIONS]
    dtype: Annotated[str, _DTYPE] = "fp32"
    op: Annotated[str, _OP] = "sum"
    ranks_per_rnic: Annotated[int, _RANKS_PER_RNIC] = 1
    compute_units: Annotated[int, _COMPUTE] = 0
    storage: Annotated[
        Storage | None, Table("A host that serves the job over the front end.", section=StorageSection)
    ] = None
    resilience: Annotated[
        Resilience | None, Table("How the job restarts after the loss of a host.", section=ResilienceSection)
    ] = None

    def problems(self) -> Iterable[tuple[str, str]]:
        """Return a grid, a phase or a restart that no lab could do."""
        spec, place = JobSpec(**same_fields(JobSpec, self), redop=self.op), ""
        try:
            check_job(spec)
            if self.resilience is not None:
                place = "resilience"
                check_resilience(spec, self.resilience)
        except UsageError as error:
            yield place, str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference(OnRanks):
    """An inference job: for each request a prefill in bulk, then tokens one by one."""

    requests: Annotated[int, Count("Number of requests.", least=1)]
    tokens: Annotated[int, Count("Output tokens of a request.", least=1, most=MAX_TOKENS)] = 16
    prefill_ranks: Annotated[int, Count("Number of ranks that only prefill; 0: all ranks do both.", least=0)] = 0
    prefill_bytes: Annotated[int, Size("Bytes all-reduced by the prefill of a request.", key="prefill", above=0)] = (
        4 << 20
    )
    kv_bytes: Annotated[int, Size("KV cache from a prefill rank to a decode rank.", key="kv", above=0)] = 1 << 20
    decode_bytes: Annotated[int, Size("Bytes all-reduced for each token.", key="decode", above=0)] = 65536
    prefill_ms: Annotated[
        float, Duration("Compute time before a prefill, modelled as a pause.", key="prefill_time", to="ms")
    ] = 0.0
    decode_ms: Annotated[
        float, Duration("Compute time before a token, modelled as a pause.", key="decode_time", to="ms")
    ] = 0.0
    slo_ttft_ms: Annotated[float, Duration("SLO: time to first token; 0: none.", key="slo_ttft", to="ms")] = 0.0
    slo_tpot_ms: Annotated[float, Duration("SLO: mean time per output token; 0: none.", key="slo_tpot", to="ms")] = 0.0

    def decoded(self, source: str) -> InferenceSpec:  # noqa: ARG002
        """Return the job as traffic takes it."""
        return InferenceSpec(**same_fields(InferenceSpec, self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking(OnRanks):
    """A ranking job: skewed all-to-allv forward and backward, and an all-reduce."""

    embedding_bytes: Annotated[int, Size("Size of the rows that each rank gets.", key="embedding", above=0)]
    iterations: Annotated[int, _ITERATIONS]
    skew: Annotated[float, Number("Zipf exponent of the shard sizes; 0: equal shards.", least=0)] = 1.0
    dense_bytes: Annotated[int, Size("Bytes all-reduced at the end of an iteration.", key="dense", above=0)] = 1 << 18
    dense_ms: Annotated[float, Duration("Computing between forward and backward.", key="dense_time", to="ms")] = 0.0

    def decoded(self, source: str) -> RankingSpec:  # noqa: ARG002
        """Return the job as traffic takes it."""
        return RankingSpec(**same_fields(RankingSpec, self))


Workload = Collective | Flow | Job | InferenceSpec | RankingSpec | Replay | Command
"""An inference or ranking job ends after its requests or iterations, and has the type that traffic requires."""

_KINDS: Mapping[str, type[Section]] = {
    "collective": Collective,
    "flow": Flow,
    "grid": Job,
    "requests": Inference,
    "embedding": Ranking,
    "replay": Replay,
    "command": Command,
}
WORKLOAD = OneOf(
    "What runs: a collective, a flow, a job, a trace, or a program.",
    kinds=_KINDS,
    remedy='say what runs: collective = "all-reduce", or flow = "write", or a job: grid = "tp=2,dp=2" to train, '
    'requests = 50 to infer, embedding = "1MiB" to rank, or replay = "traces/job.json", or your program: '
    "command = 'ib_write_bw -d {rnic} -x {gid} {server}'",
)


def duration_ns(workload: Workload) -> int | None:
    """Return the duration of a workload; None if it ends after iterations, requests or a trace."""
    return workload.duration_ns if isinstance(workload, Collective | Flow | Command) else None
