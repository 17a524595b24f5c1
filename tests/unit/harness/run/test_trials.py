"""A run has the same intervals in the pool of `run --repeat`, in a sweep, and in its own verdict."""

from __future__ import annotations

from finished_run import finished
from synthetic_run import soft_topology, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.cli.experiments.runs import _trial
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.run.loop import Finished
from faultbed.harness.run.prepare.bind_to_lab import fit


def test_trial_of_a_repeated_run_has_the_intervals_of_its_verdict(tmp_path):
    run = synthetic_run()
    directory = finished(tmp_path, run)
    experiment = fit(decode(directory.read_experiment(), source="demo"), soft_topology(), "soft")
    repeated = Finished(run_dir=directory, verdict=directory.read_verdict(), report=directory.report)
    result = _trial(repeated, experiment).metrics
    level = result["jct_ratio"].interval.level
    expected = observe(run, level=level).metrics
    assert {name: result[name] for name in expected} == expected
