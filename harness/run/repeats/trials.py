"""A finished run as a trial of a pool, with intervals as wide as the pool needs them."""

from __future__ import annotations

from collections.abc import Sequence

from faultbed.harness.analysis import noise
from faultbed.harness.analysis.observe import observe
from faultbed.harness.bounds import noisy_checks
from faultbed.harness.confidence import level_for
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run.repeats.pooled import Trial
from faultbed.harness.verdict import VerdictFile

__all__ = ["trial_of"]


def trial_of(run: RunDir, verdict: VerdictFile, expectations: Sequence[Expectation]) -> Trial:
    """Return a run with its observations, whose intervals are those that the judge decides by.

    The intervals share the risk of all noisy checks of the run, and are widened by the noise floor in its directory.
    """
    measured = run.read_measurements()
    observed = observe(measured, level=level_for(noisy_checks(expectations)))
    floor = noise.load(run.path, noise.conditions_in(run, measured))
    return Trial(run_dir=str(run.path), verdict=verdict, metrics=noise.allow_for(observed, floor).metrics)
