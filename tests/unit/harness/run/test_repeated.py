"""Several runs of one experiment: how often each check passed, with its interval."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from finished_run import finished as written
from house import DEMO
from synthetic_run import synthetic_run
from verdict_files import ERROR, FAIL, PASS, verdict

from faultbed.harness.cli.experiments.runs import _ends
from faultbed.harness.cli.main import cli
from faultbed.harness.run.loop import Finished
from faultbed.harness.run.repeats import repeated
from faultbed.harness.run.repeats.pooled import decode
from faultbed.harness.verdict import Verdict

INCONCLUSIVE = Verdict.INCONCLUSIVE


def test_shares_and_medians_have_their_intervals():
    runs = [verdict(n, ("recovery.total", PASS if n < 9 else FAIL, 1.0 + n / 10, 2.0)) for n in range(12)]
    (one,) = repeated.repeated_checks(runs)
    assert (one.verdicts[PASS], one.verdicts[FAIL]) == (9, 3)
    assert 0.42 < one.passed.low < 0.43
    assert 0.94 < one.passed.high < 0.95
    assert one.median == pytest.approx(1.55)
    assert one.middle.low < 1.55 < one.middle.high


def test_repeated_run_without_a_check_did_not_pass_it():
    """The run ended in an ERROR before anything was checked."""
    runs = [verdict(1, ("dip", PASS, 0.5, 1.0)), verdict(2, ("harness", ERROR, None, None), said=ERROR)]
    dip, harness = repeated.repeated_checks(runs)
    assert (dip.name, dip.passed.method) == ("dip", "exact binomial, 1 of 2")
    assert (harness.values, harness.median, harness.middle) == ((), None, None)


def test_check_whose_bound_differs_from_run_to_run_is_one_check():
    """Each run is judged by its own bound. Every bound was a check of its own, which 1 of 4 runs had passed."""
    runs = [verdict(n, ("emulation", PASS if n else FAIL, 10.0, 9.0 + n)) for n in range(4)]
    (one,) = repeated.repeated_checks(runs)
    assert (one.passed.method, one.bounds) == ("exact binomial, 3 of 4", (9.0, 10.0, 11.0, 12.0))
    assert _ends(one.bounds, "s") == ["9 s", "12 s"]


def test_two_bounds_of_one_metric_stay_two_checks():
    runs = [verdict(n, ("dip", PASS, 0.5, 0.2), ("dip", FAIL, 0.5, 0.4), ("loss", PASS, 0, None)) for n in range(3)]
    first, second, third = repeated.repeated_checks(runs)
    assert [(one.bounds, one.verdicts[PASS]) for one in (first, second, third)] == [
        ((0.2,), 3),
        ((0.4,), 0),
        ((None,), 3),
    ]
    assert (_ends(second.bounds, ""), _ends(third.bounds, ""), _ends(("CLEAN",), "")) == (["0.4"], [], ["CLEAN"])


def test_five_numbers_are_too_few_for_the_interval_of_a_median():
    (one,) = repeated.repeated_checks([verdict(n, ("dip", PASS, float(n), None)) for n in range(5)])
    assert one.middle is None
    assert one.median == 2.0


@pytest.fixture
def executed(monkeypatch, tmp_path):
    """`faultbed run` without a lab: records its decisions in order, and gives runs prepared verdicts."""
    seeds = []

    def execute(decided, inventory, *, out, progress, guard, control=False):
        seeds.append(decided.plan.seed)
        run = written(tmp_path / str(len(seeds)), synthetic_run())
        output = verdict(decided.plan.seed, ("dip", PASS, 0.1 * len(seeds), 1.0), **executed.more.get(len(seeds), {}))
        return Finished(run_dir=run, verdict=output, report=run.report)

    def executed():
        return seeds

    executed.more = {}
    # A bound that several runs decide: the demo has none, because one run has to decide it.
    paired = tmp_path / "paired.toml"
    paired.write_text(f'{DEMO.read_text()}\n[[expect]]\nmetric = "jct_ratio"\nmax = 3.0\n')
    executed.paired = str(paired)
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("faultbed.harness.run.loop.execute", execute)
    monkeypatch.setattr("faultbed.testbed.backends.soft.lifecycle.up", lambda inventory, progress: "already up")
    return executed


def test_repeat_uses_the_next_seed_for_each_run(executed):
    done = CliRunner().invoke(
        cli, ["run", executed.paired, "--seed", "40", "--repeat", "3", "--json"], standalone_mode=False
    )
    assert executed() == [40, 41, 42]
    output = json.loads(done.stdout)
    assert [run["seed"] for run in output["runs"]] == [40, 41, 42]
    assert output["checks"][0]["passed"]["method"] == "exact binomial, 3 of 3"
    assert output["checks"][0]["median"] == pytest.approx(0.2)
    assert done.return_value == 2, "three runs do not decide what is noisy"


def test_repeated_run_has_one_pooled_verdict_next_to_the_runs(executed):
    done = CliRunner().invoke(cli, ["run", executed.paired, "--repeat", "8", "--json"], standalone_mode=False)
    assert done.return_value == 0
    pool = json.loads(done.stdout)["pooled"]
    assert Path(pool["file"]).parent.name == f"{Path(pool['runs'][0]['run_dir']).name}-pooled"
    written = decode(Path(pool["file"]).read_bytes())
    assert (written.verdict, len(written.runs)) == (PASS, 8)
    assert {check.name for check in written.checks} >= {"pooled_runs", "dip", "jct_ratio"}
    text = CliRunner().invoke(cli, ["run", executed.paired, "--repeat", "3"], standalone_mode=False).output
    assert "all runs together" in text
    assert "3 runs together" in text


def test_too_few_repeated_runs_are_inconclusive_together_although_each_passes(executed):
    done = CliRunner().invoke(cli, ["run", executed.paired, "--repeat", "7", "--json"], standalone_mode=False)
    written = decode(Path(json.loads(done.stdout)["pooled"]["file"]).read_bytes())
    assert {run.verdict for run in written.runs} == {PASS}
    assert (written.verdict, done.return_value) == (INCONCLUSIVE, 2)
    (open_check,) = (check for check in written.checks if check.verdict is INCONCLUSIVE)
    assert (open_check.name, open_check.why) == ("jct_ratio", "too-few-runs")


def test_repeat_exit_code_is_the_pool_and_a_dirty_lab_ends_it(executed):
    executed.more = {1: {"said": FAIL}}
    done = CliRunner().invoke(cli, ["run", executed.paired, "--repeat", "2"], standalone_mode=False)
    assert done.return_value == 2, "two runs are too few to pool what is noisy"
    executed.more = {3: {"lab_state": "DIRTY"}}
    done = CliRunner().invoke(cli, ["run", executed.paired, "--repeat", "5"], standalone_mode=False)
    assert len(executed()) == 3
    assert "ended after 1 of 5: the lab is DIRTY" in done.output
    assert done.return_value == 5


def test_run_until_decided_ends_when_the_pooled_runs_decide(executed):
    """All runs have equal values, so the first look decides: after the ninth of at most twelve runs."""
    done = CliRunner().invoke(cli, ["run", executed.paired, "--seed", "7", "--until-decided"], standalone_mode=False)
    assert executed() == [*range(7, 16)]
    assert done.return_value == 0
    assert "after 8 runs: INCONCLUSIVE" in done.output
    assert "after 9 runs: PASS" in done.output


def test_run_until_decided_ends_at_most(executed, monkeypatch):
    monkeypatch.setattr("faultbed.harness.run.repeats.pooled.is_open", lambda pool: True)
    done = CliRunner().invoke(cli, ["run", executed.paired, "--until-decided", "--most", "10"], standalone_mode=False)
    assert (len(executed()), done.return_value) == (10, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--until-decided", "--repeat", "3"], "give one of them"),
        (["--most", "9"], "--most needs --until-decided"),
        (["--until-decided", "--most", "7"], "8<=x<=100"),
    ],
)
def test_options_of_repeated_runs_that_contradict_each_other_are_refused(executed, words, message):
    done = CliRunner().invoke(cli, ["run", executed.paired, *words], standalone_mode=False)
    assert message in str(done.exception)
    assert executed() == []


def test_run_until_decided_without_a_noisy_check_is_refused(executed, tmp_path):
    text = 'name = "x"\n[workload]\ncollective = "all-reduce"\nsize = "1MiB"\niterations = 3\n'
    (tmp_path / "x.toml").write_text(text + '[[expect]]\nmetric = "wrong_elements"\nmax = 0\n')
    done = CliRunner().invoke(cli, ["run", str(tmp_path / "x.toml"), "--until-decided"], standalone_mode=False)
    assert "expects nothing that several runs decide together" in str(done.exception)
