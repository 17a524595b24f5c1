"""What a flow's sender met of a receiver that was not ready (RNR), and how it ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from traffic.engine.run_results import QpError

__all__ = ["EXCEEDED", "Rnr", "RnrOutcome", "rnr_of"]

RnrOutcome = Literal["none", "waited", "exceeded", "unknown"]
EXCEEDED = "RNR_RETRY_EXC_ERR"
"""The completion status of a message whose receiver was not ready so often that its queue pair is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rnr:
    """Of a flow with late receives.

    `outcome` is `waited` where the sender was told to wait and went on, `exceeded` where it was told more often than
    its `rnr_retry` allows and a queue pair was lost (`lost_qps` of them, status `RNR_RETRY_EXC_ERR`), `none` where
    a receive was always there, `unknown` where nobody counted. `naks` and `exceeded` are by how much the counters
    `naks_counter` and `exceeded_counter` of the sender's RNIC grew over the flow; None: not told, or not counted.
    """

    outcome: RnrOutcome
    lost_qps: int
    naks: int | None
    naks_counter: str | None
    exceeded: int | None
    exceeded_counter: str | None

    def __str__(self) -> str:
        counted = f"{self.naks} RNR NAKs ({self.naks_counter})" if self.naks_counter else "nobody counted RNR NAKs"
        over = f", {self.exceeded_counter} {self.exceeded}" if self.exceeded_counter else ""
        return f"receiver not ready: {self.outcome}; {counted}, {self.lost_qps} queue pairs lost to it{over}"


def rnr_of(told: Mapping[str, Mapping[str, Any]], errors: Sequence[QpError]) -> Rnr:
    """What a sender's engine told at its end (`node.flows.rnr`; nothing: it did not), and the QPs that it lost."""
    naks, exceeded = told.get("naks", {}), told.get("exceeded", {})
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
