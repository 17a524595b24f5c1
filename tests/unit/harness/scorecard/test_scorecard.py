"""A scorecard: programs and faults are data, and only runs whose fault is proven say whether a program survived."""

from __future__ import annotations

import pytest

from faultbed.harness.experiment import experiment_file
from faultbed.harness.scorecard import score_page, score_points, score_table
from faultbed.harness.scorecard.program_file import faults_named, program_named, programs
from faultbed.harness.scorecard.score_table import ScoredRun, ScoreFile, ScoreRow, deciding, outcome_of
from faultbed.harness.verdict import Check, Verdict, VerdictFile
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventories

SOFT = load(inventories() / "soft.yml")
PASS, FAIL, INCONCLUSIVE, ERROR = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.ERROR


@pytest.mark.parametrize("name", programs())
def test_shipped_program_fits_the_soft_lab_with_every_setting(name):
    program = program_named(name)
    points = score_points.points_of([program], faults_named(["link down 2 s", "slow receiver"]), SOFT, seed=1, seeds=1)
    assert len(points) == 2 * len(program.settings)
    assert len({point.runs[0].source for point in points}) == len(points), "every combination is another experiment"


def test_every_fault_of_the_set_fits_the_soft_lab():
    points = score_points.points_of([program_named("rping")], faults_named(()), SOFT, seed=1, seeds=1)
    assert [point.parameters["fault"] for point in points] == [fault.name for fault in faults_named(())]


def test_setting_changes_the_workload_and_nothing_else_and_the_program_stays_as_it_was():
    program, (fault,) = program_named("faultbed"), faults_named(["link down 2 s"])
    short, long = (
        experiment_file.decode(score_points.experiment_of(program, name, fault), source="x")
        for name in ("timeout 14", "timeout 18")
    )
    assert (short.workload.qp.timeout, long.workload.qp.timeout) == (14, 18)
    assert short.workload.size_bytes == long.workload.size_bytes == 16384
    assert short.faults[0].targets == ("path[host[0]:rnic[0]>host[-1]:rnic[0]]",)
    assert short.workload.duration_ns == 30 * 10**9
    assert "duration" not in program.workload


def test_hosts_of_roles_are_targets_of_host_faults():
    text = score_points.experiment_of(program_named("rping"), "connection manager", faults_named(["slow receiver"])[0])
    assert experiment_file.decode(text, source="x").faults[0].targets == ("host[-1]",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "missing required field"),
        ("about = 'x'\nworkload = {}\nsettings = {}", "settings: there is none"),
        ("about = 'x'\nworkload = {}\nsettings = {a = {}}", "no RNIC of the role client"),
        ("about = 'x'\nworkload = {roles = {client = 'host1:rxe0'}}\nsettings = {a = {}}", "of the role server"),
        ("about = 'x'\nworklod = {}\nsettings = {a = {}}", "worklod"),
        ("about =", "compare it with"),
    ],
)
def test_wrong_program_is_refused_with_its_file(tmp_path, text, says):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        program_named(str(tmp_path / "mine.toml"))
    assert says in str(error.value)
    assert "mine" in str(error.value)


def test_unknown_program_and_fault_are_refused_with_the_nearest():
    with pytest.raises(UsageError, match="did you mean rping"):
        program_named("rpign")
    with pytest.raises(UsageError, match="did you mean RNIC reset"):
        faults_named(["RNIC rest"])


def verdict_of(verdict, lab_state="CLEAN", **checks):
    made = [
        Check(name=name.replace("_", "."), verdict=of, observed=None, bound=None, unit="", detail=f"why {name}")
        for name, of in checks.items()
    ]
    return VerdictFile(
        experiment="scorecard", seed=1, lab="soft", verdict=verdict, checks=tuple(made), faults=(),
        lab_state=lab_state, attribution=(),
    )  # fmt: skip


FAILED = ("failed", "programs: why programs")


@pytest.mark.parametrize(
    ("verdict", "outcome"),
    [
        (verdict_of(PASS, fired_fault=PASS, programs=PASS), ("survived", "")),
        (verdict_of(FAIL, fired_fault=PASS, programs=FAIL), FAILED),
        (
            verdict_of(FAIL, fired_fault=PASS, programs=FAIL, progress=INCONCLUSIVE),
            ("failed", "programs: why programs"),
        ),
        (verdict_of(FAIL, fired_fault=INCONCLUSIVE, programs=FAIL), ("unknown", "fired.fault: why fired_fault")),
        (verdict_of(PASS), ("unknown", "nothing says that the fault fired")),
        (verdict_of(INCONCLUSIVE, fired_fault=PASS, progress=INCONCLUSIVE), ("unknown", "progress: why progress")),
        (verdict_of(FAIL, "DIRTY", fired_fault=PASS, programs=FAIL), ("unknown", "the lab is DIRTY")),
        (verdict_of(ERROR, run=ERROR), ("unknown", "run: why run")),
    ],
)
def test_only_a_proven_fault_says_whether_a_program_survives(verdict, outcome):
    assert outcome_of(verdict) == outcome


def row(setting, *outcomes, fault="link down", planned=2, **values):
    runs = tuple(
        ScoredRun(seed=seed, run_dir=f"runs/{seed}", outcome=outcome, values=values)
        for seed, outcome in enumerate(outcomes)
    )
    return ScoreRow(program="rping", setting=setting, fault=fault, planned=planned, runs=runs)


def test_missing_run_is_unknown_and_never_survives():
    one = row("a", "survived")
    assert (one.count("survived"), one.count("unknown"), one.survival) == (1, 1, "1 of 1, 1 unknown")
    assert one.why == "not run yet"
    assert row("a").survival == "2 unknown"
    assert row("a", "failed", "unknown").survival == "0 of 1, 1 unknown"


def test_setting_decides_only_where_every_run_is_known():
    rows = [row("short", "failed", "survived"), row("long", "survived", "survived")]
    assert deciding(rows) == {"rping": "link down: only with long"}
    assert deciding([row("short", "failed", "unknown"), rows[1]]) == {}
    assert deciding([row("short", "failed"), rows[1]]) == {}


def test_cells_have_the_median_and_range_of_runs_that_survived():
    times = tuple(
        ScoredRun(seed=seed, run_dir="x", outcome=outcome, values={"recovery.total": value}, open=open_)
        for seed, (outcome, value, open_) in enumerate(
            [("survived", 1.0, ()), ("survived", 3.0, ()), ("failed", 90.0, ()), ("survived", 2.0, ("recovery.total",))]
        )
    )
    assert ScoreRow(program="a", setting="b", fault="c", planned=4, runs=times).cell("recovery.total") == (
        "≥ 2.00 (1.00 to 3.00)"
    )
    assert row("a", "failed").cell("recovery.total") == "—"


def test_data_that_no_run_checked_are_not_right():
    assert row("a", "survived").data == "not checked"
    assert row("a", "survived", "survived", wrong_elements=0.0).data == "right"
    assert row("a", "survived", "failed", wrong_elements=2.0).data == "4 wrong"


def test_page_has_a_line_for_every_row_and_escapes_what_programs_say(tmp_path):
    bad = ScoredRun(seed=1, run_dir="runs/x", outcome="failed", why="<script>alert(1)</script>")
    rows = (row("long", "survived", "survived"), ScoreRow(program="b", setting="s", fault="f", planned=1, runs=(bad,)))
    score = ScoreFile(faultbed="0", lab="soft", rows=rows, about={"rping": "x", "b": "y"}, decides={"rping": "z"})
    text = score_page.write(score, tmp_path).read_text()
    assert "<script>" not in text
    assert text.count('data-label="Survives"') == 2
    assert "2 runs survived, 1 failed, 0 unknown, of 3." in text
    assert (tmp_path / "scorecard.json").exists()
    assert score.is_known
    assert score_table.METRICS[0] in score_page.COLUMNS
