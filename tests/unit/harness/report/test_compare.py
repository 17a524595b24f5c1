"""Comparison of two runs and of a history of runs: a difference is reported only if noise cannot explain it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import sqlite3
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from finished_run import finished
from hypothesis import given
from hypothesis import strategies as st
from repeated_runs import without_faults
from synthetic_run import changed, synthetic_run

from faultbed.harness.analysis.noise import NoiseFloor, Spread
from faultbed.harness.analysis.observe import observe
from faultbed.harness.cli.main import cli
from faultbed.harness.confidence import Interval
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.experiment.run_plan import Plan, PlannedFabric
from faultbed.harness.record.evidence.workload_evidence import Serving
from faultbed.harness.report import history
from faultbed.harness.report.comparison.compare import _outcome, compare, differences
from faultbed.harness.report.comparison.compared_runs import headline
from faultbed.harness.report.history import Past, regressions
from faultbed.testbed.errors import UsageError

PLAN = Plan(faultbed="0", experiment="x", seed=7, inventory="00", workload={"size_bytes": 1}, faults=())


def test_compare_run_with_itself_shows_no_difference():
    run = synthetic_run()
    for row in compare(run, run):
        assert row.ratio in {None, 1.0}
        assert row.says in {"no difference shown", "not comparable"}


def test_compare_run_of_150_percent_time_is_worse_and_the_reverse_is_better():
    run = without_faults(synthetic_run())
    slow = without_faults(synthetic_run(), 1.5)
    worse, better = compare(run, slow)[0], compare(slow, run)[0]
    assert (worse.metric, worse.says) == ("job time", "worse")
    assert worse.ratio == pytest.approx(1.5, rel=0.01)
    assert worse.interval.low > 1.3
    assert (better.says, better.ratio) == ("better", pytest.approx(1 / 1.5, rel=0.01))


def test_compare_run_whose_fault_did_nothing_is_neither_better_nor_worse():
    """A job is faster if its fault never fires, which says nothing about the change under test."""
    a, b = synthetic_run(), synthetic_run(fired=False)
    for one, two, letter in ((a, b, "B"), (b, a, "A")):
        row = compare(one, two)[0]
        assert (row.metric, row.says) == ("job time", "not comparable")
        assert row.why.startswith(f"{letter}: uplink is not proven: ")
    assert {row.says for row in compare(a, b)} <= {"not comparable", "no difference shown"}
    broken = changed(without_faults(a, 1.5), errors=("a switch was gone",))
    assert compare(without_faults(a), broken)[0].why == "B: a switch was gone"


def test_compare_run_that_measured_the_machine_is_neither_better_nor_worse():
    """With more load than the emulation can forward, the machine under the lab decides the goodput of each flow."""
    run = without_faults(synthetic_run())
    crowded = changed(without_faults(synthetic_run(), 1.5), offered_bps=9e9, carried_bps=1e9)
    fitting = changed(crowded, offered_bps=1e8)
    row = compare(run, crowded)[0]
    assert (row.metric, row.says) == ("job time", "not comparable")
    assert row.why.startswith("B: the workload may send 9e+03 Mb/s")
    assert compare(run, fitting)[0].says == "worse"


def test_compare_change_within_the_noise_floor_is_no_difference():
    run = without_faults(synthetic_run())
    spread = Spread(runs=10, middle=40.0, unit="s", log_sd=0.2)
    floor = NoiseFloor(iterations=5, sources=(), spreads={"job_time": spread})
    row = compare(run, without_faults(synthetic_run(), 1.2), floor=floor)[0]
    assert row.says == "no difference shown"
    assert "noise floor" in row.why


def test_compare_one_recovery_each_needs_repeats():
    run = synthetic_run()
    rows = {row.metric: row for row in compare(run, run)}
    assert "only repeats" in rows["recovery.uplink"].why


def test_compare_wrong_data_in_one_of_the_runs_is_worse():
    """The headline was "no difference shown", although every result of B was wrong."""
    run = without_faults(synthetic_run())
    wrong = changed(
        run,
        series=tuple(
            msgspec.structs.replace(
                rank, iterations=tuple(msgspec.structs.replace(step, wrong=4) for step in rank.iterations)
            )
            for rank in run.workload.series
        ),
    )
    worse, better = ({row.metric: row.says for row in rows} for rows in (compare(run, wrong), compare(wrong, run)))
    assert (worse["wrong_elements"], better["wrong_elements"]) == ("worse", "better")
    assert "worse in wrong_elements" in headline(compare(run, wrong))
    assert "wrong_elements" not in headline(compare(wrong, wrong))


def test_compare_higher_bandwidth_is_better():
    run = without_faults(synthetic_run())
    better = changed(run, summary=msgspec.structs.replace(run.workload.summary, busbw_gbps=2.0))
    rows = {row.metric: row for row in compare(run, better)}
    assert rows["busbw.mean"].says == "better"


def test_bus_bandwidth_is_that_of_the_mean_collective():
    """The bandwidth of the median collective did not show collectives that a fault had delayed for long."""
    run = without_faults(synthetic_run())

    def held_up(series):
        steps = [
            msgspec.structs.replace(step, comm_ns=20 * step.comm_ns) if step.index % 10 == 0 else step
            for step in series.iterations
        ]
        return msgspec.structs.replace(series, iterations=tuple(steps))

    slow = changed(run, series=tuple(map(held_up, run.workload.series)))
    even, uneven = (observe(one).metrics["busbw.mean"] for one in (run, slow))
    assert uneven.value < 0.6 * even.value
    for one in (even, uneven):
        assert one.interval is None or one.interval.low <= one.value <= one.interval.high


def test_differences_lists_every_changed_field_of_the_plan():
    assert differences(PLAN, PLAN) == ()
    other = msgspec.structs.replace(PLAN, seed=8, workload={"size_bytes": 2})
    assert differences(PLAN, other) == ("seed: 7 and 8", "workload: size_bytes 1 and 2")


def test_compare_failed_run_with_a_good_one_says_that_nothing_is_comparable(tmp_path):
    """Equal counts of both used to make the page say that no difference was shown."""
    good = synthetic_run()
    bad = changed(good, errors=("a switch was gone",))
    rows = compare(good, bad)
    assert {row.says for row in rows} == {"not comparable"}
    assert headline(rows) == "A and B cannot be compared: B: a switch was gone"
    a, b = (finished(tmp_path / name, run).path for name, run in (("a", good), ("b", bad)))
    text = CliRunner().invoke(cli, ["report", "--compare", str(a), str(b)], standalone_mode=False).output
    assert "not comparable: B: a switch was gone" in text
    page = next(b.glob("compare-with-*.html")).read_text()
    assert "which shows nothing: B: a switch was gone" in page
    assert "No difference shown" not in page


def test_report_compare_command_needs_two_runs(tmp_path):
    a, b = (finished(tmp_path / name, synthetic_run()).path for name in "ab")
    done = CliRunner().invoke(cli, ["report", "--compare", str(a), str(b), "--json"], standalone_mode=False)
    assert done.exception is None
    output = json.loads(done.output)
    assert output["differ"] == []
    assert output["metrics"][0]["metric"] == "job time"
    text = CliRunner().invoke(cli, ["report", "--compare", str(a), str(b)], standalone_mode=False).output
    assert "no difference shown" in text
    assert CliRunner().invoke(cli, ["report", "--compare", str(a)]).exit_code == 2
    assert CliRunner().invoke(cli, ["report", str(a), str(b)]).exit_code == 2


def past(number, *, verdict="PASS", series="s", expectations="", **metrics):
    return Past(
        name=f"run-{number:02}",
        experiment="demo",
        seed=7,
        lab="soft",
        version="v",
        series=series,
        expectations=expectations,
        verdict=verdict,
        lab_state="CLEAN",
        metrics=metrics,
    )


STEADY = [past(number, jct_ratio=value) for number, value in enumerate([1.10, 1.12, 1.08, 1.11, 1.09])]


def test_regressions_value_beyond_earlier_runs_is_reported():
    (regression,) = regressions([*STEADY, past(9, jct_ratio=1.6)])
    assert (regression.run, regression.metric) == ("run-09", "jct_ratio")
    assert "1.45 times the earlier value; 5 earlier runs suggest at most 1.1" in regression.words


def test_regressions_value_within_earlier_runs_is_not_reported():
    assert regressions([*STEADY, past(9, jct_ratio=1.14)]) == ()
    assert regressions([*STEADY, past(9, jct_ratio=0.9)]) == ()
    assert regressions([*STEADY[:3], past(9, jct_ratio=1.6)]) == ()
    assert regressions([*STEADY, past(9, jct_ratio=1.6, series="another")]) == ()


@given(st.floats(1e-6, 1e12), st.integers(4, 12), st.sampled_from(["dip", "iterations"]))
def test_regressions_unchanged_value_is_not_reported(value, earlier, metric):
    """Rounding makes the mean of equal logarithms slightly different. An unchanged dip of 0.784 was once reported."""
    assert regressions([past(number, **{metric: value}) for number in range(earlier + 1)]) == ()


def test_regressions_lower_bounds_are_no_earlier_values():
    """Runs that never recovered counted with the time that was left of them, and made a slow recovery look usual."""
    quick = [past(number, **{"recovery.total": 1.0 + number / 10}) for number in range(4)]
    open_ended = frozenset({"recovery.total"})
    never = [replace(past(number, **{"recovery.total": 30.0}), at_least=open_ended) for number in (4, 5)]
    (*_, last) = regressions([*quick, *never, past(9, **{"recovery.total": 25.0})])
    assert (last.run, last.metric) == ("run-09", "recovery.total")
    assert "4 earlier runs" in last.words
    found = regressions([*quick, *never])
    assert [one.run for one in found] == ["run-04", "run-05"], "no lower than 30 s is worse"
    assert all(one.words.startswith("at least 30, ") for one in found)


def test_history_marks_the_values_that_are_lower_bounds(tmp_path, monkeypatch):
    finished(tmp_path, synthetic_run())
    seen = observe(synthetic_run())
    never = replace(seen.metrics["recovery.total"], value=30.0, censored=True)
    monkeypatch.setattr(
        history.judge, "observed_of", lambda *_: replace(seen, metrics={**seen.metrics, "recovery.total": never})
    )
    (only,) = history.read(history.update(tmp_path)).past
    assert (only.metrics["recovery.total"], only.at_least) == (30.0, {"recovery.total"})
    text = CliRunner().invoke(cli, ["history", "--runs", str(tmp_path)], standalone_mode=False).output
    assert "≥ 30 s" in text
    done = CliRunner().invoke(cli, ["history", "--runs", str(tmp_path), "--json"], standalone_mode=False)
    assert json.loads(done.output)["runs"][0]["at_least"] == ["recovery.total"]


def test_regressions_one_iteration_below_a_constant_count_is_reported():
    runs = [past(number, iterations=40) for number in range(5)]
    assert len(regressions([*runs, past(9, iterations=39)])) == 1


@pytest.mark.parametrize("metric", ["recovery.total", "after_clear.total"])
def test_regressions_recovery_a_bin_longer_than_equal_ones_is_not_reported(metric):
    """Four equal recoveries have no deviation, and the next bin was "2.00 times the earlier value"."""
    quick = [past(number, **{metric: 0.1}) for number in range(4)]
    assert regressions([*quick, past(9, **{metric: 0.2})]) == ()
    assert len(regressions([*quick, past(9, **{metric: 0.3})])) == 1


def test_regressions_less_bandwidth_is_reported_and_more_is_not():
    runs = [past(number, **{"busbw.mean": value}) for number, value in enumerate([10.0, 10.1, 9.9, 10.05])]
    assert len(regressions([*runs, past(9, **{"busbw.mean": 7.0})])) == 1
    assert regressions([*runs, past(9, **{"busbw.mean": 13.0})]) == ()


def test_regressions_nothing_where_there_was_something_is_reported():
    """A run without any goodput used to be no regression: its logarithm is not known."""
    runs = [past(number, **{"goodput.mean": 10.0 + number / 10}) for number in range(5)]
    (worse,) = regressions([*runs, past(9, **{"goodput.mean": 0.0})])
    assert (worse.metric, worse.words) == ("goodput.mean", "0, and 5 earlier runs have at least 10")
    assert regressions([*runs, past(9)]) == (), "it was not measured"
    dips = [past(number, dip=0.1 + number / 100) for number in range(5)]
    assert regressions([*dips, past(9, dip=0.0)]) == ()


def test_compare_percentile_without_upper_bound_is_not_compared():
    times = tuple(int(10**9 + one) for one in np.random.default_rng(1).permutation(60))
    serving = Serving(ttft_ns=times, tpot_ns=((10**8, 10**8),) * 60, slo_attainment=None)
    run = changed(synthetic_run(), serving=serving)
    rows = {row.metric: row for row in compare(run, run)}
    assert rows["ttft.p50"].interval is not None
    assert (rows["ttft.p99"].interval, rows["ttft.p99"].why) == (
        None,
        "too few values for an upper end of the interval",
    )


@pytest.mark.parametrize("name", ["ettr", "slo_attainment", "goodput.mean", "bystander.goodput_ratio"])
def test_compare_lower_share_of_success_is_worse(name):
    assert _outcome(name, Interval(low=0.6, high=0.8, method="")) == "worse"
    assert _outcome(name, Interval(low=1.1, high=1.3, method="")) == "better"
    assert _outcome("dip", Interval(low=0.6, high=0.8, method="")) == "better"


def test_compare_share_of_a_whole_is_neither_better_nor_worse():
    """If the wire gets twice as fast, the share of copying grows although nothing got slower."""
    assert _outcome("split.copy", Interval(low=1.1, high=1.3, method="")) == "higher"
    assert _outcome("split.wire", Interval(low=0.6, high=0.8, method="")) == "lower"


def test_compare_knows_the_good_direction_of_every_metric_with_an_interval():
    less_is_better = {"dip", "jct_ratio", "ingest.p99_ratio"}
    for name, metric in METRICS.items():
        says = _outcome(name, Interval(low=1.1, high=1.3, method=""))
        if metric.is_noisy and says == "worse" and metric.unit != "s":
            assert name in less_is_better


def test_regressions_pass_turned_fail_is_reported():
    (regression,) = regressions([past(1), past(2, verdict="FAIL")])
    assert regression.metric == "verdict"
    assert regressions([past(1), past(2, verdict="INCONCLUSIVE")]) == ()


def test_regressions_undecided_runs_in_between_hide_no_fail():
    between = [past(2, verdict="INCONCLUSIVE"), past(3, verdict="ERROR")]
    (regression,) = regressions([past(1), *between, past(4, verdict="FAIL")])
    assert regression.words == "FAIL, and run-01 before it was a PASS"
    assert regressions([past(1, verdict="FAIL"), *between, past(4, verdict="FAIL")]) == ()
    assert regressions(between) == ()


def test_regressions_fail_of_a_stricter_bound_is_none():
    """A value that fails only because its bound was tightened is not a regression."""
    stricter = {"verdict": "FAIL", "expectations": "stricter"}
    assert regressions([past(1), past(2, **stricter)]) == ()
    (regression,) = regressions([past(1), past(2, **stricter, jct_ratio=1.0), past(3, verdict="FAIL")])
    assert regression.run == "run-03"


def other_plan(run):
    plan = run.read_plan()
    first = dataclasses.replace(plan.faults[0], params={"share": 0.5})
    return msgspec.structs.replace(plan, faults=(first, *plan.faults[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.write_plan(other_plan(run)),
        lambda run: run.write_plan(
            msgspec.structs.replace(run.read_plan(), fabric=PlannedFabric(routing="ecmp", fidelity="real"))
        ),
        lambda run: run.write_environment(msgspec.structs.replace(run.read_environment(), accelerator="kvm")),
    ],
    ids=["faults", "scheme", "machine"],
)
def test_history_runs_of_one_name_with_other_faults_scheme_or_machine_are_not_compared(tmp_path, change):
    """Runs before and after a stronger fault, or a move from TCG to KVM, cannot show a regression."""
    first, second = finished(tmp_path, synthetic_run()), finished(tmp_path, synthetic_run(seconds=51), name="later")
    one, two = history.read(history.update(tmp_path)).past
    assert one.series == two.series
    assert first.path.name == one.name
    (tmp_path / history.FILE).unlink()
    change(second)
    one, two = history.read(history.update(tmp_path)).past
    assert one.series != two.series


def test_history_runs_of_another_version_of_faultbed_are_compared(tmp_path):
    finished(tmp_path, synthetic_run())
    newer = finished(tmp_path, synthetic_run(seconds=51), name="newer")
    newer.write_plan(msgspec.structs.replace(newer.read_plan(), faultbed="9.9"))
    (newer.path / "experiment.toml").write_bytes(b"# a comment\n" + newer.read_experiment())
    one, two = history.read(history.update(tmp_path)).past
    assert (one.series, one.expectations) == (two.series, two.expectations)


def test_history_keeps_a_seed_of_64_bits(tmp_path):
    run, seed = finished(tmp_path, synthetic_run()), 2**64 - 1
    run.write_plan(msgspec.structs.replace(run.read_plan(), seed=seed))
    run.write_verdict(msgspec.structs.replace(run.read_verdict(), seed=seed))
    (only,) = history.read(history.update(tmp_path)).past
    assert only.seed == seed


def test_history_index_of_another_version_is_rebuilt(tmp_path):
    """CI keeps the index from night to night. Without the rebuild, every night after an update would fail."""
    finished(tmp_path, synthetic_run())
    with contextlib.closing(sqlite3.connect(tmp_path / history.FILE)) as old:
        old.execute("CREATE TABLE run (name TEXT PRIMARY KEY, changed_ns INTEGER)")
        old.execute("CREATE TABLE metric (name TEXT, metric TEXT, value REAL)")
        old.commit()
    (only,) = history.read(history.update(tmp_path)).past
    assert only.metrics["jct_ratio"] > 1
    names = {one.name for one in history.read(history.update(tmp_path)).past}  # and is then kept
    assert names == {only.name}


def test_history_skips_values_that_are_not_numbers(tmp_path, monkeypatch):
    """SQLite stores NaN as NULL, which compares with nothing."""
    finished(tmp_path, synthetic_run())
    observations = observe(synthetic_run())
    odd = {name: replace(one, value=math.nan) for name, one in observations.metrics.items()}
    monkeypatch.setattr(history.judge, "observed_of", lambda *_: replace(observations, metrics=odd))
    (only,) = history.read(history.update(tmp_path)).past
    assert only.metrics == {}


def test_history_index_follows_the_runs_folder(tmp_path):
    first = finished(tmp_path, synthetic_run())
    finished(tmp_path, synthetic_run(seconds=51), name="another")
    (tmp_path / "no-run").mkdir()
    assert [one.name for one in history.read(history.update(tmp_path)).past] == sorted(
        one.name for one in tmp_path.iterdir() if (one / "verdict.json").exists()
    )
    other = msgspec.structs.replace(first.read_verdict(), lab_state="DIRTY")
    first.write_verdict(other)
    (kept,) = (one for one in history.read(history.update(tmp_path)).past if one.name == first.path.name)
    assert kept.lab_state == "DIRTY"
    assert kept.metrics["jct_ratio"] > 1
    for one in list(first.path.iterdir()):
        shutil.rmtree(one) if one.is_dir() else one.unlink()
    assert len(history.read(history.update(tmp_path)).past) == 1


def test_history_expects_nothing_from_runs_whose_fault_did_nothing(tmp_path):
    """Jobs whose fault does nothing are fast, so every run whose fault fires would look like a regression."""
    finished(tmp_path, synthetic_run(fired=False))
    (idle,) = history.read(history.update(tmp_path)).past
    assert (idle.verdict, idle.metrics) == ("INCONCLUSIVE", {})
    finished(tmp_path, synthetic_run(), name="fired")
    assert sum("jct_ratio" in one.metrics for one in history.read(history.update(tmp_path)).past) == 1


def test_history_leaves_out_the_copy_of_a_run(tmp_path):
    """Five copies of one run would make its values look exact, and every other run a regression."""
    run = finished(tmp_path, synthetic_run())
    copy = tmp_path / f"{run.path.name}-copy"
    shutil.copytree(run.path, copy)
    result = history.read(history.update(tmp_path))
    assert [one.name for one in result.past] == [run.path.name]
    assert result.left_out == {copy.name: f"it is a copy of {run.path.name}"}
    shutil.rmtree(run.path)
    assert [one.name for one in history.read(history.update(tmp_path)).past] == [copy.name]


def test_history_unreadable_run_is_named_until_it_is_repaired(tmp_path):
    run = finished(tmp_path, synthetic_run())
    whole = (run.path / "evidence/measured/workload.json").read_bytes()
    (run.path / "evidence/measured/workload.json").write_bytes(whole[: len(whole) // 2])
    for _ in range(2):  # the second call does not read the run again
        result = history.read(history.update(tmp_path))
        assert result.past == ()
        assert "workload.json" in result.left_out[run.path.name]
    output = CliRunner().invoke(cli, ["history", "--runs", str(tmp_path)], standalone_mode=False).output
    assert f"{run.path.name} is left out: " in output
    output = CliRunner().invoke(cli, ["history", "--runs", str(tmp_path), "--json"], standalone_mode=False).output
    assert list(json.loads(output)["left_out"]) == [run.path.name]

    (run.path / "evidence/measured/workload.json").write_bytes(whole)
    run.write_verdict(run.read_verdict())

    result = history.read(history.update(tmp_path))
    assert (len(result.past), result.left_out) == (1, {})


def test_history_names_the_run_that_was_killed_before_its_verdict(tmp_path):
    """It was not in the list, and nothing said that there was one more run."""
    run = finished(tmp_path, synthetic_run())
    verdict = (run.path / "verdict.json").read_bytes()
    (run.path / "verdict.json").unlink()
    for _ in range(2):
        result = history.read(history.update(tmp_path))
        assert result.past == ()
        assert "it still runs, or it was killed" in result.left_out[run.path.name]
    (run.path / "verdict.json").write_bytes(verdict)
    result = history.read(history.update(tmp_path))
    assert (len(result.past), result.left_out) == (1, {})


def test_history_command_lists_runs(tmp_path):
    finished(tmp_path, synthetic_run())
    done = CliRunner().invoke(cli, ["history", "--runs", str(tmp_path), "--json"], standalone_mode=False)
    assert done.exception is None
    assert json.loads(done.output)["runs"][0]["verdict"] == "PASS"
    assert "PASS" in CliRunner().invoke(cli, ["history", "--runs", str(tmp_path)], standalone_mode=False).output
    with pytest.raises(UsageError, match="no such folder"):
        history.update(tmp_path / "none")
    (tmp_path / history.FILE).write_bytes(b"no database" * 100)
    with pytest.raises(UsageError, match="rebuilt from the runs"):
        history.update(tmp_path)
