"""The verdict of a control run: every fault is prepared, armed and cleared, but its action is empty. Pure.

A control run does everything else that a run does: it starts holders, refreshes leases and reads counters. No packet is
lost and no link goes down. If its workload is slower than the fault-free twin, that is the cost of the harness itself.
"""

from __future__ import annotations

import msgspec

from faultbed.harness.analysis.observations import Observation
from faultbed.harness.verdict import Check, Verdict, VerdictFile, worst

__all__ = ["CHECK", "as_control"]

CHECK = "control_run"


def as_control(verdict: VerdictFile, jct_ratio: Observation | None) -> VerdictFile:
    """Return a run's verdict with a check that marks it as a control run, so that it is never PASS.

    `jct_ratio` is the measured job completion time divided by that of the fault-free twin.
    """
    check = Check(
        name=CHECK,
        verdict=Verdict.INCONCLUSIVE,
        observed=None if jct_ratio is None else jct_ratio.value,
        bound=None,
        unit="ratio",
        meaning="A control run decides nothing about faults: each was armed with zero intensity",
        detail=f"armed, zero intensity: no fault did anything; {_cost_of_harness(jct_ratio)}",
    )
    checks = (check, *verdict.checks)
    return msgspec.structs.replace(verdict, verdict=worst(check.verdict for check in checks), checks=checks)


def _cost_of_harness(jct_ratio: Observation | None) -> str:
    if jct_ratio is None:
        return "its cost is unknown: not measured"
    if jct_ratio.value is None:
        return f"its cost is unknown: {jct_ratio.detail}"
    interval = f"; {jct_ratio.interval}" if jct_ratio.interval is not None else ", too few iterations for an interval"
    return (
        f"the harness alone cost {jct_ratio.value:.3f} of the fault-free twin's job time ({jct_ratio.detail}{interval})"
    )
