"""What a workload did in one pass: `evidence/<pass>/workload.json`.

All times are the controller's CLOCK_MONOTONIC in nanoseconds. Times of nodes were converted with the measured clock
offset, and `clock_error_ns` is the largest uncertainty of that conversion. A `Sample` counts payload bytes whose
completion was seen in [t_ns, t_ns + sample_ns): at the sender for ranks and RC flows, at the receiver for UC and UD.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from faultbed.testbed.observe.machine_load import MachineLoad
from faultbed.traffic.engine.run_results import QpError, Standstill
from faultbed.traffic.programs.program_results import ProgramEnd
from faultbed.traffic.workloads.elastic.elastic_results import RankState, Restart

__all__ = [
    "Connection",
    "Iteration",
    "Paths",
    "Rank",
    "RankSeries",
    "ReaderRun",
    "RebuildMark",
    "ResilienceRun",
    "Sample",
    "Serving",
    "Summary",
    "WorkloadEvidence",
    "connection_between",
    "refuse_samples",
]

_Name = TypeVar("_Name", int, str)
_LONGEST_NS = 31 * 24 * 3600 * 10**9
"""The most time of one workload that is read: every 100 ms of it take memory."""


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of the workload (a flow has two: 0 sends, 1 receives)."""

    rank: int
    host: str
    rnic: str


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of one bin; `[t_ns, bytes]` in the file."""

    t_ns: int
    bytes: int


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration of one rank.

    The rank computes (`compute_ns`), waits for its neighbours (`wait_ns`) and communicates (`comm_ns`). With storage it
    first waits for its data (`ingest_ns`) and at the end for its checkpoint (`checkpoint_ns`). Those data were read
    within `read_ns`, from `read_from_ns` after the start on (negative: before it). `wrong` counts wrong elements of the
    result. `split_ns` are the parts of its collectives (`faultbed.traffic.engine.latency_split`), if recorded.
    """

    index: int
    start_ns: int
    compute_ns: int
    comm_ns: int
    wait_ns: int
    wrong: int = 0
    ingest_ns: int = 0
    checkpoint_ns: int = 0
    read_from_ns: int = 0
    read_ns: int = 0
    split_ns: tuple[int, ...] = ()

    @property
    def end_ns(self) -> int:
        """When the iteration was over."""
        return self.start_ns + self.ingest_ns + self.compute_ns + self.wait_ns + self.comm_ns + self.checkpoint_ns


class RankSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one rank did over time. `stored_ns`: from when to when each of its checkpoints was being stored."""

    rank: int
    samples: tuple[Sample, ...] = ()
    iterations: tuple[Iteration, ...] = ()
    stored_ns: tuple[tuple[int, int], ...] = ()


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """A queue pair of the workload. `path` are the nodes that its data crosses, as each switch's kernel routes it.

    `ack_path` are those that its ACKs cross, from `dst` to `src`; empty in runs that did not record it. `index` stays
    the same when the queue pair is rebuilt, which changes `lqpn` and `rqpn`; None in runs that did not record it.
    """

    index: int | None = None
    src: str
    dst: str
    lqpn: int
    rqpn: int
    udp_sport: int | None
    path: tuple[str, ...]
    ack_path: tuple[str, ...] = ()


Paths = Mapping[int, tuple[tuple[str, ...], tuple[str, ...]]]
"""Nodes that each connection's data and ACKs cross, by its index; empty: unknown."""


class RebuildMark(msgspec.Struct, frozen=True, kw_only=True):
    """Controller times of a queue pair that failed: its error, its new connection, and its first data after that.

    `rebuilt_ns` None: it was not connected again. `recovered_ns` None: it carried no data after that.
    """

    error_ns: int
    rebuilt_ns: int | None
    recovered_ns: int | None


class ReaderRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a host beside the job read from the job's storage.

    `reads_ns` are (planned, begin, end) of each read that was planned during the job. `failure` is why reads are
    missing; None: none is.
    """

    host: str
    reads_ns: tuple[tuple[int, int, int], ...]
    failure: str | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Bandwidths of nccl-tests at the median time, in Gb/s. None: not a collective, or no iteration finished."""

    algbw_gbps: float | None = None
    busbw_gbps: float | None = None


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Times of an inference job's requests.

    `ttft_ns` has the time to first token of each request, and `tpot_ns` its times from token to token. `slo_attainment`
    is the share of requests that met the SLO; None: the job has no SLO.
    """

    ttft_ns: tuple[int, ...]
    tpot_ns: tuple[tuple[int, ...], ...]
    slo_attainment: float | None = None


class ResilienceRun(msgspec.Struct, frozen=True, kw_only=True):
    """Restarts and final state of a job that restarts after losses.

    Attributes:
        restarts: one for each loss.
        states: the final states that ranks reported.
        repeated_iterations: executions that restarts repeated, over all ranks.
        initialised_ns: how long it took to connect the first placement.
        connections: number of queue pairs at the end.
        wrong_elements: wrong elements of all executions, including repeated ones.
        longest_ingest_ns: longest wait for data from storage in any execution.
        longest_checkpoint_ns: longest wait for a checkpoint in any execution.
    """

    restarts: tuple[Restart, ...]
    states: tuple[RankState, ...]
    repeated_iterations: int
    initialised_ns: int
    connections: int
    wrong_elements: int = 0
    longest_ingest_ns: int = 0
    longest_checkpoint_ns: int = 0


class WorkloadEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the workload of a pass did.

    Attributes:
        planned: the workload, as in `plan.json`.
        began_ns: when the workload began to send (its warm-up); 0: not recorded, or there was no workload.
        t0_ns: begin of the measured work.
        end_ns: end of the measured work. Silence after it is not a stall.
        load: how busy the controller was while it ran.
        failure: where the workload was when it failed; None: it did not fail, or there was none.
        wrong_elements: wrong elements of its results, as the workload itself counted them.
        latencies_ns: message times of each flow that measured them, in order: all of them, or every k-th.
        checked_bytes: bytes of messages that were compared with the sent ones; None: no flow had to compare.
        wrong_bytes: how many of these bytes differed.
        silent_flows: flows (`host1:rxe0 > host2:rxe0`) of which no byte arrived; None: not recorded, or no flows.
        unchecked_flows: flows that had to compare their bytes, and compared none.
        readers: hosts that read the job's storage beside it (`readers` of `[workload.storage]`).
        programs: every end of a process of a workload with `command`; None: another workload.
    """

    planned: dict[str, Any]
    began_ns: int = 0
    t0_ns: int
    end_ns: int
    sample_ns: int = 100_000_000
    clock_error_ns: int = 0
    ranks: tuple[Rank, ...] = ()
    series: tuple[RankSeries, ...] = ()
    connections: tuple[Connection, ...] = ()
    qp_errors: int = 0
    rebuilds: int = 0
    qps_lost: tuple[QpError, ...] = ()
    rebuild_marks: tuple[RebuildMark, ...] = ()
    standstills: tuple[Standstill, ...] = ()
    load: MachineLoad | None = None
    failure: str | None = None
    wrong_elements: int = 0
    summary: Summary = Summary()
    serving: Serving | None = None
    latencies_ns: tuple[tuple[int, ...], ...] = ()
    checked_bytes: int | None = None
    wrong_bytes: int = 0
    silent_flows: tuple[str, ...] | None = None
    unchecked_flows: tuple[str, ...] = ()
    resilience: ResilienceRun | None = None
    readers: tuple[ReaderRun, ...] = ()
    programs: tuple[ProgramEnd, ...] | None = None

    def refuse_contradictions(self) -> None:
        """Raise ValueError, with the field, if records contradict each other or a value is impossible."""
        if self.series and self.end_ns - self.t0_ns > _LONGEST_NS:
            raise ValueError(
                f"end_ns: {self.end_ns} is more than a month after t0_ns ({self.t0_ns}): no run lasts so long"
            )
        if not 0 <= self.wrong_bytes <= (self.checked_bytes or 0):
            raise ValueError(
                f"wrong_bytes: {self.wrong_bytes} of {self.checked_bytes or 0} checked bytes cannot be wrong"
            )
        if self.sample_ns <= 0:
            raise ValueError(f"sample_ns: {self.sample_ns} is no length of time")
        _refuse_other_ranks(self)
        _refuse_series(self)
        _refuse_other_times(self.series, self.t0_ns, self.end_ns)
        if self.resilience is not None:
            _refuse_restarts(self.resilience)
        if self.serving is not None:
            _refuse_serving(self.serving)
        _refuse_readers(self.readers)


def connection_between(work: WorkloadEvidence, ends: tuple[str, str], *, index: int, qpn: int) -> Connection | None:
    """Return the connection that a QP belonged to when its error or its stall was recorded; None: unknown.

    Args:
        work: what the workload did.
        ends: the RNIC of the QP, and the RNIC at the other end.
        index: the connection's index; -1: it was not recorded.
        qpn: the QP's number at that time. It identifies a connection without an index, unless the QP was rebuilt since.
            After a rebuild the connection is known only if it is the only one between the two RNICs.
    """
    by_index = [
        connection
        for connection in work.connections
        if connection.index == index and {connection.src, connection.dst} == set(ends)
    ]
    if by_index:
        return by_index[0]
    between = [connection for connection in work.connections if (connection.src, connection.dst) == ends]
    same_number = [connection for connection in between if connection.lqpn == qpn] or [
        connection for connection in between if connection.rqpn == qpn
    ]
    candidates = same_number or between
    return candidates[0] if len(candidates) == 1 else None


def _refuse_other_ranks(work: WorkloadEvidence) -> None:
    """Raise ValueError if there is a series of an unknown rank, or series of some ranks only."""
    ranks = {rank.rank for rank in work.ranks}
    recorded = {series.rank for series in work.series}
    if unknown := sorted(recorded - ranks):
        raise ValueError(f"series: rank {unknown[0]} is none of ranks")
    if recorded and (missing := sorted(ranks - recorded)):
        raise ValueError(f"series: rank {missing[0]} is missing")


def _refuse_readers(readers: Sequence[ReaderRun]) -> None:
    """Raise ValueError if a reader appears twice, or a read does not begin and end in this order after its plan."""
    if twice := _repeated(reader.host for reader in readers):
        raise ValueError(f"readers: {twice[0]} appears twice")
    for reader in readers:
        for planned_ns, begin_ns, end_ns in reader.reads_ns:
            if not planned_ns <= begin_ns <= end_ns:
                raise ValueError(f"readers: a read of {reader.host} is planned, begun and over in another order")


def _refuse_serving(serving: Serving) -> None:
    """Raise ValueError if a request lacks one of its two times, or the SLO attainment is not a share."""
    if len(serving.tpot_ns) != len(serving.ttft_ns):
        raise ValueError(
            f"serving.tpot_ns: of {len(serving.tpot_ns)} requests, but serving.ttft_ns is of {len(serving.ttft_ns)}"
        )
    if serving.slo_attainment is not None and not 0 <= serving.slo_attainment <= 1:
        raise ValueError(f"serving.slo_attainment: {serving.slo_attainment} is no share")


def _refuse_restarts(run: ResilienceRun) -> None:
    """Raise ValueError if a restart is missing or out of order, or a final state appears twice."""
    numbers = [restart.number for restart in run.restarts]
    if numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"resilience.restarts: numbered {numbers}, not from 1 on")
    if twice := _repeated(state.rank for state in run.states):
        raise ValueError(f"resilience.states: rank {twice[0]} appears twice")


def _refuse_series(work: WorkloadEvidence) -> None:
    """Raise ValueError if a record appears twice, a count is negative, or the series lasts for more than a month."""
    if twice := _repeated(series.rank for series in work.series):
        raise ValueError(f"series: rank {twice[0]} appears twice")
    for series in work.series:
        if twice := _repeated(step.index for step in series.iterations):
            raise ValueError(f"series: iteration {twice[0]} of rank {series.rank} appears twice")
        if any(step.wrong < 0 for step in series.iterations):
            raise ValueError(f"series: rank {series.rank} has less than 0 wrong elements")
        ends = [(step.end_ns, step.index) for step in series.iterations]
        starts = [(step.start_ns, step.index) for step in series.iterations]
        if ends and max(ends)[0] - min(starts)[0] > _LONGEST_NS:
            raise ValueError(
                f"series: iteration {max(ends)[1]} of rank {series.rank} ends more than a month after iteration "
                f"{min(starts)[1]} begins: no run lasts so long"
            )
        restarts = len(work.resilience.restarts) if work.resilience is not None else 0
        refuse_samples(f"series: rank {series.rank}", series.samples, work.sample_ns, restarts=restarts)


def refuse_samples(place: str, samples: Sequence[Sample], sample_ns: int, *, restarts: int = 0) -> None:
    """Raise ValueError if two samples overlap in time: their bytes would count twice.

    A rank that restarts on another host continues with that host's clock. Two of its samples may overlap there.
    """
    times = sorted(sample.t_ns for sample in samples)
    if twice := _repeated(times):
        raise ValueError(f"{place}: the sample at {twice[0]} ns appears twice")
    overlapping = [later for earlier, later in pairwise(times) if later - earlier < sample_ns // 2]
    if len(overlapping) > restarts:
        raise ValueError(f"{place}: the sample at {overlapping[0]} ns covers the time of another one")
    if any(sample.bytes < 0 for sample in samples):
        raise ValueError(f"{place}: a sample has less than 0 bytes")


def _refuse_other_times(several: Sequence[RankSeries], t0_ns: int, end_ns: int) -> None:
    """Raise ValueError if no record of the workload lies within the time of the run: it belongs to another run."""
    spans = [
        *((sample.t_ns, sample.t_ns) for series in several for sample in series.samples if sample.bytes),
        *((step.start_ns, step.end_ns) for series in several for step in series.iterations),
    ]
    if spans and not any(begin <= end_ns and end >= t0_ns for begin, end in spans):
        raise ValueError("series: no sample and no iteration lies between t0_ns and end_ns: they are of another run")


def _repeated(names: Iterable[_Name]) -> list[_Name]:
    return [name for name, count in Counter(names).items() if count > 1]
