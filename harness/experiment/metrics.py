"""The metrics an expectation can bound: one table, read by the decoder, the judge and the report.

Two metrics also exist once per fault: `recovery.<fault id>` and `after_clear.<fault id>`. `mmr.` and
`link_utilisation.` are followed by a tier, a switch or a link of the lab.

`about_faults` marks metrics that only mean something if the faults really happened. If a fault did not provably fire, a
check on such a metric is INCONCLUSIVE, whatever its value. A check on another metric keeps its own verdict, because
wrong data are wrong even if no fault fired.

`estimand` says what a value stands for: what happened in this run (`fact`), the time of an event in it (`event`), a
fault against the same run without it (`contrast`), or what runs of the experiment do in general (`setting`). The rule
of a bound follows from it (`faultbed.harness.bounds`). `either` marks the metrics of which `[[expect]] of` chooses.
`most` is the highest possible value of a share. A minimum of `most` means that nothing may be missing in this run,
which is a fact. A bound above `most` would hold, or fail, whatever happened, so it is rejected.

Absolute rates are rejected as bounds on a soft lab: its numbers are ratios within one run, never Gb/s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from faultbed.harness.ledger.statistics.decision import Estimand
from faultbed.inject.kinds.catalogue import Trait, has_trait
from faultbed.testbed.suggestions import nearest as nearest_word

__all__ = ["LINK_PREFIXES", "METRICS", "PER_FAULT_PREFIXES", "Metric", "Of", "lookup", "nearest", "needs_baseline"]

Of = Literal["run", "setting"]
Unit = Literal["s", "ratio", "count", "Gb/s", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of a run.

    Attributes:
        name: as an expectation names it.
        unit: of both the observed value and the bound.
        meaning: how the value is determined; the report prints it beside the value.
        about_faults: it means something only if the faults really happened.
        estimand: what the value stands for, and with it the rule that decides a bound on it.
        either: an expectation may choose whether it is about the run (`of = "run"`) or about the setting.
        most: highest possible value of a share.
        is_share_lost: it is 1 minus the contrast that is decided.
        has_controls: it is a ratio over fault-free times of the same run, before and after the faults.
        needs_twin: it compares the run with a fault-free twin.
        each_fault: whether a fault of a kind has a value, of which the worst counts; None: the run has one value.
    """

    name: str
    unit: Unit
    meaning: str
    about_faults: bool = False
    estimand: Estimand = "fact"
    either: bool = False
    most: float | None = None
    is_share_lost: bool = False
    has_controls: bool = False
    needs_twin: bool = False
    each_fault: Callable[[str], bool] | None = None

    @property
    def has_level(self) -> bool:
        """Whether only the level of the machine moves it from run to run, and no draw such as the hash of a flow."""
        return self.estimand == "setting"

    @property
    def is_noisy(self) -> bool:
        """Whether it differs from run to run, so that it equals nothing."""
        return self.estimand in ("setting", "contrast")

    def estimand_of(self, of: Of | None) -> Estimand:
        """Return what a bound on it stands for; `of` is the choice of the expectation, None: the usual one."""
        if of is None or not self.either:
            return self.estimand
        return "setting" if of == "setting" else "fact"


def _every(_kind: str) -> bool:
    return True


def _on_packets(kind: str) -> bool:
    """Return whether an end of a queue pair can notice a fault of a kind."""
    return not has_trait(kind, Trait.NO_PACKET)


def _on_routes(kind: str) -> bool:
    """Return whether a switch can route otherwise under a fault of a kind."""
    return has_trait(kind, Trait.CARRIER) or has_trait(kind, Trait.ROUTES)


_RECOVERY = (
    "Time from the fault's first firing until rolling goodput is back at 95 % of the noise floor "
    "of this run's own fault-free start, and stays there"
)
_AFTER_CLEAR = "Time from the fault's removal until goodput is back; 0 when it was back before"

_PHASES = {
    "detect": "From the first firing until an end reacted: a NAK or timer at a captured port, or a dead queue pair",
    "retransmit": "From detection until the lost packet passed a captured port again",
    "qp_error": "From the first firing until the first completion with an error; 0 when no queue pair died",
    "rebuild": "From the first completion with an error until the last failed QP was connected again; 0 without one",
    "first_data": "From the rebuild until data arrived over the new queue pairs",
    "hold": "From the last event of the other phases until goodput was back and stayed",
}

_RESTART = {
    "detect": "From the fault's first firing (without one: from the last iteration) until the loss was noticed",
    "diagnose": "From the noticed loss until it was known which hosts were lost, and whether only their network was",
    "reschedule": "From the diagnosis until the other ranks were stopped and every rank had a host again",
    "initialise": "From the rescheduling until all ranks had engines, memory and connections",
    "restore": "From the initialisation until all ranks had the state of the newest intact checkpoint",
    "catch_up": "From the restored state until all iterations that were finished before were finished again",
    "total": "From the fault's first firing until all iterations that were finished before were finished again",
}

_SPLIT = {
    "post": "posting work requests",
    "credit": "waiting for a peer's credit (clear to send)",
    "wire": "waiting for data and acknowledgements on the wire, or for a late peer",
    "copy": "copying and reducing what arrived",
    "completion": "waking up and handling completions",
}

_TABLE = (
    *(
        Metric(
            name=f"recovery.{name}",
            unit="s",
            estimand="event",
            about_faults=True,
            each_fault=_on_packets if name in ("detect", "retransmit") else _every,
            meaning=f"{meaning}; the worst fault counts",
        )
        for name, meaning in _PHASES.items()
    ),
    *(
        Metric(
            name=f"restart.{name}",
            unit="s",
            estimand="event",
            about_faults=True,
            meaning=f"{meaning}; the slowest restart counts",
        )
        for name, meaning in _RESTART.items()
    ),
    Metric(
        name="lost_iterations",
        unit="count",
        about_faults=True,
        meaning="Iterations that were finished and that restarts had to repeat, of all restarts",
    ),
    Metric(
        name="state_errors",
        unit="count",
        meaning="Elements of the final state, on all ranks, that differ from those of an uninterrupted job",
    ),
    Metric(
        name="initialise.time",
        unit="s",
        estimand="event",
        meaning="Time to start all engines of a job with restarts and to connect them, at its first start",
    ),
    Metric(
        name="capture.missed",
        unit="count",
        meaning="Frames by the captured ports' own counters that the capture lacks, each direction by itself, and what "
        "the kernel dropped; a lower bound if the capture has frames that the ports did not count",
    ),
    Metric(
        name="capture.broken_rules",
        unit="count",
        meaning="Packets that break a rule of go-back-N, at all captured ports",
    ),
    Metric(
        name="cnp.missing",
        unit="count",
        meaning="Congestion notifications that receivers of marked packets did not send: no CNP passed in the "
        "documented interval before such a packet, nor in half of it after the packet, at a captured port of theirs",
    ),
    Metric(
        name="cnp.gap",
        unit="s",
        estimand="event",
        meaning="Longest time from a marked packet at a captured port of its receiver to the next CNP, of packets "
        "without a CNP in the documented interval before them",
    ),
    Metric(
        name="wrong_elements",
        unit="count",
        meaning="Elements of the collective's result that were wrong, on all ranks",
    ),
    Metric(name="iterations", unit="count", meaning="Iterations that every rank finished"),
    Metric(
        name="kernel.errors",
        unit="count",
        meaning="Errors, and warnings of kernel code, in the kernel logs of all machines, and crashes in the logs of "
        "FRR and SONiC; without those that the inventory ignores",
    ),
    Metric(
        name="ingest.wait",
        unit="s",
        estimand="event",
        meaning="Longest time that a rank waited for the data of an iteration from storage",
    ),
    Metric(
        name="ingest.p99_ratio",
        unit="ratio",
        estimand="setting",
        either=True,
        meaning="Time of a read of the storage by readers (without them: of an iteration's data by a rank) while any "
        "rank stores a checkpoint, over that of the other reads: ratio of their 99th percentiles",
    ),
    Metric(
        name="checkpoint.wait",
        unit="s",
        estimand="event",
        meaning="Longest time that a rank waited for a checkpoint to be stored, at the end of the job too",
    ),
    Metric(
        name="latency.p50",
        unit="s",
        estimand="setting",
        either=True,
        meaning="Time of a flow's timed messages (latency, or those of a probe), from posting to completion: median",
    ),
    Metric(
        name="latency.p99",
        unit="s",
        estimand="setting",
        either=True,
        meaning="Time of a flow's timed messages, from posting to completion: 99th percentile",
    ),
    *(
        Metric(
            name=f"split.{name}",
            unit="ratio",
            estimand="setting",
            either=True,
            most=1.0,
            meaning=f"Share of the time of collectives that the rank which entered last spent {meaning}: mean",
        )
        for name, meaning in _SPLIT.items()
    ),
    Metric(
        name="ttft.p50",
        unit="s",
        estimand="setting",
        either=True,
        meaning="Time to first token of an inference job's requests: median",
    ),
    Metric(
        name="ttft.p99",
        unit="s",
        estimand="setting",
        either=True,
        meaning="Time to first token of an inference job's requests: 99th percentile",
    ),
    Metric(
        name="tpot.p50",
        unit="s",
        estimand="setting",
        either=True,
        meaning="Time from token to token on the slowest rank: median of all tokens",
    ),
    Metric(
        name="tpot.p99",
        unit="s",
        estimand="setting",
        either=True,
        meaning="Time from token to token on the slowest rank: 99th percentile",
    ),
    Metric(
        name="slo_attainment",
        unit="ratio",
        estimand="setting",
        either=True,
        most=1.0,
        meaning="Share of an inference job's requests that kept slo_ttft and, in the mean of their tokens, slo_tpot",
    ),
    Metric(name="qp_errors", unit="count", meaning="Queue pairs that went into the error state"),
    Metric(name="rebuilds", unit="count", meaning="Queue pairs that were torn down and connected again"),
    Metric(
        name="goodput.mean",
        unit="Gb/s",
        estimand="setting",
        either=True,
        meaning="Payload bytes of all ranks over the run's time",
    ),
    Metric(
        name="goodput.lowest",
        unit="ratio",
        most=1.0,
        meaning="Lowest rolling goodput from the second second on until the first rank ends, over its mean: moments in "
        "which this run was slow, with faults or without",
    ),
    Metric(
        name="busbw.mean",
        unit="Gb/s",
        estimand="setting",
        either=True,
        meaning="Bus bandwidth at the mean time of a collective, as nccl-tests define it: algbw times 2(n-1)/n for "
        "all-reduce",
    ),
    Metric(
        name="recovery.total",
        unit="s",
        estimand="event",
        about_faults=True,
        meaning=f"{_RECOVERY}; the worst fault counts",
    ),
    Metric(
        name="after_clear.total",
        unit="s",
        estimand="event",
        about_faults=True,
        meaning=f"{_AFTER_CLEAR}; the worst fault counts",
    ),
    Metric(
        name="jct_ratio",
        unit="ratio",
        about_faults=True,
        needs_twin=True,
        estimand="setting",
        meaning="Time to finish the first k iterations over the fault-free twin's time for the same k",
    ),
    Metric(
        name="ettr",
        unit="ratio",
        about_faults=True,
        has_controls=True,
        meaning="Effective training time ratio: iterations finished times the time of one in the fault-free start, "
        "over the wall time",
    ),
    Metric(
        name="goodput_min_ratio",
        unit="ratio",
        about_faults=True,
        estimand="contrast",
        meaning="Lowest rolling goodput while a fault acted, over the mean of the fault-free start",
    ),
    Metric(
        name="goodput_mean_ratio",
        unit="ratio",
        about_faults=True,
        estimand="contrast",
        meaning="Mean goodput while a fault acted, over the mean of the fault-free start; the worst fault counts",
    ),
    Metric(
        name="goodput.after_ratio",
        unit="ratio",
        about_faults=True,
        estimand="contrast",
        meaning="Mean goodput from the end of a fault's effects until the next fault or the run's end, over that of "
        "the fault-free start; the worst fault counts",
    ),
    Metric(
        name="dip",
        unit="ratio",
        about_faults=True,
        estimand="contrast",
        is_share_lost=True,
        most=1.0,
        meaning="1 - goodput_min_ratio: share of goodput lost at the deepest point",
    ),
    Metric(
        name="bystander.goodput_ratio",
        unit="ratio",
        about_faults=True,
        estimand="contrast",
        meaning="Mean goodput of the bystander from a fault's arming to 1 s after its removal, over that of the "
        "fault-free start; the worst fault counts",
    ),
    Metric(
        name="bystander.gap",
        unit="s",
        estimand="event",
        about_faults=True,
        each_fault=_every,
        meaning="Longest time without data of the bystander that begins between 1 s before a fault's arming and 1 s "
        "after its removal",
    ),
    Metric(
        name="bystander.qp_errors",
        unit="count",
        about_faults=True,
        meaning="Queue pairs of the bystander that failed after the first fault was armed",
    ),
    Metric(
        name="straggler",
        unit="host",
        about_faults=True,
        meaning="Host whose compute phase grew most since its fault-free start, if chance does not explain it",
    ),
    Metric(
        name="routing.detected",
        unit="s",
        estimand="event",
        about_faults=True,
        each_fault=_on_routes,
        meaning="From a fault's first firing to the first link, next hop or route that changed on a switch; the worst "
        "fault counts",
    ),
    Metric(
        name="routing.next-hop",
        unit="s",
        estimand="event",
        about_faults=True,
        each_fault=_on_routes,
        meaning="From a fault's first firing to the first route that a switch moved off a link that it lost; the worst "
        "fault counts",
    ),
    Metric(
        name="routing.withdrawn",
        unit="s",
        estimand="event",
        about_faults=True,
        each_fault=_on_routes,
        meaning="From a fault's first firing to the first route that BGP changed where no link was lost; the worst "
        "fault counts",
    ),
    Metric(
        name="routing.converged",
        unit="s",
        estimand="event",
        about_faults=True,
        each_fault=_on_routes,
        meaning="From a fault's first firing to the last route that changed before its removal; the worst fault counts",
    ),
    Metric(
        name="routing.restored",
        unit="s",
        estimand="event",
        about_faults=True,
        each_fault=_on_routes,
        meaning="From a fault's removal to the last route that changed after it; the worst fault counts",
    ),
    Metric(
        name="te.rebalanced",
        unit="s",
        estimand="event",
        about_faults=True,
        each_fault=_on_routes,
        meaning="From a fault's first firing until the last placement of flows before its removal was read back from "
        "the switches; the worst fault counts",
    ),
    Metric(
        name="te.moved",
        unit="count",
        meaning="Source RNICs and destination hosts whose flows placements moved to another uplink, each time counted",
    ),
    Metric(
        name="te.bound_ratio",
        unit="ratio",
        meaning="Bytes of the fullest link, by the demands of a placement, over those of the fullest rack divided by "
        "its live uplinks; the worst placement counts",
    ),
    Metric(
        name="slow_rank",
        unit="host",
        about_faults=True,
        meaning="Host of the rank whose compute phase an online detector found slowest compared with the others",
    ),
    Metric(
        name="slow_rank.iterations",
        unit="count",
        about_faults=True,
        meaning="Iterations from the fault's first firing until an online detector named the rank",
    ),
    Metric(
        name="nak_episodes",
        unit="count",
        about_faults=True,
        meaning="Growth of out_of_seq_request (mlx5: out_of_sequence) on all RNICs: a receiver saw a gap in the PSNs "
        "and NAKed once",
    ),
    Metric(
        name="go_back_n",
        unit="count",
        about_faults=True,
        meaning="Growth of rcvd_seq_err (mlx5: packet_seq_err) on all RNICs: a sender got a NAK for a gap and went "
        "back to the lost PSN. rxe does not count the NAK for the first packet of a message, because it acknowledges "
        "nothing",
    ),
)

_LINKS = (
    Metric(
        name="jfi",
        unit="ratio",
        either=True,
        most=1.0,
        meaning="Jain's index of the bytes that the uplinks of all rack switches sent up: 1 is even, 1/n is all on one",
    ),
    Metric(
        name="link_bytes.error",
        unit="ratio",
        meaning="Largest difference between a link's bytes and those expected from schedule, placement and ECMP",
    ),
    Metric(
        name="bisection",
        unit="ratio",
        estimand="setting",
        either=True,
        meaning="Bytes that the uplinks of the highest tier sent up over their capacity during the workload",
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in (*_TABLE, *_LINKS)}
"""Every metric by name."""

PER_FAULT_PREFIXES = {"recovery.": _RECOVERY, "after_clear.": _AFTER_CLEAR}
"""Metrics that exist once per fault: the prefix, then the fault's id."""

LINK_PREFIXES = {
    "mmr.": Metric(
        name="mmr.",
        unit="ratio",
        either=True,
        meaning="Maximum over mean of the bytes that the uplinks of a tier, or of one switch, sent up",
    ),
    "link_utilisation.": Metric(
        name="link_utilisation.",
        unit="ratio",
        estimand="setting",
        either=True,
        meaning="Bytes of the busier direction of a link between switches over its capacity during the workload",
    ),
}
"""Metrics of each tier, switch or link: the prefix, then the name (`faultbed.harness.analysis.links.link_metrics`)."""


_NEEDS_BASELINE = (
    "recovery.",
    "after_clear.",
    "goodput_min_ratio",
    "goodput_mean_ratio",
    "goodput.after_ratio",
    "dip",
    "straggler",
    "bystander.goodput_ratio",
)


def needs_baseline(name: str) -> bool:
    """Return whether a metric compares with the run's own fault-free start."""
    return name.startswith(_NEEDS_BASELINE)


def lookup(name: str, fault_ids: Iterable[str]) -> Metric | None:
    """Return the metric `name` in an experiment with these faults; None: there is no such metric."""
    if name in METRICS:
        return METRICS[name]
    for prefix, meaning in PER_FAULT_PREFIXES.items():
        if name.startswith(prefix) and name.removeprefix(prefix) in set(fault_ids):
            return Metric(name=name, unit="s", estimand="event", about_faults=True, meaning=meaning)
    for prefix, metric in LINK_PREFIXES.items():
        if name.startswith(prefix) and name != prefix:
            return replace(metric, name=name)
    return None


def nearest(name: str, fault_ids: Iterable[str]) -> str | None:
    """Return the name of a metric that resembles `name`, if there is one."""
    names = [*METRICS, *(prefix + fault for prefix in PER_FAULT_PREFIXES for fault in fault_ids)]
    return nearest_word(name, names)
