"""How busy the controller was: pressure stall information and steal time between two moments."""

from __future__ import annotations

import pytest
from synthetic_run import changed, reread, synthetic_run

from faultbed.harness.analysis.observations import Observation
from faultbed.harness.analysis.observe import observe
from faultbed.harness.bounds import check_expectation
from faultbed.harness.confidence import Interval
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.ledger.statistics.level_tolerance import DECLARED
from faultbed.harness.verdict import Verdict
from faultbed.testbed.observe.machine_load import MachineLoad, differences


def write(proc, *, pressure=None, stat=None):
    (proc / "pressure").mkdir(exist_ok=True)
    for name, total in (pressure or {}).items():
        (proc / "pressure" / name).write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\nfull total=1\n")
    if stat is not None:
        (proc / "stat").write_text(f"cpu  {' '.join(str(value) for value in stat)} 0 0\ncpu0 1 2 3\n")


def test_machine_load_shares_are_growth_over_time(tmp_path, monkeypatch):
    clock = iter([10_000_000_000, 12_000_000_000])
    monkeypatch.setattr("faultbed.testbed.observe.machine_load.time.monotonic_ns", lambda: next(clock))
    write(tmp_path, pressure={"cpu": 100, "io": 0, "memory": 7}, stat=[10, 0, 10, 70, 0, 0, 0, 10])
    load = MachineLoad.watch(tmp_path)
    write(tmp_path, pressure={"cpu": 1_000_100, "io": 200_000, "memory": 7}, stat=[60, 0, 10, 100, 0, 0, 0, 30])

    assert load() == MachineLoad(wall_ns=2_000_000_000, cpu=0.5, io=0.1, memory=0.0, steal=0.2)


def test_machine_load_without_pressure_files_is_unknown(tmp_path):
    result = MachineLoad.watch(tmp_path)()

    assert (result.cpu, result.io, result.memory, result.steal) == (None, None, None, None)
    assert "/proc/pressure/cpu" in result.missing
    assert "not available" in differences(result, result)


def test_machine_load_of_this_machine_is_a_share():
    result = MachineLoad.watch()()

    for value in (result.cpu, result.io, result.memory, result.steal):
        assert value is None or 0 <= value <= 1


def test_machine_load_differences_name_large_ones_only():
    run = MachineLoad(wall_ns=1, cpu=0.2, io=0.01, memory=0.0, steal=0.0)
    twin = MachineLoad(wall_ns=1, cpu=0.7, io=0.03, memory=0.0, steal=0.1)

    assert differences(run, twin) == (
        "on the controller: CPU pressure 20% in the run, 70% in the twin; steal time 0% in the run, 10% in the twin"
    )
    assert differences(run, run) == ""
    assert differences(run, None) == ""


def test_evidence_keeps_the_load_of_run_and_twin():
    load = MachineLoad(wall_ns=5, cpu=0.5, missing=("/proc/pressure/io",))
    run = changed(synthetic_run(), load=load, twin_load=load)

    assert reread(run).twin.load == load
    assert "/proc/pressure/io not available" in observe(run).metrics["jct_ratio"].detail


@pytest.mark.parametrize(("sign", "bound"), [("maximum", 3.0), ("minimum", 1.01)])
def test_judge_run_faster_than_its_twin_is_inconclusive(sign, bound):
    """No fault makes a job faster. On a busy machine, a run under three faults once took 0.79 of its twin's time."""
    faster = Observation(
        value=0.79, detail="47.4 s for 90 iterations", sampling=Interval(low=0.75, high=0.83, method="bootstrap")
    )
    expectation = Expectation(metric=METRICS["jct_ratio"], **{sign: bound})
    (check,) = check_expectation(expectation, faster, (), tolerance=DECLARED["rack"])

    assert check.verdict is Verdict.INCONCLUSIVE
    assert "machine was disturbed" in check.detail


def test_judge_run_whose_interval_holds_the_twins_time_passes():
    same = Observation(value=0.98, detail="", sampling=Interval(low=0.94, high=1.02, method="bootstrap"))
    (check,) = check_expectation(
        Expectation(metric=METRICS["jct_ratio"], maximum=3.0), same, (), tolerance=DECLARED["rack"]
    )

    assert check.verdict is Verdict.PASS
