"""Convert the results of traffic to the types of its evidence. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from faultbed.harness.record.evidence.workload_evidence import (
    Connection,
    Iteration,
    Rank,
    RankSeries,
    ReaderRun,
    ResilienceRun,
    Sample,
    Serving,
    Summary,
)
from faultbed.traffic.engine.run_results import Iteration as TrafficIteration
from faultbed.traffic.engine.run_results import Sample as TrafficSample
from faultbed.traffic.flows.flow_run import FlowResult, FlowsResult
from faultbed.traffic.probes.ecmp_entropy import sport_of
from faultbed.traffic.workloads.collective import CollectiveResult
from faultbed.traffic.workloads.elastic.elastic_results import ElasticResult
from faultbed.traffic.workloads.inference import InferenceResult
from faultbed.traffic.workloads.job import JobResult
from faultbed.traffic.workloads.ranks_result import RanksResult

__all__ = [
    "Result",
    "checked_of",
    "connections_of",
    "latencies_of",
    "ranks_of",
    "readers_of",
    "resilience_of",
    "series_of",
    "serving_of",
    "silent_of",
    "summary_of",
    "summed",
    "unchecked_of",
]

Result = FlowsResult | RanksResult

_GIGABITS = 8.0
"""nccl-tests counts in GB/s, the report in Gb/s."""
_MOST_TIMES = 5_000
"""Most message times that are stored for each flow: enough for a 99th percentile, and 50 KB in a file."""


def ranks_of(result: Result | None) -> tuple[Rank, ...]:
    """Return the ranks of a workload. The ranks of flows are their ends, sources first."""
    return tuple(
        Rank(rank=index, host=name.partition(":")[0], rnic=name.partition(":")[2])
        for index, name in enumerate(result.ranks if result else ())
    )


def series_of(result: Result) -> tuple[RankSeries, ...]:
    """Return samples and iterations by rank."""
    return tuple(
        RankSeries(
            rank=index,
            samples=summed(result.samples_of(index)),
            iterations=tuple(_iteration(item) for item in result.iterations[index]),
            stored_ns=_stored(result, index),
        )
        for index in range(len(result.ranks))
    )


def _stored(result: Result, rank: int) -> tuple[tuple[int, int], ...]:
    if not isinstance(result, JobResult):
        return ()
    return tuple((item.start_ns, item.end_ns) for item in result.checkpoints if item.rank == rank)


def connections_of(
    result: Result | None, paths: Mapping[int, tuple[tuple[str, ...], tuple[str, ...]]]
) -> tuple[Connection, ...]:
    """Return the queue pairs of a workload. `paths` has the paths of data and of ACKs by index of the connection."""
    return tuple(
        Connection(
            index=item.index,
            src=item.src,
            dst=item.dst,
            lqpn=item.lqpn,
            rqpn=item.rqpn,
            udp_sport=sport_of(item),
            path=paths.get(item.index, ((), ()))[0],
            ack_path=paths.get(item.index, ((), ()))[1],
        )
        for item in (result.connections if result else ())
    )


def summary_of(result: CollectiveResult) -> Summary:
    """Return the bandwidths of a collective; they are None if no operation finished."""
    if not result.iterations_completed:
        return Summary()
    return Summary(algbw_gbps=result.algbw_gbytes_per_s * _GIGABITS, busbw_gbps=result.busbw_gbytes_per_s * _GIGABITS)


def serving_of(result: InferenceResult) -> Serving:
    """Return the token times of an inference job."""
    return Serving(
        ttft_ns=result.ttft_ns,
        tpot_ns=result.tpot_ns,
        slo_attainment=result.slo_attainment if result.spec.slo_ttft_ms or result.spec.slo_tpot_ms else None,
    )


def latencies_of(result: FlowsResult) -> tuple[tuple[int, ...], ...]:
    """Return the message times of each flow that measured them, thinned to every k-th if there are many.

    All flows have the same k, so that each message counts equally in a percentile of all. An engine whose memory was
    full has thinned the times of its flow already, by a power of two.
    """
    timed = [flow for flow in result.flows if flow.latencies_ns]
    every = max((flow.latencies_every for flow in timed), default=1)
    alike = [flow.latencies_ns[:: every // flow.latencies_every] for flow in timed]
    step = -(-max(map(len, alike), default=1) // _MOST_TIMES)
    return tuple(times_ns[::step] for times_ns in alike)


def checked_of(result: FlowsResult) -> tuple[int | None, int]:
    """Return how many bytes of all flows were compared, and how many of them were wrong; None: none was to be."""
    checking = [flow for flow in result.flows if flow.spec.check]
    if not checking:
        return None, 0
    return sum(flow.checked_bytes or 0 for flow in checking), sum(flow.wrong_bytes or 0 for flow in checking)


def silent_of(result: FlowsResult) -> tuple[str, ...]:
    """Return the flows, without probes beside them, of which no byte arrived, and not a part of a message either."""
    return tuple(_ends_of(flow) for flow in result.without_probes if not flow.size_bytes and not _arrived(flow))


def unchecked_of(result: FlowsResult) -> tuple[str, ...]:
    """Return the flows that were to compare their bytes, and compared none."""
    return tuple(_ends_of(flow) for flow in result.flows if flow.spec.check and not flow.checked_bytes)


def _arrived(flow: FlowResult) -> int:
    """Return the bytes in the samples of the end that knows what arrived: over RC that is the sender."""
    end = flow.spec.src if flow.spec.transport == "rc" else flow.spec.dst
    return sum(sample.size_bytes for sample in flow.samples if sample.endpoint == end)


def _ends_of(flow: FlowResult) -> str:
    return f"{flow.spec.src} > {flow.spec.dst}"


def readers_of(result: JobResult) -> tuple[ReaderRun, ...]:
    """Return what the readers beside a job read."""
    return tuple(ReaderRun(host=item.host, reads_ns=item.reads, failure=item.failure) for item in result.readers)


def resilience_of(result: ElasticResult) -> ResilienceRun:
    """Return restarts and final state of a job that restarts after losses."""
    return ResilienceRun(
        restarts=result.restarts,
        states=result.states,
        repeated_iterations=result.repeated_iterations,
        initialised_ns=result.initialised_ns,
        connections=len(result.connections),
        wrong_elements=result.wrong_elements,
        longest_ingest_ns=result.longest_ingest_ns,
        longest_checkpoint_ns=result.longest_checkpoint_ns,
    )


def summed(samples: Iterable[TrafficSample]) -> tuple[Sample, ...]:
    """Return one sample for each bin: several flows of an RNIC share its bins, and so do the ends of a restart."""
    size_of: dict[int, int] = {}
    for item in samples:
        size_of[item.start_ns] = size_of.get(item.start_ns, 0) + item.size_bytes
    return tuple(Sample(t_ns=t_ns, bytes=size) for t_ns, size in sorted(size_of.items()))


def _iteration(item: TrafficIteration) -> Iteration:
    return Iteration(
        index=item.index,
        start_ns=item.start_ns,
        compute_ns=item.compute_ns,
        comm_ns=item.comm_ns - item.wait_ns,
        wait_ns=item.wait_ns,
        wrong=item.wrong_elements,
        ingest_ns=item.ingest_ns,
        checkpoint_ns=item.checkpoint_ns,
        read_from_ns=item.read_from_ns,
        read_ns=item.read_ns,
        split_ns=item.split_ns,
    )
