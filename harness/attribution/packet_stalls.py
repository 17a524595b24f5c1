"""Relate lost packets to the job: each retransmission (go-back) in a capture is a wait of two ranks. Pure.

Example of a sentence:

iteration 41, rank 1→2 waited 134 ms for a timer after PSN 512 was lost at rtsw1:ctsw2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from faultbed.harness.findings import Attribution
from faultbed.harness.packets.analysis import FlowReport
from faultbed.harness.packets.episodes import Cause, Episode
from faultbed.harness.packets.evidence import Evidence
from faultbed.harness.quantities import format_duration
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import RankSeries

__all__ = ["Wait", "sentences", "waits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A wait of the ranks `sender` and `receiver` for a packet, which ended at `until_ns` (controller's clock).

    A capture shows RNICs, not ranks. If several ranks share one of the RNICs, `sender`, `receiver` and `iteration` are
    None, and `words` name the RNICs.
    """

    iteration: int | None
    sender: int | None
    receiver: int | None
    waited_ns: int
    until_ns: int
    words: str


@dataclass(frozen=True, slots=True)
class _Ends:
    """The RNICs at the ends of a flow, and the ranks on each."""

    rnics: tuple[str, str]
    ranks: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def pair(self) -> tuple[int, int] | None:
        """The two ranks; None if an RNIC has several."""
        senders, receivers = self.ranks
        return (senders[0], receivers[0]) if len(senders) == len(receivers) == 1 else None

    def __str__(self) -> str:
        return "→".join(self.rnics) if self.pair is None else f"rank {self.pair[0]}→{self.pair[1]}"


def sentences(
    run: RunEvidence, packets: Evidence, findings: Sequence[Attribution] = (), *, most: int = 10
) -> tuple[str, ...]:
    """Describe the longest waits, longest first, each with the link that lost the packet if `findings` locate it."""
    return tuple(wait.words for wait in waits(run, packets, findings, most=most))


def waits(
    run: RunEvidence, packets: Evidence, findings: Sequence[Attribution] = (), *, most: int = 10
) -> tuple[Wait, ...]:
    """Return the longest waits, longest first."""
    by_ip = _rnics_by_ip(run)
    episodes = sorted(
        (
            (_waited_ns(episode), flow, episode)
            for flow in packets.analysis.flows
            for episode in flow.episodes
            if flow.src in by_ip and flow.dst in by_ip
        ),
        key=lambda item: -item[0],
    )
    ranks_of = _ranks_by_rnic(run)
    longest = []
    for waited_ns, flow, episode in episodes[:most]:
        rnics = by_ip[flow.src], by_ip[flow.dst]
        ends = _Ends(rnics, (ranks_of[rnics[0]], ranks_of[rnics[1]]))
        sender, receiver = ends.pair or (None, None)
        until_ns = episode.resent_ns - packets.epoch_offset_ns
        iteration = None if receiver is None else _iteration_at(run.workload.series, receiver, until_ns)
        longest.append(
            Wait(
                iteration=iteration,
                sender=sender,
                receiver=receiver,
                waited_ns=waited_ns,
                until_ns=until_ns,
                words=_sentence(run, flow, episode, ends=ends, iteration=iteration, findings=findings),
            )
        )
    return tuple(longest)


def _waited_ns(episode: Episode) -> int:
    """Return the time from the first sign of the loss until the packet passed again."""
    return episode.silence_ns if episode.gap_ns is None else max(episode.silence_ns, episode.resent_ns - episode.gap_ns)


_AWAITED: dict[Cause, str] = {
    "timer": "a timer",
    "nak": "a NAK",
    "rnr": "a receiver that was not ready",
    "gap": "missing response data",
    "unknown": "a reason that was not captured",
}
"""What a sender waited for, by the cause of its go-back."""


def _sentence(
    run: RunEvidence,
    flow: FlowReport,
    episode: Episode,
    *,
    ends: _Ends,
    iteration: int | None,
    findings: Sequence[Attribution],
) -> str:
    iteration_text = "" if iteration is None else f"iteration {iteration}, "
    return (
        f"{iteration_text}{ends} waited {format_duration(_waited_ns(episode))} for {_AWAITED[episode.cause]} "
        f"after PSN {episode.psn} {_fate(run, flow, episode, ends, findings)}"
    )


def _fate(run: RunEvidence, flow: FlowReport, episode: Episode, ends: _Ends, findings: Sequence[Attribution]) -> str:
    """Describe what happened to the packet: it was rejected, or lost before, at or after the captured port."""
    if episode.cause == "rnr":
        return "was rejected"
    if not episode.missing and episode.gap_ns is None:
        return f"had passed {flow.port}: it, or its ACK, was lost after that"
    link = next(
        (
            finding.name
            for finding in findings
            if finding.cause == "loss" and _is_on_path(run, ends.rnics, finding.name)
        ),
        None,
    )
    return f"was lost at {link}" if link else f"was lost before {flow.port}"


def _is_on_path(run: RunEvidence, rnics: tuple[str, str], name: str) -> bool:
    """Return whether a link is on the path of a connection between two RNICs."""
    link = next((candidate for candidate in run.lab.topology.links if candidate.name == name), None)
    return link is not None and any(
        {link.a.node, link.b.node} <= set(connection.path)
        for connection in run.workload.connections
        if (connection.src, connection.dst) == rnics
    )


def _ranks_by_rnic(run: RunEvidence) -> dict[str, tuple[int, ...]]:
    ranks: dict[str, tuple[int, ...]] = {}
    for rank in run.workload.ranks:
        name = f"{rank.host}:{rank.rnic}"
        ranks[name] = (*ranks.get(name, ()), rank.rank)
    return ranks


def _rnics_by_ip(run: RunEvidence) -> dict[str, str]:
    """Return the RNICs that have ranks, by their addresses."""
    with_ranks = _ranks_by_rnic(run)
    names = {rnic.ip: f"{host.name}:{rnic.name}" for host in run.lab.topology.hosts for rnic in host.rnics}
    return {ip: name for ip, name in names.items() if name in with_ranks}


def _iteration_at(series: Sequence[RankSeries], rank: int, at_ns: int) -> int | None:
    for rank_series in series:
        if rank_series.rank == rank:
            return next((step.index for step in rank_series.iterations if step.start_ns <= at_ns <= step.end_ns), None)
    return None
