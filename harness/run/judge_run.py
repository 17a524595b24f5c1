"""Judge a run from its directory alone: what is not in its files is not known about it."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from faultbed.harness import judge
from faultbed.harness.analysis import noise
from faultbed.harness.bounds import sampled_bounds
from faultbed.harness.confidence import level_for
from faultbed.harness.judge import Judged
from faultbed.harness.parts.part import planned_by
from faultbed.harness.record.rundir import RunDir

__all__ = ["judge_run"]


def judge_run(run_dir: RunDir) -> Judged:
    """Return ledger and verdict of a run from `plan.json`, its evidence and what else it recorded. Nothing is written.

    Raises:
        UsageError: a file is missing; only the directory of a finished run has all of them.
        RecordError: the contents of a file are not those that faultbed wrote.
    """
    plan, run, environment = run_dir.read_plan(), run_dir.read_run(), run_dir.read_environment()
    before, sealed = planned_by(plan), run_dir.read_evidence(judge.KINDS)
    judged = judge.judge(
        before=before,
        run=run,
        observed=judge.observed_of(run, sealed, level=level_for(sampled_bounds(before.expectations))),
        sealed=sealed,
        floor=run_dir.read_noise_floor(noise.decode),
        flights=run_dir.read_flights(),
        trips=run_dir.read_probes().trips,
    )
    return replace(
        judged,
        verdict=msgspec.structs.replace(
            judged.verdict, left_out=environment.left_out, started_utc=environment.started_utc
        ),
    )
