"""Sweeps: points, table, and resuming without repeating runs. An unproven point has no number."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter

import house
import msgspec
import pyarrow.parquet as pq
import pytest
from finished_run import EVIL, parsed
from synthetic_sweep import SHARE, SOFT, points, swept, written

from faultbed.harness.analysis.observations import Observation
from faultbed.harness.confidence import resolution
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.experiment.parameters import parse
from faultbed.harness.record import rundir, sweep_file
from faultbed.harness.report.sweeps import sweep_text
from faultbed.harness.report.sweeps.sweep_chart import COLOURS, MARKERS, axis_values, sweep_chart
from faultbed.harness.report.sweeps.sweep_page import render_html
from faultbed.harness.run.repeats.pooled import Trial, why_left_out
from faultbed.harness.run.sweeps.finished_runs import find_finished_runs
from faultbed.harness.run.sweeps.point_values import _counted_metrics, _value, point_value
from faultbed.harness.run.sweeps.sweep_points import expected_s, metrics_for, points_of
from faultbed.harness.run.sweeps.sweep_runner import Sweep
from faultbed.harness.verdict import Check, Verdict, VerdictFile, worst
from faultbed.testbed.errors import ConfigError, DirtyLab, Interrupted, LabError, UsageError
from faultbed.testbed.inventory import lab_inventory


def test_points_are_all_combinations_and_the_last_parameter_changes_fastest():
    _, made = points(f"{SHARE}=0.1,0.2", "workload.size=1MiB,2MiB", repeat=2, seed=5)
    assert [list(one.parameters.values()) for one in made] == [
        ["0.1", "1MiB"], ["0.1", "2MiB"], ["0.2", "1MiB"], ["0.2", "2MiB"],
    ]  # fmt: skip
    assert [run.plan.seed for run in made[3].runs] == [5, 6]
    assert made[3].runs[0].plan.faults[1].params["share"] == 0.2
    assert made[3].runs[0].plan.workload["size_bytes"] == 2 << 20
    assert made[0].name == f"{SHARE}=0.1, workload.size=1MiB"


@pytest.mark.parametrize(
    ("overs", "error", "message"),
    [
        ([f"{SHARE}=0.1", f"{SHARE}=0.2"], UsageError, "is given twice"),
        ([f"{SHARE}=0.1,0.10"], UsageError, "are the same; remove one"),
        (["workload.size=256KiB,262144B"], UsageError, "are the same; remove one"),
        (["faults[1].at=6s,6000ms"], UsageError, "are the same; remove one"),
        ([f"{SHARE}=0.1,2"], UsageError, "faults[1]"),
        (["workload.size=1MiB,0B"], ConfigError, "workload.size"),
        (["faults[1].target=host3:rxe1,host9:rxe1"], ConfigError, "host9"),
    ],
)
def test_sweep_invalid_points_are_rejected_before_the_first_run(overs, error, message):
    with pytest.raises(error) as caught:
        points(*overs)
    assert message in str(caught.value)


def test_sweep_with_too_many_runs_is_rejected():
    with pytest.raises(UsageError, match="1001 runs, of at most 1000"):
        points(f"{SHARE}=0.1", repeat=1001)


def test_sweep_expected_time_is_the_workloads_until_runs_were_timed():
    _, made = points("workload.duration=60s,90s")
    alone = expected_s(made, {})
    assert alone[2] - alone[1] == 30
    _, paired = points("workload.duration=60s,90s", "expect[1].metric=jct_ratio")
    with_twin = expected_s(paired, {})
    assert with_twin[2] - with_twin[1] == 2 * 30, "a bound against the twin runs the workload twice"
    timed = expected_s(made, {1: [140.0]})
    assert timed == {1: 140.0, 2: 170.0}


def test_default_metrics_are_the_bounded_ones():
    _, made = points()
    expected = list(dict.fromkeys(expectation.metric.name for expectation in made[0].experiment.expectations))
    assert [metric.name for metric in metrics_for(made, ())] == expected
    assert [metric.name for metric in metrics_for(made, ["dip", "dip"])] == ["dip"]
    with pytest.raises(UsageError, match="did you mean goodput_min_ratio"):
        metrics_for(made, ["goodput_min_rato"])


def test_sweep_plan_prints_points_and_touches_nothing(executed):
    done = swept(executed, "--plan", "--json")
    output = json.loads(done.stdout)
    assert [point["parameters"][SHARE] for point in output["points"]] == ["0.1", "0.2", "0.4"]
    assert output["expected_s"] == pytest.approx(3 * output["points"][0]["expected_s"])
    assert "nothing is done yet" in swept(executed, "--plan").stdout
    assert executed.shares == []
    assert not executed.folder.exists()


def test_sweep_runs_every_point_and_writes_table_page_and_parquet(executed):
    done = swept(executed, "--metric", "dip", "--json")
    assert executed.shares == [0.1, 0.2, 0.4]
    output = json.loads(done.stdout)
    assert (output["verdict"], done.return_value) == ("PASS", 0)
    value = output["points"][1]["values"][0]
    assert 0 < value["value"] < 1
    assert value["low"] is value["high"] is None, "a range needs fault-free time on both sides of the deepest dip"
    assert (executed.folder / output["points"][1]["runs"][0]["run_dir"] / "verdict.json").exists()
    table = pq.read_table(executed.folder / "sweep.parquet").to_pylist()
    assert [row[f"over:{SHARE}"] for row in table] == ["0.1", "0.2", "0.4"]
    assert table[1]["value"] == value["value"]
    page = parsed((executed.folder / "sweep.html").read_text())
    assert "3 points (3 PASS), 3 runs, lab CLEAN" in " ".join(page.text)


def test_sweep_resumed_runs_only_new_points(executed):
    swept(executed)
    first = (executed.folder / "sweep.json").read_bytes()
    assert swept(executed).return_value == 0
    assert len(executed.shares) == 3
    assert (executed.folder / "sweep.json").read_bytes() == first
    swept(executed, "--over", "workload.size=256KiB")
    assert len(executed.shares) == 3, "the file has this size: the points are the same"
    swept(executed, "--repeat", "2")
    assert len(executed.shares) == 6


def test_sweep_ended_by_ctrl_c_is_usable_and_resumes_with_the_partial_point(executed):
    executed.acts = {2: KeyboardInterrupt()}
    done = swept(executed)
    assert isinstance(done.exception, KeyboardInterrupt | SystemExit) or done.exit_code != 0
    partial = sweep_file.read(executed.folder)
    assert [sweep_text.state(point) for point in partial.points] == ["PASS", "not run", "not run"]
    assert (partial.verdict, partial.is_complete) == (Verdict.INCONCLUSIVE, False)
    assert (executed.folder / "sweep.html").exists()
    assert swept(executed).return_value == 0
    assert executed.shares == [0.1, 0.2, 0.2, 0.4]
    assert sweep_file.read(executed.folder).is_complete


@pytest.mark.parametrize("changes", [{"code": "0123456789abcdef"}, {"is_control": True}], ids=["code", "control"])
def test_finished_run_of_other_sources_or_without_intensity_is_not_reused(tmp_path, changes):
    _, (point,) = points("workload.size=4KiB")
    (decided,) = point.runs
    written(decided, tmp_path, **changes)
    assert find_finished_runs(tmp_path, [point]) == {}
    ours = written(decided, tmp_path)
    assert [run.path for run in find_finished_runs(tmp_path, [point])[1]] == [ours.run_dir.path]


@pytest.mark.process
def test_finished_run_with_other_group_variables_of_the_inventory_is_not_reused(tmp_path):
    """Group variables are a part of the inventory: a sweep that was resumed mixed runs with two hash seeds."""
    path, beside = tmp_path / "soft.yml", tmp_path / "group_vars"
    path.write_text(SOFT.path.read_text().replace(", faultbed_ecmp_hash_seed: 12345", ""))
    beside.mkdir()

    def point_with(seed):
        (beside / "all.yml").write_text(f"faultbed_ecmp_hash_seed: {seed}\n")
        return points("workload.size=4KiB", inventory=lab_inventory.load(path))[1]

    before = point_with(1)
    written(before[0].runs[0], tmp_path / "runs")
    (beside / "rack_h100.yml").write_text("faultbed_mtu: 9000\n")  # a group that this inventory does not have
    assert set(find_finished_runs(tmp_path / "runs", point_with(1))) == {1}
    assert find_finished_runs(tmp_path / "runs", point_with(2)) == {}


def test_sweep_resumed_on_a_different_machine_repeats_all_runs(executed):
    """Otherwise one curve would mix times of two machines, such as KVM and TCG."""
    executed.acts = {1: {"accelerator": "kvm"}, 2: KeyboardInterrupt()}
    swept(executed)
    done = swept(executed)
    assert done.return_value == 0
    assert executed.shares == [0.1, 0.2, 0.2, 0.1, 0.4]
    assert "1 finished runs discarded: made with kvm on" in " ".join(done.output.split())
    assert {run.read_environment().accelerator for run in _runs_of(executed.folder)} == {"tcg"}


def test_sweep_of_two_kinds_of_machine_counts_the_runs_of_the_newest_alone(tmp_path):
    _, made = points(f"{SHARE}=0.1,0.2")
    for point, accelerator in zip(made, ("kvm", "tcg"), strict=True):
        written(point.runs[0], tmp_path, accelerator=accelerator)
    assert set(find_finished_runs(tmp_path, made)) == {2}


def _runs_of(folder):
    return [rundir.RunDir(folder / run.run_dir) for point in sweep_file.read(folder).points for run in point.runs]


def test_sweep_truncated_verdict_is_run_again(executed):
    swept(executed)
    path = _runs_of(executed.folder)[1].path / "verdict.json"
    path.write_bytes(path.read_bytes()[:100])
    swept(executed)
    assert executed.shares == [0.1, 0.2, 0.4, 0.2]


def test_sweep_repeats_a_run_whose_verdict_belongs_to_a_different_run(executed):
    """If the verdict.json of another seed was copied over this one, the point would get that run's verdict."""
    swept(executed)
    one, two, _ = (run.path / "verdict.json" for run in _runs_of(executed.folder))
    two.write_bytes(one.read_bytes().replace(b'"seed": ', b'"seed": 1'))
    swept(executed)
    assert executed.shares == [0.1, 0.2, 0.4, 0.2]


@pytest.mark.usefixtures("drawn_anew")
def test_point_whose_faults_did_nothing_is_inconclusive_and_has_no_number(executed):
    """Mutation test: a sweep of no-op faults must neither PASS nor plot a curve."""
    executed.acts = {2: {"fired": False}}
    done = swept(executed, "--metric", "dip", "--metric", "goodput_mean_ratio")
    assert done.return_value == 2
    result = sweep_file.read(executed.folder)
    assert [point.verdict for point in result.points] == [Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.PASS]
    assert [value.value for value in result.points[1].values] == [None, None]
    assert sweep_text.cell(result.points[1], "dip") == "INCONCLUSIVE"
    assert "fired." in result.points[1].why
    assert sweep_chart(result).wide.count(">?<") == 2, "one for each metric"


@pytest.mark.parametrize("name", ["fired.loss", "routing.spray", "emulation"])
def test_run_with_an_unmet_condition_has_no_number_though_its_verdict_is_fail(name):
    """FAIL outranks INCONCLUSIVE, so the verdict alone hides that the run proves nothing."""
    unmet = Check(name=name, verdict=Verdict.INCONCLUSIVE, observed=0, bound=1, unit="", detail="not seen")
    failed = Check(name="qp_errors", verdict=Verdict.FAIL, observed=2, bound=0, unit="", detail="")
    verdict = VerdictFile(
        experiment="x", seed=1, lab="soft", verdict=Verdict.FAIL, checks=(unmet, failed), faults=(), lab_state="CLEAN"
    )
    trials = [Trial(run_dir="x", verdict=verdict, metrics={"goodput.mean": Observation(value=1.0, detail="")})]
    assert "not seen" in why_left_out(verdict)
    value = point_value(METRICS["goodput.mean"], _counted_metrics(trials), Verdict.FAIL, level=0.99)
    assert (value.value, value.detail.startswith("no run counts")) == (None, True)


def test_sweep_value_of_a_recovery_that_did_not_end_has_no_upper_end():
    """The interval is one of the lower bound. The table showed the true value as between 5 s and 5.1 s."""
    verdict = VerdictFile(
        experiment="x", seed=1, lab="soft", verdict=Verdict.FAIL, checks=(), faults=(), lab_state="CLEAN"
    )
    metric = METRICS["recovery.total"]

    def observed(one, censored):
        interval = resolution(one - 0.1, one + 0.1, of="")
        return Observation(value=one, detail="", censored=censored and one == 5.0, interval=interval)

    def value(*seconds, censored):
        metrics = [{metric.name: observed(one, censored)} for one in seconds]
        trials = [Trial(run_dir="x", verdict=verdict, metrics=one) for one in metrics]
        return _value(metric, trials, Verdict.FAIL, 0.99, None)

    for seconds in ((5.0,), tuple([5.0, 1.0, 2.0] * 10)):
        closed, opened = (value(*seconds, censored=censored) for censored in (False, True))
        assert closed.high >= max(1.0, closed.value)
        assert (opened.censored, opened.low, opened.high) == (True, closed.low, None)


def test_sweep_error_affects_one_point_only_and_is_retried(executed):
    executed.acts = {1: {"error": "host3: gone"}}
    assert swept(executed).return_value == 3
    result = sweep_file.read(executed.folder)
    assert [point.verdict for point in result.points] == [Verdict.ERROR, Verdict.PASS, Verdict.PASS]
    assert result.points[0].why == "harness: host3: gone"
    assert all(value.value is None for value in result.points[0].values)
    assert swept(executed).return_value == 0
    assert executed.shares == [0.1, 0.2, 0.4, 0.1]


def test_dirty_lab_ends_the_sweep_with_its_exit_code(executed):
    executed.acts = {2: {"lab_state": "DIRTY"}}
    assert swept(executed).return_value == 5
    assert executed.shares == [0.1, 0.2]
    swept(executed)
    assert executed.shares == [0.1, 0.2, 0.2, 0.4]


def test_repeated_point_is_pooled_after_its_last_run(executed):
    parameters, made = points(f"{SHARE}=0.1", repeat=3)
    runs = [written(run, executed.folder / "runs").run_dir for run in made[0].runs[:2]]
    assert len(runs) == 2
    result = Sweep.open(executed.folder, SOFT, parameters, made, metrics_for(made, ["jct_ratio"])).snapshot()
    assert (result.points[0].verdict, len(result.points[0].runs)) == (None, 2)
    written(made[0].runs[2], executed.folder / "runs")
    result = Sweep.open(executed.folder, SOFT, parameters, made, metrics_for(made, ["jct_ratio"])).snapshot()
    (value,) = result.points[0].values
    assert result.points[0].verdict is not None
    assert value.detail.startswith("3 runs")
    assert (value.low, value.high) == (None, None), "three runs have no interval"


def test_sweep_folder_of_another_experiment_is_rejected(executed):
    swept(executed)
    kept = sweep_file.read(executed.folder)
    sweep_file.write(msgspec.structs.replace(kept, experiment="other"), executed.folder)
    done = swept(executed)
    assert "holds a sweep of other on soft, not of demo on soft; choose another --out" in str(done.exception)
    (executed.folder / "sweep.json").write_text("{}")
    assert "remove sweep.json, and sweep again" in str(swept(executed).exception)


def test_sweep_axis_decodes_numbers_sizes_and_times():
    assert axis_values(["0.001", "0.01", "0.1"]) == ([0.001, 0.01, 0.1], True)
    assert axis_values(["1", "2", "3"]) == ([1.0, 2.0, 3.0], False)
    assert axis_values(["4KiB", "1MiB"]) == ([4096.0, float(1 << 20)], True)
    assert axis_values(["5ms", "10ms"]) == ([5e6, 1e7], False)
    assert axis_values(["sync", "async"]) == ([0.0, 1.0], False)
    assert axis_values(["0", "nan"]) == ([0.0, 1.0], False)


def made_sweep(*values, verdicts=None, model=""):
    metric = "goodput_mean_ratio"
    made = tuple(
        sweep_file.SweptPoint(
            number=number,
            parameters={"workload.size": f"{number}MiB"},
            verdict=(verdicts or [Verdict.PASS] * len(values))[number - 1],
            values=(
                sweep_file.SweptValue(
                    metric=metric, unit="ratio", value=value, low=value and value * 0.9, high=value and value * 1.1,
                    predicted=0.5 if model else None,
                ),
            ),
        )
        for number, value in enumerate(values, start=1)
    )  # fmt: skip
    over = sweep_file.SweptParameter(path="workload.size", values=tuple(f"{n}MiB" for n in range(1, len(values) + 1)))
    return sweep_file.SweepFile(
        faultbed="0", experiment="x", lab="soft", seed=1, repeat=1, over=(over,), metrics=(metric,),
        verdict=sweep_file.verdict_of(made), lab_state="CLEAN", points=made, model=model,
    )  # fmt: skip


def test_sweep_page_shows_the_prediction_and_escapes_text():
    sweep = made_sweep(0.8, 0.6, 0.4, model="a model")
    evil = msgspec.structs.replace(sweep.points[0], why=EVIL, verdict=Verdict.FAIL, parameters={"workload.size": EVIL})
    over = msgspec.structs.replace(sweep.over[0], values=(EVIL, "2MiB", "3MiB"))
    html = render_html(msgspec.structs.replace(sweep, experiment=EVIL, points=(evil, *sweep.points[1:]), over=(over,)))
    text = " ".join(" ".join(parsed(html).text).split())
    assert EVIL in text
    assert "<script>" not in html
    assert "0.50 at most" in text
    assert "0.6 (0.54 .. 0.66)" in text


@pytest.mark.usefixtures("drawn_anew")
def test_sweep_chart_names_every_line_and_every_tick_of_small_values():
    """Ticks of 0.001 and 0.002 were both "0.00", the legend ran out of the picture, and line 6 looked like line 1."""
    one = made_sweep(0.0008, 0.0019, 0.0025)
    other = msgspec.structs.replace(one.over[0], path="fabric.routing", values=tuple("abcdef"))
    points = [
        msgspec.structs.replace(point, parameters={"fabric.routing": value} | point.parameters)
        for value in other.values
        for point in one.points
    ]
    sweep = msgspec.structs.replace(one, over=(other, *one.over), points=tuple(points))
    for svg in (sweep_chart(sweep).wide, sweep_chart(sweep).narrow):
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
        assert {"0.001", "0.002", "fabric.routing", *other.values} <= set(texts)
    looks = list(zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS), range(42), strict=False))
    assert len({look[:2] for look in looks}) == 42


def test_sweep_page_without_numbers_has_no_plot():
    nothing = made_sweep(None, None, verdicts=[Verdict.INCONCLUSIVE, None])
    assert sweep_chart(nothing) is None
    text = " ".join(" ".join(parsed(render_html(nothing)).text).split())
    assert "2 points (1 not run, 1 INCONCLUSIVE), 0 runs" in text


def test_value_of_an_inconclusive_point_is_never_shown_even_if_the_file_has_one():
    sweep = made_sweep(0.8, 0.6, verdicts=[Verdict.INCONCLUSIVE, Verdict.ERROR])
    assert [sweep_text.cell(point, "goodput_mean_ratio") for point in sweep.points] == ["INCONCLUSIVE", "ERROR"]
    assert sweep_chart(sweep) is None


def test_verdict_of_a_sweep_is_the_worst_of_its_points():
    sweep = made_sweep(0.8, 0.6, verdicts=[Verdict.PASS, Verdict.FAIL])
    assert sweep.verdict is worst([Verdict.PASS, Verdict.FAIL])
    assert sweep_file.decode(sweep_file.encode(sweep)) == sweep


READY = sorted((house.HOUSE / "docs" / "sweeps").glob("*.toml"))


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_ready_sweep_fits_a_lab(path):
    tapered = dict.fromkeys(("collision", "algorithms", "fragmented"), "soft-tapered")
    name = {"taper": "soft-zones", "placement": "soft-zones-8", **tapered}.get(path.stem, "soft")
    lab = lab_inventory.load(house.HOUSE / "inventory" / f"{name}.yml")
    made = points_of(
        path.read_bytes(), [parse("workload.qp.timeout=15,16")], lab, source=path.name, seed=None, repeat=1
    )
    assert len(made) == 2
    assert metrics_for(made, ())


def test_point_without_a_value_of_its_metric_is_inconclusive_with_the_reason(executed):
    """The run passes because it has no bound on that metric, but the sweep has no value to show."""
    done = swept(executed, "--metric", "dip", "--metric", "ttft.p99")
    assert done.return_value == 2
    point = sweep_file.read(executed.folder).points[0]
    assert (point.verdict, point.runs[0].verdict) == (Verdict.INCONCLUSIVE, Verdict.PASS)
    assert point.why == "ttft.p99: not an inference job"
    assert sweep_text.cell(point, "dip") == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (DirtyLab("host3: a qdisc is left"), "DIRTY"),
        (Interrupted("the lab is DIRTY", exit_code=5), "DIRTY"),
        (Interrupted("the lab is as it was before"), "CLEAN"),
        (LabError("host3: no SSH"), "CLEAN"),
    ],
)
def test_sweep_ended_by_an_error_records_the_lab_state_of_that_error(executed, error, state):
    """The run that raised is not among the finished ones, so no run in the file has the state DIRTY."""
    executed.acts = {2: error}
    swept(executed)
    result = sweep_file.read(executed.folder)
    assert (result.lab_state, [len(point.runs) for point in result.points]) == (state, [1, 0, 0])
    page = parsed((executed.folder / "sweep.html").read_text())
    assert f"1 run, lab {state}" in " ".join(page.text)


def test_sweep_observes_a_run_no_more_often_when_later_runs_follow(executed, monkeypatch):
    """`sweep.json` is written after every run, and points without new runs must not be observed again."""
    reads = Counter()
    plain = rundir.RunDir.read_run

    def counted(run):
        reads[run.path] += 1
        return plain(run)

    monkeypatch.setattr(rundir.RunDir, "read_run", counted)
    assert swept(executed).return_value == 0
    observed = [reads[run.path] for run in _runs_of(executed.folder)]  # under their keys, to which they were renamed
    assert len(observed) == 3
    assert len(set(observed)) == 1, reads
