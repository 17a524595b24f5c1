"""The page for CI: what failed comes first, and nothing that did not run looks green."""

import json

import pytest
from click.testing import CliRunner

from harness.cli.main import cli
from harness.report.step_summary import Step, flaky, markdown, parse_step, read_junit, read_preflight, read_verdicts
from harness.verdict import Fired, Receipt, Verdict, VerdictFile, encode
from testbed.errors import UsageError

JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="tests.soft.test_lab" name="test_ok[round0]" time="1.5"/>
<testcase classname="tests.soft.test_lab" name="test_ok[round1]" time="1.0"><failure message="AssertionError: a | b&#10;more">long</failure></testcase>
<testcase classname="tests.soft.test_lab" name="test_setup" time="0"><error message="lab is dirty"/></testcase>
<testcase classname="tests.soft.test_gpu" name="test_gpu" time="0"><skipped type="pytest.skip" message="needs a real GPU"/></testcase>
<testcase classname="tests.soft.test_x" name="test_q" time="0"><skipped type="pytest.xfail" message="quarantine until 2026-12-01: slow clock"/></testcase>
</testsuite></testsuites>"""  # noqa: E501 (as pytest writes it)


def verdict(name="demo", word="PASS", state="CLEAN", fired=2):
    receipt = Receipt(
        id="f0", kind="link.flap", target="x", fidelity="real", armed={}, cleared={},
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


def test_junit_is_read(cases):
    assert [(case.outcome, case.quarantined) for case in cases] == [
        ("passed", False), ("failed", False), ("error", False), ("skipped", False), ("skipped", True),
    ]  # fmt: skip
    assert cases[1].said == "AssertionError: a | b"
    assert flaky(cases) == [("tests/soft/test_lab::test_ok", 1, 2)]


def test_the_page_names_what_somebody_has_to_look_at(cases):
    page = markdown("nightly", cases, [verdict(), verdict("storm", "INCONCLUSIVE", fired=0)], ["20261121T-killed-1"])
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
def test_only_what_ran_and_passed_and_left_the_lab_clean_is_green(verdicts, unfinished, mark):
    assert markdown("x", [], verdicts, unfinished).startswith(f"## {mark} x")


def test_skipped_alone_is_no_pass(cases):
    page = markdown("x", [case for case in cases if case.outcome == "skipped"], [])
    assert page.startswith("## ❌")
    assert "That is no pass" in page


def test_run_directories_are_read(tmp_path):
    for name in ("20261121T1-demo-7", "20261121T2-demo-8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "experiment.toml").touch()
    (tmp_path / "20261121T1-demo-7" / "verdict.json").write_bytes(encode(verdict()))
    verdicts, unfinished = read_verdicts(tmp_path)
    assert ([one.experiment for one in verdicts], unfinished) == (["demo"], ["20261121T2-demo-8"])
    (tmp_path / "20261121T2-demo-8" / "verdict.json").write_text(json.dumps({"schema": 2}))
    with pytest.raises(UsageError, match=r"verdict\.json: not as this version writes it"):
        read_verdicts(tmp_path)


def test_what_is_no_junit_is_told(tmp_path):
    (tmp_path / "x.xml").write_text("<testsuite")
    with pytest.raises(UsageError, match="not a JUnit file"):
        read_junit([tmp_path / "x.xml"])


def test_a_job_that_never_got_to_its_tests_has_a_page(tmp_path):
    """`up`, `reserve` or `preflight` failed: there is no JUnit file, and just then the page is needed."""
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
        "- mtu: host1:rxe0: 1500, right is 4200",
    ):
        assert words in page, words
    assert "reserve" not in page


@pytest.mark.parametrize(
    "left", [{"steps": [Step(name="x", outcome="cancelled")]}, {"missing": ["junit.xml"]}, {"preflight": ["mtu: x"]}]
)
def test_a_job_that_stopped_is_not_green_even_when_something_passed(left):
    assert markdown("x", [], [verdict()], steps=[Step(name="a", outcome="success")]).startswith("## ✅")
    assert markdown("x", [], [verdict()], **left).startswith("## ❌")


def test_a_file_that_is_none_of_ours_is_told(tmp_path):
    assert read_preflight(tmp_path / "none") == []
    (tmp_path / "p").write_text("{}")
    with pytest.raises(UsageError, match="preflight --out"):
        read_preflight(tmp_path / "p")
    with pytest.raises(UsageError, match="NAME=OUTCOME"):
        parse_step("failure")
