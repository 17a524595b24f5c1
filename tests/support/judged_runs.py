"""Synthetic runs for tests of the judge."""

from __future__ import annotations

import msgspec
import numpy as np
from synthetic_run import changed, synthetic_run

from faultbed.harness.experiment import run_plan as plans
from faultbed.harness.record.evidence.workload_evidence import Serving

PLAN = plans.Plan(faultbed="0", experiment="x", seed=7, inventory="00", workload={}, faults=())


def plan_of(run):
    """Return a plan with the faults of a run: claims are made from the plan."""
    return msgspec.structs.replace(PLAN, faults=tuple(fault.plan for fault in run.injected.faults))


def served(*ttft_s, kept=1.0):
    """Return an inference job with these times to first token, and a tenth of them for each of three more tokens."""
    times = [round(1e9 * float(time_s)) for time_s in np.random.default_rng(1).permutation(ttft_s)]
    tokens = tuple((time // 10,) * 3 for time in times)
    serving = Serving(ttft_ns=tuple(times), tpot_ns=tokens, slo_attainment=kept)
    return changed(synthetic_run(), serving=serving, faults=())
