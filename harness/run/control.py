"""Control runs: every fault is prepared, armed and cleared with an empty action, so that only the harness acts. Pure.

A control run goes through all of a run: holders, leases, counter reads, looks. No packet is lost and no link goes down.
What its workload then loses against its fault-free twin is the cost of the harness itself.
"""

from __future__ import annotations

import msgspec

from harness.analysis.observations import Observation
from harness.verdict import Check, Verdict, VerdictFile, worst

__all__ = ["CHECK", "as_control"]

CHECK = "control_run"


def as_control(verdict: VerdictFile, jct_ratio: Observation | None) -> VerdictFile:
    """Return the verdict of a control run: with a check that says so, and never PASS.

    `jct_ratio` is the job's time against the fault-free twin, as it was measured.
    """
    if jct_ratio is None or jct_ratio.value is None:
        cost = f"its cost is unknown: {'not measured' if jct_ratio is None else jct_ratio.detail}"
    else:
        interval = (
            f"; {jct_ratio.interval}" if jct_ratio.interval is not None else ", too few iterations for an interval"
        )
        measured = f"{jct_ratio.detail}{interval}"
        cost = f"the harness alone cost {jct_ratio.value:.3f} of the fault-free twin's job time ({measured})"
    check = Check(
        name=CHECK,
        verdict=Verdict.INCONCLUSIVE,
        observed=None if jct_ratio is None else jct_ratio.value,
        bound=None,
        unit="ratio",
        rule="A control run decides nothing about faults: each was armed with zero intensity",
        detail=f"armed, zero intensity: no fault did anything; {cost}",
    )
    checks = (check, *verdict.checks)
    return msgspec.structs.replace(verdict, verdict=worst(check.verdict for check in checks), checks=checks)
