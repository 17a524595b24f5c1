"""What a flow's sender experienced from a receiver that was not ready (RNR), and how it ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from faultbed.traffic.engine.run_results import QpError

__all__ = ["EXCEEDED", "Rnr", "RnrOutcome", "rnr_of"]

RnrOutcome = Literal["none", "waited", "exceeded", "unknown"]
EXCEEDED = "RNR_RETRY_EXC_ERR"
"""Completion status of a message whose receiver was not ready for so many retries that its queue pair is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rnr:
    """Outcome of a flow with late receives.

    `outcome` is `waited` if the sender got RNR NAKs and continued, `exceeded` if it ran out of `rnr_retry` and lost a
    queue pair (`lost_qps` of them, status `RNR_RETRY_EXC_ERR`), `none` if a receive was always posted, and `unknown`
    without counters. `naks` and `exceeded` are the growth of the counters `naks_counter` and `exceeded_counter` of the
    sender's RNIC during the flow; None if not reported or not counted.
    """

    outcome: RnrOutcome
    lost_qps: int
    naks: int | None
    naks_counter: str | None
    exceeded: int | None
    exceeded_counter: str | None

    def __str__(self) -> str:
        counted = f"{self.naks} RNR NAKs ({self.naks_counter})" if self.naks_counter else "RNR NAKs were not counted"
        over = f", {self.exceeded_counter} {self.exceeded}" if self.exceeded_counter else ""
        return f"receiver not ready: {self.outcome}; {counted}, {self.lost_qps} queue pairs lost to it{over}"


def rnr_of(counters: Mapping[str, Mapping[str, Any]], errors: Sequence[QpError]) -> Rnr:
    """Return the outcome from a sender's `done` event (`traffic/node/flows/rnr.py`) and its lost QPs."""
    naks, exceeded = counters.get("naks", {}), counters.get("exceeded", {})
    lost = sum(error.status == EXCEEDED for error in errors)
    outcome: RnrOutcome = "none"
    if lost:
        outcome = "exceeded"
    elif naks.get("count") is None:
        outcome = "unknown"
    elif naks["count"]:
        outcome = "waited"
    return Rnr(
        outcome=outcome,
        lost_qps=lost,
        naks=naks.get("count"),
        naks_counter=naks.get("counter"),
        exceeded=exceeded.get("count"),
        exceeded_counter=exceeded.get("counter"),
    )
