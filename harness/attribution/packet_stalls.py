"""Relate lost packets to the job: each go-back of the capture as a wait of two ranks. Pure.

iteration 41, rank 1→2 waited 134 ms for a timer after PSN 512 was lost at rtsw1:ctsw2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.findings import Finding
from harness.packets.analysis import FlowReport
from harness.packets.episodes import Episode
from harness.packets.evidence import Evidence
from harness.quantities import format_duration
from harness.record.measurements import Measurements, RankSeries

__all__ = ["Wait", "sentences", "waits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A wait of the ranks `sender` and `receiver` for a packet, until it passed again at `until_ns` (controller)."""

    iteration: int | None
    sender: int
    receiver: int
    waited_ns: int
    until_ns: int
    words: str


def sentences(
    run: Measurements, packets: Evidence, findings: Sequence[Finding] = (), *, most: int = 10
) -> tuple[str, ...]:
    """Return sentences about the longest waits, longest first; a loss that `findings` locate on the path is named."""
    return tuple(one.words for one in waits(run, packets, findings, most=most))


def waits(
    run: Measurements, packets: Evidence, findings: Sequence[Finding] = (), *, most: int = 10
) -> tuple[Wait, ...]:
    """Return the longest waits, longest first."""
    ranks = _ranks_by_ip(run)
    episodes = sorted(
        (
            (_waited_ns(episode), flow, episode)
            for flow in packets.analysis.flows
            for episode in flow.episodes
            if flow.src in ranks and flow.dst in ranks
        ),
        key=lambda item: -item[0],
    )
    return tuple(
        Wait(
            iteration=_iteration_at(run.series, ranks[flow.dst], episode.resent_ns - packets.epoch_offset_ns),
            sender=ranks[flow.src],
            receiver=ranks[flow.dst],
            waited_ns=waited_ns,
            until_ns=episode.resent_ns - packets.epoch_offset_ns,
            words=_sentence(
                run,
                flow,
                episode,
                ranks=(ranks[flow.src], ranks[flow.dst]),
                epoch_ns=packets.epoch_offset_ns,
                by=findings,
            ),
        )
        for waited_ns, flow, episode in episodes[:most]
    )


def _waited_ns(one: Episode) -> int:
    """Return the time from the first sign of the loss until the packet passed again."""
    return one.silence_ns if one.gap_ns is None else max(one.silence_ns, one.resent_ns - one.gap_ns)


def _sentence(
    run: Measurements, flow: FlowReport, one: Episode, *, ranks: tuple[int, int], epoch_ns: int, by: Sequence[Finding]
) -> str:
    source, target = ranks
    iteration = _iteration_at(run.series, target, one.resent_ns - epoch_ns)
    when = "" if iteration is None else f"iteration {iteration}, "
    return (
        f"{when}rank {source}→{target} waited {format_duration(_waited_ns(one))} for a "
        f"{ {'timer': 'timer', 'nak': 'NAK', 'rnr': 'receiver that was not ready'}[one.cause] } "
        f"after PSN {one.psn} {_fate(run, flow, one, ranks, by)}"
    )


def _fate(
    run: Measurements, flow: FlowReport, one: Episode, ranks: tuple[int, int], findings: Sequence[Finding]
) -> str:
    if one.cause == "rnr":
        return "was rejected"
    if not one.missing and one.gap_ns is None:
        return f"had passed {flow.port}: it, or its ACK, was lost behind"
    link = next((each.name for each in findings if each.cause == "loss" and _on_way(run, ranks, each.name)), None)
    return f"was lost at {link}" if link else f"was lost before {flow.port}"


def _on_way(run: Measurements, ranks: tuple[int, int], name: str) -> bool:
    ends = {rank.rank: f"{rank.host}:{rank.rnic}" for rank in run.ranks}
    link = next((one for one in run.topology.links if one.name == name), None)
    return link is not None and any(
        {link.a.node, link.b.node} <= set(one.path)
        for one in run.connections
        if (one.src, one.dst) == (ends.get(ranks[0]), ends.get(ranks[1]))
    )


def _ranks_by_ip(run: Measurements) -> dict[str, int]:
    ranks: dict[str, int] = {}
    for rank in run.ranks:
        host = run.topology.host_by_name.get(rank.host)
        ranks |= {rnic.ip: rank.rank for rnic in (host.rnics if host else ()) if rnic.name == rank.rnic}
    return ranks


def _iteration_at(series: Sequence[RankSeries], rank: int, at_ns: int) -> int | None:
    for one in series:
        if one.rank == rank:
            return next((step.index for step in one.iterations if step.start_ns <= at_ns <= step.end_ns), None)
    return None
