"""Calibration: known parameters are found again, and what the runs do not tell is said."""

import json

import numpy as np
import pytest

from faultbed.harness.model import calibration
from faultbed.harness.model.calibration import Conditions, Sample, fit, load, outside
from faultbed.harness.model.step_times import Features, StepParameters
from faultbed.testbed.errors import UsageError

CONDITIONS = Conditions(lab="soft", inventory="ab" * 32, accelerator="tcg", cpus=2)
DEFAULTS = StepParameters(alpha_ns=13e6, overhead_ns=6e6)
TRUE = StepParameters(alpha_ns=9e6, overhead_ns=2e6, rate=0.8, compute_ns=5e6)


def runs(count=12, *, noise=0.0, seed=1, compute=True, ranks=4, same_size=False):
    rng = np.random.default_rng(seed)
    samples = {}
    for number in range(count):
        size = 1 << 20 if same_size else int(rng.choice([1 << 16, 1 << 18, 1 << 20, 1 << 22]))
        features = Features(
            steps=6 if same_size else int(rng.integers(1, 7)),
            messages=0 if same_size else int(rng.integers(0, 12)),
            transfer_s=size * 130e-9,
            compute_units=float(rng.integers(0, 30)) if compute else 0.0,
        )
        seconds = features.seconds(TRUE) * float(np.exp(noise * rng.standard_normal()))
        samples[f"run{number}"] = Sample(features=features, seconds=seconds, ranks=ranks, size_bytes=size, qps=1)
    return samples


def test_fit_without_noise_finds_the_true_parameters():
    found = fit(runs(), CONDITIONS, DEFAULTS)
    assert found.parameters.alpha_ns == pytest.approx(TRUE.alpha_ns, rel=1e-6)
    assert found.parameters.overhead_ns == pytest.approx(TRUE.overhead_ns, rel=1e-6)
    assert found.parameters.rate == pytest.approx(TRUE.rate, rel=1e-6)
    assert found.parameters.compute_ns == pytest.approx(TRUE.compute_ns, rel=1e-6)
    assert found.band < 1e-6
    assert found.together == ()


def test_fit_band_contains_new_runs_as_often_as_it_says():
    inside = total = 0
    for seed in range(12):
        found = fit(runs(12, noise=0.06, seed=seed), CONDITIONS, DEFAULTS)
        for sample in runs(4, noise=0.06, seed=1000 + seed).values():
            ratio = sample.seconds / sample.features.seconds(found.parameters)
            inside += 1 / (1 + found.band) <= ratio <= 1 + found.band
            total += 1
    assert 0.85 <= inside / total < 1  # 94 % of 600 runs over 150 calibrations


def test_fit_intervals_contain_the_true_rate():
    found = fit(runs(20, noise=0.05), CONDITIONS, DEFAULTS)
    assert found.rate.low <= TRUE.rate <= found.rate.high
    assert found.rate.low < found.rate.high


def test_fit_runs_of_one_size_scale_the_default_ratio_and_say_so():
    found = fit(runs(6, same_size=True, compute=False), CONDITIONS, DEFAULTS)
    assert found.together == ("alpha_ns", "overhead_ns", "rate")
    assert found.alpha_ns.value / found.overhead_ns.value == pytest.approx(13 / 6)
    assert found.compute_ns is None
    (sample, *_) = runs(6, same_size=True, compute=False).values()
    assert sample.features.seconds(found.parameters) == pytest.approx(sample.seconds)


def test_fit_too_few_runs_are_refused():
    with pytest.raises(UsageError, match="3 fault-free series; a calibration needs at least 4"):
        fit(runs(3), CONDITIONS, DEFAULTS)


@pytest.mark.parametrize("seconds", [float("nan"), 0.0, -1.0, float("inf")])
def test_fit_impossible_time_is_refused(seconds):
    samples = runs(6)
    samples["run0"] = Sample(features=Features(steps=1), seconds=seconds, ranks=4, size_bytes=1, qps=1)
    with pytest.raises(UsageError, match="run0: an iteration took"):
        fit(samples, CONDITIONS, DEFAULTS)


def test_outside_names_what_lies_outside():
    found = fit(runs(compute=False), CONDITIONS, DEFAULTS)
    assert outside(found, ranks=4, size_bytes=1 << 18, qps=1) == ()
    assert outside(found, ranks=64, size_bytes=1 << 18, qps=1) == ("64 ranks, calibrated to 4 ranks",)
    assert outside(found, ranks=2, size_bytes=1 << 30, qps=1) == (
        "2 ranks, calibrated from 4 ranks",
        "1 GiB, calibrated to 4 MiB",
    )
    assert outside(found, ranks=4, size_bytes=1 << 18, qps=1, compute_units=8) == (
        "8 units of compute, calibrated without compute",
    )


def test_load_another_inventory_or_no_file_is_none(tmp_path):
    assert load(tmp_path, inventory="ab" * 32) is None
    found = fit(runs(), CONDITIONS, DEFAULTS)
    (tmp_path / calibration.FILE).write_bytes(calibration.encode(found))
    assert load(tmp_path, inventory="ab" * 32) == found
    assert load(tmp_path, inventory="cd" * 32) is None


@pytest.mark.parametrize("wrong", ["", "{}", '{"schema": 2}', "cut"])
def test_load_file_that_is_no_calibration_is_refused(tmp_path, wrong):
    whole = calibration.encode(fit(runs(), CONDITIONS, DEFAULTS))
    (tmp_path / calibration.FILE).write_bytes(whole[:200] if wrong == "cut" else wrong.encode())
    with pytest.raises(UsageError, match="not a calibration"):
        load(tmp_path, inventory="ab" * 32)


def test_load_negative_band_is_refused(tmp_path):
    document = json.loads(calibration.encode(fit(runs(), CONDITIONS, DEFAULTS)))
    document["band"] = -0.5
    (tmp_path / calibration.FILE).write_text(json.dumps(document))
    with pytest.raises(UsageError, match="negative"):
        load(tmp_path, inventory="ab" * 32)
