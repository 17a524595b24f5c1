"""Several runs of one experiment: how often each check held, with what certainty."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from finished_run import finished as written
from synthetic_run import synthetic_run

from harness.cli.main import cli
from harness.run import repeated
from harness.run.loop import Finished
from harness.verdict import Check, Verdict, VerdictFile

PASS, FAIL, ERROR = Verdict.PASS, Verdict.FAIL, Verdict.ERROR


def verdict(seed, *checks, said=PASS, lab_state="CLEAN"):
    made = tuple(Check(name=n, verdict=v, observed=o, bound=b, unit="s", rule="") for n, v, o, b in checks)
    return VerdictFile(experiment="x", seed=seed, lab="soft", verdict=said, checks=made, faults=(), lab_state=lab_state)


def test_shares_and_medians_have_their_intervals():
    runs = [verdict(n, ("recovery.total", PASS if n < 9 else FAIL, 1.0 + n / 10, 2.0)) for n in range(12)]
    (one,) = repeated.over(runs)
    assert (one.verdicts[PASS], one.verdicts[FAIL]) == (9, 3)
    assert 0.42 < one.passed.low < 0.43
    assert 0.94 < one.passed.high < 0.95
    assert one.median == pytest.approx(1.55)
    assert one.middle.low < 1.55 < one.middle.high


def test_a_run_that_lacks_a_check_did_not_pass_it():
    """It ended in an ERROR, before there was anything to check."""
    runs = [verdict(1, ("dip", PASS, 0.5, 1.0)), verdict(2, ("harness", ERROR, None, None), said=ERROR)]
    dip, harness = repeated.over(runs)
    assert (dip.name, dip.passed.method) == ("dip", "exact binomial, 1 of 2")
    assert (harness.values, harness.median, harness.middle) == ((), None, None)


def test_five_numbers_are_too_few_for_the_interval_of_a_median():
    (one,) = repeated.over([verdict(n, ("dip", PASS, float(n), None)) for n in range(5)])
    assert one.middle is None
    assert one.median == 2.0


@pytest.fixture
def executed(monkeypatch, tmp_path):
    """`faultbed run` without a lab: what it decides and in which order, and verdicts that are given to it."""
    seeds = []

    def execute(decided, inventory, *, out, progress, guard):
        seeds.append(decided.plan.seed)
        run = written(tmp_path / str(len(seeds)), synthetic_run())
        said = verdict(decided.plan.seed, ("dip", PASS, 0.1 * len(seeds), 1.0), **executed.more.get(len(seeds), {}))
        return Finished(run_dir=run, verdict=said, report=run.report)

    def executed():
        return seeds

    executed.more = {}
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("harness.run.loop.execute", execute)
    monkeypatch.setattr("testbed.softlab.lifecycle.up", lambda inventory, progress: "already up")
    return executed


DEMO = "tests/experiments/demo.toml"


def test_each_run_has_the_next_seed(executed):
    done = CliRunner().invoke(cli, ["run", DEMO, "--seed", "40", "--repeat", "3", "--json"], standalone_mode=False)
    assert executed() == [40, 41, 42]
    told = json.loads(done.stdout)
    assert [one["seed"] for one in told["runs"]] == [40, 41, 42]
    assert told["checks"][0]["passed"]["method"] == "exact binomial, 3 of 3"
    assert told["checks"][0]["median"] == pytest.approx(0.2)
    assert done.return_value == 0


def test_the_worst_run_is_the_exit_code_and_a_dirty_lab_ends_it(executed):
    executed.more = {1: {"said": FAIL}}
    assert CliRunner().invoke(cli, ["run", DEMO, "--repeat", "2"], standalone_mode=False).return_value == 1
    executed.more = {3: {"lab_state": "DIRTY"}}
    done = CliRunner().invoke(cli, ["run", DEMO, "--repeat", "5"], standalone_mode=False)
    assert len(executed()) == 3
    assert "ended after 1 of 5: the lab is DIRTY" in done.output
    assert done.return_value == 5
