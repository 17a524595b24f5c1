"""The noise floor of a lab comes from fault-free runs alone, and what it says widens what the judge decides by."""

from __future__ import annotations

import json
import shutil

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from finished_run import finished
from repeated_runs import without_faults
from synthetic_run import synthetic_run

from harness.analysis import noise
from harness.analysis.observe import observe
from harness.cli.main import cli
from harness.verdict import RoutingDecisions, RoutingReceipt, SchemeArmed, SchemeCleared
from testbed.errors import UsageError

RECEIPT = RoutingReceipt(
    scheme="pinned",
    fidelity="real",
    armed=SchemeArmed(ok=True),
    decisions=RoutingDecisions(asked=1, agreed=1),
    cleared=SchemeCleared(),
)


def test_noise_floor_recovers_the_deviation_between_runs():
    factors = np.exp(0.05 * np.random.default_rng(3).normal(size=12))
    run = synthetic_run()
    floor = noise.measure({f"aa-{index}": without_faults(run, factor) for index, factor in enumerate(factors)})
    assert floor.spreads["job_time"].log_sd == pytest.approx(np.log(factors).std(ddof=1), rel=1e-3)
    assert floor.spreads["job_time"].pair > np.exp(2.576 * np.sqrt(2) * np.log(factors).std(ddof=1))
    assert noise.decode(noise.encode(floor)) == floor


def ended(run, later_ns):
    """The same made-up run at another time: a copy would not count."""
    return msgspec.structs.replace(run, end_ns=run.end_ns + later_ns)


def test_noise_floor_of_one_run_under_several_names_is_rejected(tmp_path):
    """Copies differ by nothing: the floor would be 0, and every difference beyond noise."""
    run = synthetic_run()
    with pytest.raises(UsageError, match="b is a copy of a"):
        noise.measure({"a": run, "b": run, "c": ended(run, 1)})
    first = finished(tmp_path, run).path
    for name in ("copy", "again"):
        shutil.copytree(first, tmp_path / name)
    folders = [str(first), str(tmp_path / "copy"), str(tmp_path / "again")]
    done = CliRunner().invoke(cli, ["noise", *folders, "--out", str(tmp_path / "f")], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert not (tmp_path / "f").exists()


def test_noise_floor_uses_only_the_twin_of_a_run_with_faults():
    run = synthetic_run()
    floor = noise.measure({name: ended(run, number) for number, name in enumerate("abc")})
    assert floor.sources == ("a (twin)", "b (twin)", "c (twin)")


def test_noise_floor_of_different_conditions_or_too_few_runs_is_rejected():
    run = synthetic_run()
    for other in ({"lab": "another"}, {"accelerator": "kvm"}, {"routing": RECEIPT}):
        runs = {"a": run, "b": msgspec.structs.replace(run, **other), "c": ended(run, 1)}
        with pytest.raises(UsageError, match="different labs, accelerators"):
            noise.measure(runs)
    with pytest.raises(UsageError, match="at least 3"):
        noise.measure({"a": run})


def test_noise_floor_widens_the_interval():
    observed = observe(synthetic_run())
    plain = observed.metrics["jct_ratio"].interval
    spread = noise.Spread(runs=10, middle=40.0, unit="s", log_sd=0.2)
    floor = noise.NoiseFloor(lab="soft", workload={}, iterations=5, sources=(), spreads={"job_time": spread})
    wide = noise.allow_for(observed, floor).metrics["jct_ratio"].interval
    assert wide.low < plain.low
    assert wide.high > plain.high
    assert "noise floor of 10" in wide.method
    assert noise.allow_for(observed, None) is observed


def test_noise_command_keeps_the_floor_for_its_workload(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    run = synthetic_run()
    folders = [str(finished(tmp_path / str(index), ended(run, index)).path) for index in range(3)]
    done = CliRunner().invoke(cli, ["noise", *folders, "--json"], standalone_mode=False)
    assert done.exception is None
    kept = json.loads(done.output)["kept"]
    folder = tmp_path / "home" / "labs" / "soft"
    assert kept == str(folder / noise.FILE)
    assert noise.load(folder, run.workload, run.accelerator).spreads["job_time"].runs == 3
    assert noise.load(folder, {"flow": "write"}, run.accelerator) is None
    assert noise.load(folder, run.workload, "kvm") is None


@pytest.mark.parametrize("content", [b"", b"\xff", b'{"schema": 2}', b"[" * 100_000])
def test_noise_floor_file_that_is_broken_is_named_in_one_sentence(tmp_path, content):
    (tmp_path / noise.FILE).write_bytes(content)
    with pytest.raises(UsageError, match=r"noise-floor\.json: not a noise floor .*measure it again"):
        noise.load(tmp_path, {}, None)
