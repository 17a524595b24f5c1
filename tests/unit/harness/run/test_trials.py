"""A run has the same intervals in the pool of `run --repeat`, in a sweep, and in its own verdict."""

from __future__ import annotations

import msgspec
from finished_run import finished
from synthetic_run import soft_topology, synthetic_run

from faultbed.harness.analysis import noise
from faultbed.harness.analysis.observe import observe
from faultbed.harness.cli.experiments.runs import _trial
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.run.loop import Finished
from faultbed.harness.run.prepare.bind_to_lab import fit


def test_trial_of_a_repeated_run_holds_the_noise_floor_of_its_directory(tmp_path):
    run = synthetic_run()
    directory = finished(tmp_path, run)
    experiment = fit(decode(directory.read_experiment(), source="demo"), soft_topology(), "soft")
    repeated = Finished(run_dir=directory, verdict=directory.read_verdict(), report=directory.report)
    plain = _trial(repeated, experiment).metrics["jct_ratio"].interval
    spread = noise.Spread(runs=10, middle=40.0, unit="s", log_sd=0.2)
    conditions = noise.conditions_in(directory, run)
    floor = noise.NoiseFloor(conditions=conditions, iterations=5, sources=(), spreads={"job_time": spread})
    directory.write_noise_floor(noise.encode(floor))
    result = _trial(repeated, experiment).metrics
    assert result["jct_ratio"].interval.low < plain.low < plain.high < result["jct_ratio"].interval.high
    other = {name: one for name, one in result.items() if name != "jct_ratio"}
    assert other == {name: one for name, one in observe(run, level=plain.level).metrics.items() if name != "jct_ratio"}
    elsewhere = msgspec.structs.replace(conditions, workload={"flow": "write"})
    directory.write_noise_floor(noise.encode(msgspec.structs.replace(floor, conditions=elsewhere)))
    assert _trial(repeated, experiment).metrics["jct_ratio"].interval == plain, "the floor of another workload"
