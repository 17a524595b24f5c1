"""A finished run as a trial of a pool, with intervals as wide as the pool needs them."""

from __future__ import annotations

from collections.abc import Sequence

from faultbed.harness import judge
from faultbed.harness.bounds import sampled_bounds
from faultbed.harness.confidence import level_for
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run.repeats.pooled import Trial
from faultbed.harness.verdict import VerdictFile

__all__ = ["trial_of"]


def trial_of(run: RunDir, verdict: VerdictFile, expectations: Sequence[Expectation]) -> Trial:
    """Return a run with its observations, whose intervals share the risk of all bounds of the experiment."""
    observed = judge.observed_of(
        run.read_run(), run.read_evidence(judge.KINDS), level=level_for(sampled_bounds(expectations))
    )
    return Trial(run_dir=str(run.path), verdict=verdict, metrics=observed.metrics)
