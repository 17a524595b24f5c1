"""What a run measured: `measurements.json`, written once by the run loop, read by the judge and the report.

All times are the controller's CLOCK_MONOTONIC in nanoseconds. Times of nodes were converted with the measured clock
offset, and `clock_error_ns` is the largest uncertainty of that conversion. A `Sample` counts payload bytes whose
completion was seen in [t_ns, t_ns + sample_ns): at the sender for ranks and RC flows, at the receiver for UC and UD.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeVar

import msgspec

from faultbed.harness.experiment.run_plan import ScheduledFault
from faultbed.harness.packets.congestion_signals import Answers
from faultbed.harness.record.plausible import refuse_addresses, refuse_large_numbers
from faultbed.harness.verdict import ExcludedHost, LabState, RoutingReceipt
from faultbed.inject.evidence.receipt import Receipt
from faultbed.testbed.model.lab_kind import LabKind
from faultbed.testbed.model.selectors import is_chosen_later
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.observe import counters
from faultbed.testbed.observe.machine_load import MachineLoad
from faultbed.testbed.observe.telemetry import Change as NetworkChange
from faultbed.testbed.observe.telemetry import Machine
from faultbed.traffic.engine.run_results import QpError, Standstill
from faultbed.traffic.programs.program_results import ProgramEnd
from faultbed.traffic.workloads.elastic.elastic_results import RankState, Restart

__all__ = [
    "Connection",
    "Deltas",
    "Environment",
    "FaultRun",
    "Iteration",
    "Measurements",
    "PacketSummary",
    "Paths",
    "Rank",
    "RankSeries",
    "RebuildMark",
    "ResilienceRun",
    "Sample",
    "Serving",
    "Summary",
    "connection_between",
    "counter_deltas",
    "decode",
    "encode",
    "refuse_samples",
]

_Name = TypeVar("_Name", int, str)
_LONGEST_NS = 31 * 24 * 3600 * 10**9
"""The most time of one workload that is read: every 100 ms of it take memory."""

Deltas = Mapping[str, Mapping[str, int]]
"""Node to counter to growth."""


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


class FaultRun(msgspec.Struct, frozen=True, kw_only=True):
    """A planned fault and its outcome.

    Attributes:
        plan: the fault as planned.
        receipt: None: the run ended before the fault was armed.
        doubts: the injector's own reasons not to believe the receipt. Any of them makes the run INCONCLUSIVE.
        edges: (controller ns, on) of every change that the fault made.
        colour: colour of the kind in reports (`#rrggbb`), from the catalogue of faults; None: the report chooses.
        passed: lower and upper bound of the packets that passed the hop of a packet fault while it acted; None: the
            fault has no hop, or nothing counted them.
        paths: paths of data and ACKs of each connection, by its index, when the target was chosen by them; None: the
            plan names the target.
    """

    plan: ScheduledFault
    receipt: Receipt | None
    doubts: tuple[str, ...] = ()
    edges: tuple[tuple[int, bool], ...] = ()
    colour: str | None = None
    passed: tuple[int, int] | None = None
    paths: Paths | None = None

    @property
    def target(self) -> str:
        """The name of the target; the selector of the plan if its target should have been chosen and was not."""
        is_open = self.receipt is not None and is_chosen_later(self.plan.target)
        return self.receipt.target if self.receipt is not None and is_open else self.plan.target

    @property
    def target_text(self) -> str:
        """The target for people: with the plan's selector, if it was chosen by what the workload used."""
        return self.target if self.target == self.plan.target else f"{self.target} ({self.plan.target})"


class PacketSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the captured packets; `packets.json` has the details.

    Attributes:
        frames: number of captured frames.
        missed: frames that the ports counted and the capture does not have.
        extra: frames that the capture has and the ports did not count.
        broken: violations of the rules of go-back-N.
        goings_back: pairs of controller times (ns): when the NAK passed or the timer expired, and when the packet
            passed again.
        doubts: reasons why there may be more violations than `broken`.
        cnp: how receivers answered marked packets; None: not checked.
    """

    frames: int
    missed: int
    extra: int = 0
    broken: int
    goings_back: tuple[tuple[int, int], ...] = ()
    doubts: tuple[str, ...] = ()
    cnp: tuple[Answers, ...] | None = None


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


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """`environment.json`: what the run ran on. Never environment variables, never anything secret.

    `started_utc` is when the run began (ISO 8601). `code` is the digest of our own sources
    (`faultbed.harness.record.code`); None: the run is older than that.
    `routing` is the routing scheme that the experiment chose; None: it chose none.
    """

    started_utc: str = ""
    faultbed: str
    git: str | None
    code: str | None = None
    python: str
    platform: str
    controller_kernel: str
    cpu_count: int
    qemu: str | None = None
    accelerator: str | None = None
    guest_kernel: str | None = None
    packages: dict[str, str] = {}
    left_out: tuple[ExcludedHost, ...] = ()
    routing: str | None = None


class Measurements(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run measured, as in `measurements.json`.

    Attributes:
        rate_scale: a soft lab shapes its links to the topology's speeds divided by this; None: no link is shaped.
        offered_bps: how much the workload may send at these rates.
        carried_bps: the emulation's capacity without shapers.
        began_ns: when the workload began to send (its warm-up); 0: not recorded, or there was no workload.
        t0_ns: begin of the measured work.
        end_ns: end of the measured work. Silence after it is not a stall.
        counters_before: counters by node. Those of an RNIC are named `rxe0.out_of_seq_request`.
        counters_after: the same counters after the workload.
        twin: series of the fault-free run from the same snapshot.
        twin_failure: how that run ended with wrong data, after which no fault was tried.
        changes: changes of switches while the workload ran. `telemetry.parquet` has the counters.
        reads: (begin, end) of each time at which the harness itself queried the lab while the workload ran. The
            baseline leaves them out.
        load: how busy the controller was during the run's workload.
        twin_load: how busy it was during the twin's workload.
        failure: where the workload was when it failed; None: it did not fail, or there was none.
        latencies_ns: message times of each flow that measured them, in order: all of them, or every k-th.
        checked_bytes: bytes of messages that were compared with the sent ones; None: no flow had to compare.
        wrong_bytes: how many of these bytes differed.
        silent_flows: flows (`host1:rxe0 > host2:rxe0`) of which no byte arrived; None: not recorded, or no flows.
        unchecked_flows: flows that had to compare their bytes, and compared none.
        readers: hosts that read the job's storage beside it (`readers` of `[workload.storage]`).
        programs: every end of a process of a workload with `command`; None: another workload.
        errors: errors of the harness itself. Any of them makes the run an ERROR.
        routing: receipt of the run's routing scheme; None: the experiment chose none, or it was never applied.
        lab_diff: differences of the lab's fingerprint after the run from that before; empty if `lab_state` is CLEAN.
    """

    schema: Literal[1] = 1
    lab: str
    lab_kind: LabKind
    accelerator: str | None
    topology: Topology
    rate_scale: float | None = None
    offered_bps: float | None = None
    carried_bps: float | None = None
    began_ns: int = 0
    t0_ns: int
    end_ns: int
    sample_ns: int = 100_000_000
    clock_error_ns: int = 0
    workload: dict[str, Any]
    ranks: tuple[Rank, ...]
    series: tuple[RankSeries, ...]
    connections: tuple[Connection, ...] = ()
    qp_errors: int = 0
    rebuilds: int = 0
    qps_lost: tuple[QpError, ...] = ()
    rebuild_marks: tuple[RebuildMark, ...] = ()
    standstills: tuple[Standstill, ...] = ()
    faults: tuple[FaultRun, ...] = ()
    counters_before: dict[str, dict[str, int]] = {}
    counters_after: dict[str, dict[str, int]] = {}
    twin: tuple[RankSeries, ...] | None = None
    twin_failure: str | None = None
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
    changes: tuple[NetworkChange, ...] = ()
    kernel: tuple[NetworkChange, ...] = ()
    watched: tuple[Machine, ...] = ()
    lab_state: LabState
    lab_diff: tuple[str, ...] = ()
    reads: tuple[tuple[int, int], ...] = ()
    load: MachineLoad | None = None
    twin_load: MachineLoad | None = None
    failure: str | None = None
    errors: tuple[str, ...] = ()
    routing: RoutingReceipt | None = None


def connection_between(run: Measurements, ends: tuple[str, str], *, index: int, qpn: int) -> Connection | None:
    """Return the connection that a QP belonged to when its error or its stall was recorded; None: unknown.

    Args:
        run: the run.
        ends: the RNIC of the QP, and the RNIC at the other end.
        index: the connection's index; -1: it was not recorded.
        qpn: the QP's number at that time. It identifies a connection without an index, unless the QP was rebuilt since.
            After a rebuild the connection is known only if it is the only one between the two RNICs.
    """
    by_index = [
        connection
        for connection in run.connections
        if connection.index == index and {connection.src, connection.dst} == set(ends)
    ]
    if by_index:
        return by_index[0]
    between = [connection for connection in run.connections if (connection.src, connection.dst) == ends]
    same_number = [connection for connection in between if connection.lqpn == qpn] or [
        connection for connection in between if connection.rqpn == qpn
    ]
    candidates = same_number or between
    return candidates[0] if len(candidates) == 1 else None


def counter_deltas(run: Measurements) -> dict[str, dict[str, int]]:
    """Return counter increments by node for counters read before and after. A counter that was reset began at 0."""
    return counters.deltas(run.counters_before, run.counters_after)


def encode(measurements: Measurements) -> bytes:
    """Return the bytes of `measurements.json`."""
    return msgspec.json.encode(measurements) + b"\n"


def decode(content: bytes) -> Measurements:
    """Read `measurements.json`.

    Raises:
        msgspec.ValidationError: the content is not measurements of schema 1.
        ValueError: the content contradicts itself, for example by a rank without a series, a record that appears twice
            or lies outside the run, or a link to an unknown RNIC; or a value is impossible.
    """
    refuse_large_numbers(content)
    measured = msgspec.json.decode(content, type=Measurements)
    refuse_addresses(measured.topology)
    _refuse_contradictions(measured)
    return measured


def _refuse_contradictions(run: Measurements) -> None:
    """Reject a file that violates what its readers rely on, because it was edited or assembled."""
    _refuse_loose_links(run.topology)
    if run.series and run.end_ns - run.t0_ns > _LONGEST_NS:
        raise ValueError(f"end_ns: {run.end_ns} is more than a month after t0_ns ({run.t0_ns}): no run lasts so long")
    _refuse_byte_counts(run)
    if run.sample_ns <= 0:
        raise ValueError(f"sample_ns: {run.sample_ns} is no length of time")
    if twice := _repeated(fault.plan.id for fault in run.faults):
        raise ValueError(f"faults: {twice[0]} appears twice")
    _refuse_other_ranks(run)
    for name, several in (("series", run.series), ("twin", run.twin or ())):
        _refuse_series(name, several, run)
    _refuse_other_times(run.series, run.t0_ns, run.end_ns)
    if run.resilience is not None:
        _refuse_restarts(run.resilience)
    if run.serving is not None:
        _refuse_serving(run.serving)
    _refuse_readers(run.readers)


def _refuse_other_ranks(run: Measurements) -> None:
    """Raise ValueError if there is a series of an unknown rank, or series of some ranks only."""
    ranks = {rank.rank for rank in run.ranks}
    recorded = {series.rank for series in run.series}
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


def _refuse_byte_counts(run: Measurements) -> None:
    """Raise ValueError unless the number of wrong bytes is between 0 and that of compared bytes."""
    if not 0 <= run.wrong_bytes <= (run.checked_bytes or 0):
        raise ValueError(f"wrong_bytes: {run.wrong_bytes} of {run.checked_bytes or 0} checked bytes cannot be wrong")


def _refuse_loose_links(topology: Topology) -> None:
    """Raise ValueError if a link ends at a node or an RNIC that is not in the topology."""
    rnics = {(host.name, rnic.name) for host in topology.hosts for rnic in host.rnics}
    nodes = {*topology.host_by_name, *topology.switch_by_name}
    for link in topology.links:
        if not {link.a.node, link.b.node} <= nodes or (link.rnic is not None and (link.b.node, link.rnic) not in rnics):
            raise ValueError(f"topology.links: {link.name} ends at an unknown node or RNIC")


def _refuse_restarts(run: ResilienceRun) -> None:
    """Raise ValueError if a restart is missing or out of order, or a final state appears twice."""
    numbers = [restart.number for restart in run.restarts]
    if numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"resilience.restarts: numbered {numbers}, not from 1 on")
    if twice := _repeated(state.rank for state in run.states):
        raise ValueError(f"resilience.states: rank {twice[0]} appears twice")


def _refuse_series(name: str, several: Sequence[RankSeries], run: Measurements) -> None:
    """Raise ValueError if a record appears twice, a count is negative, or the series lasts for more than a month."""
    if twice := _repeated(series.rank for series in several):
        raise ValueError(f"{name}: rank {twice[0]} appears twice")
    for series in several:
        if twice := _repeated(step.index for step in series.iterations):
            raise ValueError(f"{name}: iteration {twice[0]} of rank {series.rank} appears twice")
        if any(step.wrong < 0 for step in series.iterations):
            raise ValueError(f"{name}: rank {series.rank} has less than 0 wrong elements")
        ends = [(step.end_ns, step.index) for step in series.iterations]
        starts = [(step.start_ns, step.index) for step in series.iterations]
        if ends and max(ends)[0] - min(starts)[0] > _LONGEST_NS:
            raise ValueError(
                f"{name}: iteration {max(ends)[1]} of rank {series.rank} ends more than a month after iteration "
                f"{min(starts)[1]} begins: no run lasts so long"
            )
        restarts = len(run.resilience.restarts) if run.resilience is not None else 0
        refuse_samples(f"{name}: rank {series.rank}", series.samples, run.sample_ns, restarts=restarts)


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
