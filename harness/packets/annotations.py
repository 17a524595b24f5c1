"""Comments for Wireshark: what the analysis of a capture says about single frames, and about the file. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faultbed.harness.packets.analysis import Analysis, FlowReport

__all__ = ["comment_of_file", "comments_of_frames"]

_CAUSES = {
    "nak": "a NAK requested it",
    "rnr": "an RNR NAK requested it",
    "gap": "response data was missing (implied NAK)",
    "timer": "the ACK timer expired",
    "unknown": "no reason was captured",
}


def comments_of_frames(analysis: Analysis) -> dict[int, str]:
    """Return the comment of each frame that shows a finding, by its number from 1; a line for each finding."""
    lines: dict[int, list[str]] = {}
    for flow in analysis.flows:
        for frame, line in _findings(flow):
            lines.setdefault(frame, []).append(f"faultbed: {line} ({flow.src} -> {flow.dst} QP {flow.dqpn})")
    for answers in analysis.cnp or ():
        if answers.first_missing is not None:
            line = f"faultbed: broken rule cnp-missing: no CNP answered this packet ({answers.scope})"
            lines.setdefault(answers.first_missing, []).append(line)
    return {frame: "\n".join(texts) for frame, texts in lines.items()}


def _findings(flow: FlowReport) -> Iterator[tuple[int, str]]:
    for violation in flow.violations:
        yield violation.frame, f"broken rule {violation.rule}: {violation.detail}"
    for nak in flow.negative:
        yield nak.frame, f"{nak.meaning}{'; it ends the connection' if nak.is_fatal else ''}"
    for episode in flow.episodes:
        detail = f"went back to PSN {episode.psn}: {_CAUSES[episode.cause]}"
        yield episode.frame, f"{detail}; {episode.missing:,} packets missing, {episode.resent:,} sent again"


def comment_of_file(analysis: Analysis, source: str) -> str:
    """Return the comment of the whole file: the verdict, and what it leaves open. `source` names the capture."""
    if analysis.violations or any(answers.missing for answers in analysis.cnp or ()):
        verdict = f"FAIL: {analysis.violations:,} broken rules of go-back-N"
    elif analysis.doubts:
        verdict = "INCONCLUSIVE"
    else:
        verdict = "PASS: no rule of go-back-N is broken"
    missing = sum(answers.missing for answers in analysis.cnp or ())
    lines = [f"faultbed packets {source}: {verdict}{f', {missing:,} CNPs missing' if missing else ''}"]
    return "\n".join([*lines, *analysis.doubts, *analysis.notes])
