"""The page for CI: failures come first, and nothing that did not run looks green."""

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from faultbed.harness.cli.main import cli
from faultbed.harness.report import history
from faultbed.harness.report.step_summary import (
    Case,
    JobResults,
    Step,
    flaky,
    markdown,
    parse_step,
    read_junit,
    read_preflight,
    read_verdicts,
)
from faultbed.harness.verdict import Verdict, VerdictFile, encode
from faultbed.inject.evidence.receipt import Armed, Cleared, Fired, Receipt
from faultbed.testbed.errors import UsageError

JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="tests.soft.test_lab" name="test_ok[round0]" time="1.5"/>
<testcase classname="tests.soft.test_lab" name="test_ok[round1]" time="1.0"><failure message="AssertionError: a | b&#10;more">long</failure></testcase>
<testcase classname="tests.soft.test_lab" name="test_setup" time="0"><error message="lab is dirty"/></testcase>
<testcase classname="tests.soft.test_gpu" name="test_gpu" time="0"><skipped type="pytest.skip" message="needs a real GPU"/></testcase>
<testcase classname="tests.soft.test_x" name="test_q" time="0"><properties><property name="quarantine" value="w"/></properties><skipped type="pytest.xfail" message="quarantine until 2026-12-01: slow clock"/></testcase>
</testsuite></testsuites>"""  # noqa: E501 (as pytest writes it)


def verdict(name="demo", word="PASS", state="CLEAN", fired=2):
    receipt = Receipt(
        id="f0", kind="link.flap", target="x", fidelity="real", armed=Armed(ok=False), cleared=Cleared(ok=False),
        fired=Fired(count=fired, first_ns=1, last_ns=2, witness="w", must_move={}, must_not_move={}),
    )  # fmt: skip
    return VerdictFile(
        experiment=name, seed=7, lab="soft", verdict=Verdict(word), checks=(), faults=(receipt,), lab_state=state
    )


@pytest.fixture
def cases(tmp_path):
    path = tmp_path / "junit.xml"
    path.write_text(JUNIT)
    return read_junit([path])


def test_step_summary_decodes_junit(cases):
    assert [(case.outcome, case.quarantined) for case in cases] == [
        ("passed", False), ("failed", False), ("error", False), ("skipped", False), ("skipped", True),
    ]  # fmt: skip
    assert cases[1].message == "AssertionError: a | b"
    assert flaky(cases) == [("tests/soft/test_lab::test_ok", 1, 2)]


def test_step_summary_lists_failures_flakes_and_quarantine(cases):
    page = markdown(
        "nightly",
        JobResults(
            cases=cases,
            verdicts=[verdict(), verdict("storm", "INCONCLUSIVE", fired=0)],
            unfinished=["20261121T-killed-1"],
        ),
    )
    assert page.startswith("## ❌ nightly\n")
    for words in (
        "1 passed, 1 failed, 1 error, 2 skipped, 1 of 2 experiments PASS",
        "| ✅ | demo | 7 | soft | 1 of 1 | PASS |",
        "| ⚠️ | storm | 7 | soft | 0 of 1 | INCONCLUSIVE |",
        "- `tests/soft/test_lab::test_ok[round1]`: AssertionError: a \\| b",
        "`tests/soft/test_lab::test_ok`: failed 1 of 2",
        "quarantine until 2026-12-01",
        "`20261121T-killed-1`",
    ):
        assert words in page, words


@pytest.mark.parametrize(
    ("verdicts", "unfinished", "mark"),
    [
        ([verdict()], [], "✅"),
        ([verdict(state="DIRTY")], [], "❌"),
        ([verdict(word="FAIL")], [], "❌"),
        ([verdict(word="INCONCLUSIVE")], [], "❌"),
        ([verdict()], ["killed"], "❌"),
        ([], [], "❌"),
    ],
)
def test_step_summary_is_green_only_if_all_ran_passed_and_the_lab_is_clean(verdicts, unfinished, mark):
    page = markdown("x", JobResults(verdicts=verdicts, unfinished=unfinished))
    assert page.startswith(f"## {mark} x")


def test_step_summary_of_skipped_tests_only_is_no_pass(cases):
    page = markdown("x", JobResults(cases=[case for case in cases if case.outcome == "skipped"]))
    assert page.startswith("## ❌")
    assert "That is no pass" in page


def test_step_summary_decodes_run_directories(tmp_path):
    for name in ("20261121T1-demo-7", "20261121T2-demo-8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "experiment.toml").touch()
    (tmp_path / "20261121T1-demo-7" / "verdict.json").write_bytes(encode(verdict()))
    (tmp_path / "latest").symlink_to("20261121T1-demo-7")  # counts once
    verdicts, unfinished, broken = read_verdicts(tmp_path)
    assert ([verdict.experiment for verdict in verdicts], unfinished, broken) == (["demo"], ["20261121T2-demo-8"], [])
    (tmp_path / "20261121T2-demo-8" / "verdict.json").write_text(json.dumps({"schema": 3}))
    verdicts, unfinished, (notes,) = read_verdicts(tmp_path)
    assert ([verdict.experiment for verdict in verdicts], unfinished) == (["demo"], [])
    assert "verdict.json: not as this version writes it" in notes


def test_step_summary_rejects_a_file_that_is_not_junit(tmp_path):
    (tmp_path / "x.xml").write_text("<testsuite")
    with pytest.raises(UsageError, match="not a JUnit file"):
        read_junit([tmp_path / "x.xml"])


def test_step_summary_with_a_junit_file_without_tests_is_not_green(tmp_path):
    """One suite passed; of the other one no test was collected, which is no pass."""
    (tmp_path / "a.xml").write_text(
        '<testsuites><testsuite><testcase classname="t" name="x"/></testsuite></testsuites>'
    )
    (tmp_path / "b.xml").write_text('<testsuites><testsuite name="pytest" tests="0"/></testsuites>')
    files = ["--junit", str(tmp_path / "a.xml"), "--junit", str(tmp_path / "b.xml")]
    assert CliRunner().invoke(cli, ["summary", *files[:2]]).output.startswith("## \u2705")
    page = CliRunner().invoke(cli, ["summary", *files]).output
    assert page.startswith("## \u274c")
    assert "no test is in it" in page


def test_step_summary_exists_for_a_job_that_failed_before_its_tests(tmp_path):
    """If `up`, `reserve` or `preflight` failed there is no JUnit file, and then the page is needed most."""
    left = tmp_path / "artifacts/preflight.json"
    left.parent.mkdir()
    wrong = {"check": "mtu", "where": "host1:rxe0", "found": "1500", "wanted": "4200", "do": "x", "nodes": ["host1"]}
    left.write_text(json.dumps({"lab": "soft", "checked": ["mtu"], "wrong": [wrong], "burnin": None, "bad_nodes": []}))
    argv = ["summary", "--junit", str(tmp_path / "junit.xml"), "--runs", str(tmp_path / "runs")]
    argv += ["--step", "reserve=success", "--step", "preflight=failure", "--step", "tests=skipped"]
    argv += ["--preflight", str(left), "--to", str(tmp_path / "new/page.md")]
    done = CliRunner().invoke(cli, argv)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "new/page.md").read_text()
    assert page.startswith("## ❌ faultbed")
    for words in (
        "No test and no experiment ran",
        "**Stopped at preflight**: failure.",
        "junit.xml` was not written",
        "- mtu: host1:rxe0: 1500, expected 4200",
    ):
        assert words in page, words
    assert "reserve" not in page


@pytest.mark.parametrize(
    "left", [{"steps": [Step(name="x", outcome="cancelled")]}, {"missing": ["junit.xml"]}, {"preflight": ["mtu: x"]}]
)
def test_step_summary_of_a_stopped_job_is_not_green_even_if_tests_passed(left):
    ended = {"steps": [Step(name="a", outcome="success")]}
    assert markdown("x", JobResults(verdicts=[verdict()], **ended)).startswith("## ✅")
    assert markdown("x", JobResults(verdicts=[verdict()], **left)).startswith("## ❌")


def test_step_summary_rejects_foreign_files(tmp_path):
    assert read_preflight(tmp_path / "none") == []
    (tmp_path / "p").write_text("{}")
    with pytest.raises(UsageError, match="preflight --out"):
        read_preflight(tmp_path / "p")
    with pytest.raises(UsageError, match="NAME=OUTCOME"):
        parse_step("failure")


def case(name, outcome="failed", message="", **fields):
    return Case(name=name, outcome=outcome, message=message, seconds=1.0, **fields)


def invoked(*argv):
    done = CliRunner().invoke(cli, ["summary", *map(str, argv)])
    assert done.exit_code == 0, done.output
    return done.output


def test_step_summary_lists_truncated_files(tmp_path):
    """If pytest was killed while writing its file, or a run while writing its verdict, there used to be no page."""
    for name in ("junit.xml", "preflight.json", "runs/a/experiment.toml", "runs/a/verdict.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{")
    (tmp_path / "runs/b").mkdir()
    (tmp_path / "runs/b/experiment.toml").touch()
    (tmp_path / "runs/b/verdict.json").write_bytes(encode(verdict()))
    page = invoked(
        "--junit", tmp_path / "junit.xml", "--preflight", tmp_path / "preflight.json", "--runs", tmp_path / "runs"
    )
    assert page.startswith("## ❌")
    assert "| ✅ | demo |" in page
    reported = page.partition("### Files that cannot be read")[2]
    assert all(name in reported for name in ("junit.xml", "preflight.json", "verdict.json"))


def test_step_summary_counts_a_run_of_which_only_the_verdict_was_kept(tmp_path):
    """CI had kept verdict.json and the report alone: the runs vanished from the page, which was green."""
    (tmp_path / "a.xml").write_text('<testsuite><testcase classname="t" name="x"/></testsuite>')
    for name, word in (("runs/one/verdict.json", "FAIL"), ("runs/two/verdict.json", "PASS")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(encode(verdict(word=word)))
    page = invoked("--junit", tmp_path / "a.xml", "--runs", tmp_path / "runs")
    assert page.startswith("## ❌")
    assert "1 of 2 experiments PASS" in page


@pytest.mark.parametrize(("name", "words"), [("pooled.json", "INCONCLUSIVE"), ("sweep.json", "PASS, lab DIRTY")])
def test_step_summary_lists_pools_and_sweeps_that_are_no_pass(tmp_path, name, words):
    """Three runs that each passed may be undecided together, and the runs of a sweep are in its own folder."""
    for folder in ("run", "joint"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run/verdict.json").write_bytes(encode(verdict()))
    state = "DIRTY" if "DIRTY" in words else "CLEAN"
    together = {"schema": 1, "experiment": "demo", "verdict": words.partition(",")[0], "lab_state": state}
    (tmp_path / "joint" / name).write_text(json.dumps(together))
    page = invoked("--runs", tmp_path)
    assert page.startswith("## ❌")
    assert f"### Pools and sweeps that are no PASS\n\n- `joint`: {words}\n" in page
    (tmp_path / "joint" / name).write_text(json.dumps({**together, "verdict": "PASS", "lab_state": "CLEAN"}))
    assert invoked("--runs", tmp_path).startswith("## ✅")
    (tmp_path / "joint" / name).write_text("{")
    assert f"{name}: not as faultbed writes it" in invoked("--runs", tmp_path)


@pytest.mark.parametrize("folder", ["campaign", "fuzz", "a/b"])
@pytest.mark.parametrize("word", ["FAIL", "INCONCLUSIVE", "ERROR"])
def test_step_summary_counts_runs_in_nested_folders(tmp_path, folder, word):
    """`campaign` and `fuzz` keep their runs in folders of their own: a FAIL there was below a green headline."""
    for name, outcome in (("good", "PASS"), (f"{folder}/bad", word)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "verdict.json").write_bytes(encode(verdict(name, outcome)))
    page = invoked("--runs", tmp_path)
    assert page.startswith("## ❌")
    assert "1 of 2 experiments PASS" in page


def test_step_summary_names_a_nested_run_without_a_verdict(tmp_path):
    (tmp_path / "good").mkdir()
    (tmp_path / "good/verdict.json").write_bytes(encode(verdict()))
    (tmp_path / "fuzz/found-1").mkdir(parents=True)
    (tmp_path / "fuzz/found-1/experiment.toml").touch()
    page = invoked("--runs", tmp_path)
    assert page.startswith("## ❌")
    assert "- `fuzz/found-1`" in page


def test_step_summary_takes_a_sweep_as_its_own_verdict_says(tmp_path):
    """A run of a sweep that was an ERROR has been repeated; its verdict is in sweep.json, and the link counts once."""
    for name, word in (("error", "ERROR"), ("again", "PASS")):
        (tmp_path / "sweep-x/runs" / name).mkdir(parents=True)
        (tmp_path / "sweep-x/runs" / name / "verdict.json").write_bytes(encode(verdict(name, word)))
    (tmp_path / "latest").symlink_to("sweep-x")
    assert invoked("--runs", tmp_path).startswith("## ❌")  # the sweep has not ended
    together = {"schema": 1, "experiment": "demo", "verdict": "PASS", "lab_state": "CLEAN"}
    (tmp_path / "sweep-x/sweep.json").write_text(json.dumps(together))
    assert invoked("--runs", tmp_path).startswith("## ✅")
    (tmp_path / "sweep-x/sweep.json").write_text(json.dumps({**together, "verdict": "INCONCLUSIVE"}))
    assert invoked("--runs", tmp_path).startswith("## ❌")


def test_find_run_folders_reports_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    """What cannot be read may contain a FAIL."""
    (tmp_path / "shut").mkdir()
    scandir = os.scandir

    def refusing(path):
        if Path(path).name == "shut":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    verdicts, _, broken = read_verdicts(tmp_path)
    assert (verdicts, broken) == ([], [f"{tmp_path}/shut: Permission denied"])


def test_step_summary_escapes_markdown():
    """GitHub's rules: an escaped backslash before a pipe leaves the pipe active, and a code span has no escapes."""
    nasty = "a\\|b <img src=x> `c` ~~d~~ $e$ &lt; [f](g)"
    page = markdown(nasty, JobResults(cases=[case("t::x[`|`` <b>]", message=nasty)], verdicts=[verdict(nasty)]))
    (row,) = [line for line in page.splitlines() if "2 of" not in line and line.startswith("| ✅")]
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 7
    assert "a\\\\\\|b \\<img src=x\\> \\`c\\` \\~\\~d" in row
    assert "\\$e\\$ \\&lt;" in row
    assert "- ``` t::x[`|`` <b>] ```: a" in page


def test_step_summary_never_exceeds_githubs_limit():
    long = "x" * 5000
    states = [("failed", False), ("skipped", True), ("passed", True)]
    cases = [case(f"t::{long}{n}.toml::", outcome, long, quarantined=q) for n in range(500) for outcome, q in states]
    runs = [verdict(long), *(verdict(long, "FAIL", "DIRTY") for _ in range(500))]
    lists = {name: [long] * 500 for name in ("missing", "preflight", "broken", "worse")}
    steps = [Step(name=long, outcome=long)] * 20
    page = markdown(long, JobResults(cases=cases, verdicts=runs, unfinished=[long] * 500, steps=steps, **lists))
    assert len(page.encode()) < 2**20
    assert page.count("| FAIL, lab DIRTY |") == 200
    assert "… and 301 more" in page
    assert "- … and 470 more" in page


def test_step_summary_lists_passing_tests_in_quarantine(tmp_path):
    """JUnit shows such a test as passed, so an entry that could be removed was not noticed."""
    (tmp_path / "j.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="b" time="1">'
        '<properties><property name="quarantine" value="w"/></properties></testcase></testsuite></testsuites>'
    )
    page = invoked("--junit", tmp_path / "j.xml")
    assert page.startswith("## ✅")
    assert page.endswith("### In quarantine, and passed: is it fixed?\n\n- `a::b`\n")


def test_step_summary_names_an_experiment_by_its_file(tmp_path):
    (tmp_path / "j.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.experiments.demo.toml" name="demo" time="0">'
        '<skipped type="pytest.skip" message="needs racks"/></testcase>'
        '<testcase classname="tests.soft.test_experiments" name="test_x" time="0"><skipped message="m"/></testcase>'
        "</testsuite></testsuites>"
    )
    page = invoked("--junit", tmp_path / "j.xml")
    assert page.endswith("they show nothing\n\n- `tests/experiments/demo.toml::demo`: needs racks\n")


def test_step_summary_lists_regressions_of_this_run(tmp_path, monkeypatch):
    """The history exists for this; its marks used to be at the end of a long log."""
    actual = [history.Regression(run=name, metric="dip", words="0.5, was 0.1") for name in ("tonight", "last-week")]
    monkeypatch.setattr(history, "regressions", lambda past: tuple(actual))
    (tmp_path / "runs" / "tonight").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    page = invoked("--runs", tmp_path / "runs", "--history", tmp_path / "kept")
    assert page.endswith("### Regressions against earlier runs\n\n- tonight: dip 0.5, was 0.1\n")
    assert "Worse" not in invoked("--runs", tmp_path / "runs", "--history", tmp_path / "none")
