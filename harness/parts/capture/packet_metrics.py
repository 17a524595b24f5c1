"""Metrics of captured packets: missing frames, broken rules of go-back-N, and answers to marked packets. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from faultbed.harness.analysis.observations import Observation
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.parts.capture.packet_summary import PacketSummary
from faultbed.harness.record.evidence.run_evidence import RunEvidence

__all__ = ["captured_packets", "goings_back", "notifications", "packet_metrics"]


def packet_metrics(_run: RunEvidence, sealed: Sealed, _level: float) -> Mapping[str, Observation]:
    """Return every metric of the captured packets. They are facts of the run, without intervals."""
    packets = sealed.of(PacketSummary)
    return {**captured_packets(packets), **notifications(packets)}


def goings_back(sealed: Sealed) -> tuple[tuple[int, int], ...]:
    """Return when packets were sent again, each with the time of the NAK or of the timer before it (controller, ns)."""
    packets = sealed.of(PacketSummary)
    return () if packets is None else packets.goings_back


def notifications(packets: PacketSummary | None) -> dict[str, Observation]:
    """Return how the receivers of marked packets answered them by CNPs, at captured ports."""
    if packets is None or packets.cnp is None:
        nothing = Observation(value=None, detail="[capture] names no interval between CNPs (cnp_interval)")
        return {"cnp.missing": nothing, "cnp.gap": nothing}
    answers = packets.cnp
    marked, unknown = sum(one.marked for one in answers), sum(one.unknown for one in answers)
    if packets.missed or packets.extra or not marked:
        why = "no marked packet passed a captured port of its receiver"
        if marked:
            lacking = packets.missed + packets.extra
            why = f"the capture differs from its ports' counters by {lacking:,} frames, which may be CNPs"
        return {"cnp.missing": Observation(value=None, detail=why), "cnp.gap": Observation(value=None, detail=why)}
    missing = sum(one.missing for one in answers)
    detail = f"{marked:,} marked packets, {sum(one.sent for one in answers):,} CNPs"
    if missing:
        first = min((one for one in answers if one.missing), key=lambda one: one.first_missing or 0)
        detail += f"; the first unanswered packet is frame {first.first_missing} ({first.scope})"
    if unknown:
        detail += f"; whether {unknown:,} marked packets were answered is not known"
    worst = max(answers, key=lambda one: one.gap_ns)
    return {
        "cnp.missing": Observation(
            value=missing if missing or not unknown else None, detail=detail, censored=bool(unknown)
        ),
        "cnp.gap": Observation(
            value=worst.gap_ns / 1e9, detail=f"{worst.scope}; {detail}", censored=worst.is_gap_open or bool(unknown)
        ),
    }


def captured_packets(packets: PacketSummary | None) -> dict[str, Observation]:
    """Return how many frames the capture missed, and the go-back-N rules that its packets broke."""
    if packets is None:
        nothing = Observation(value=None, detail="this run captured no packets")
        return {"capture.missed": nothing, "capture.broken_rules": nothing}
    whole = f"{packets.frames:,} frames captured"
    if packets.extra:
        whole += f", {packets.extra:,} of them not counted by their ports, for example copies: each of them may hide "
        whole += "a missing frame"
    doubts = "; ".join(packets.doubts)
    if packets.missed or packets.extra:
        # A missing frame could look like a packet that its sender skipped, a copy like a retransmission.
        why = [f"{packets.missed:,} frames are missing from the capture"] if packets.missed else []
        why += [f"{packets.extra:,} frames of the capture were not counted by their ports"] if packets.extra else []
        broken = Observation(value=None, detail=", and ".join(why))
    elif packets.doubts and not packets.broken:
        broken = Observation(value=None, detail=f"{whole}, but {doubts}")
    else:
        detail = f"{whole}; packets.json names each"
        broken = Observation(
            value=packets.broken, detail=f"{detail}; {doubts}" if doubts else detail, censored=bool(doubts)
        )
    missed = Observation(value=packets.missed, detail=whole, censored=bool(packets.extra))
    return {"capture.missed": missed, "capture.broken_rules": broken}
