"""Count the requests of an inference job that met their service level objectives, given clock errors. Pure.

A time to first token begins on one host and ends on another one. If it is within the clocks' error of its objective, it
is unknown whether the request met the objective. A time per output token begins and ends on one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Kept", "kept_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Requests that kept every objective by their measured times.

    `may_have_missed` of them may have missed the time to first token, and `may_have_kept` others may have kept it.
    """

    requests: int
    may_have_missed: int = 0
    may_have_kept: int = 0


def kept_of(
    ttft_ns: Sequence[int],
    tpot_ns: Sequence[Sequence[int]],
    *,
    slo_ttft_ms: float,
    slo_tpot_ms: float,
    error_ns: float = 0.0,
) -> Kept:
    """Count the requests that kept their objectives.

    Args:
        ttft_ns: time to first token of each request.
        tpot_ns: times from token to token of each request; their mean counts.
        slo_ttft_ms: objective of the time to first token; 0: none.
        slo_tpot_ms: objective of the time per output token; 0: none.
        error_ns: error of a time to first token, of both clocks together.
    """
    kept = may_have_missed = may_have_kept = 0
    for first_ns, others_ns in zip(ttft_ns, tpot_ns, strict=True):
        mean_ns = sum(others_ns) / len(others_ns) if others_ns else 0.0
        if slo_tpot_ms and mean_ns > slo_tpot_ms * 1e6:
            continue
        late_ns = first_ns - slo_ttft_ms * 1e6 if slo_ttft_ms else 0.0
        is_open = bool(slo_ttft_ms and error_ns) and abs(late_ns) <= error_ns
        kept += late_ns <= 0
        may_have_missed += is_open and late_ns <= 0
        may_have_kept += is_open and late_ns > 0
    return Kept(requests=kept, may_have_missed=may_have_missed, may_have_kept=may_have_kept)
