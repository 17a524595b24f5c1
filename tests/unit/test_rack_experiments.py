"""Experiments of one lab: those of racks fit the example; on a lab without their names an experiment is skipped."""

from pathlib import Path

import pytest

from harness import experiment as experiment_module
from harness import run
from harness.fit import absent
from harness.step_summary import markdown, read_junit
from inject import safety
from testbed.inventory import load
from testbed.paths import cache_dir
from testbed.shipped import inventories

pytest_plugins = ["pytester"]

FOLDER = Path(__file__).resolve().parents[1] / "experiments"
RACK, SOFT = (load(inventories() / name) for name in ("rack-h100.example.yml", "soft.yml"))
CACHE = str(cache_dir())
OF_RACKS = sorted(FOLDER.glob("rack-*.toml"))


@pytest.mark.parametrize("path", OF_RACKS, ids=lambda path: path.stem)
def test_it_can_be_done_on_the_example_and_its_owner_allows_it(path):
    decided = run.decide(experiment_module.load(path), path.read_bytes(), RACK)
    assert decided.faults
    for fault in decided.faults:
        safety.check(fault, RACK)
    assert absent(decided.experiment, SOFT.topology)


def test_there_are_some_for_racks_and_the_demo_is_not_one():
    assert len(OF_RACKS) >= 2
    demo = experiment_module.load(FOLDER / "demo.toml")
    assert absent(demo, RACK.topology) == ("host3:rxe0",)
    assert absent(demo, SOFT.topology) == ()


@pytest.fixture
def of_the_demo(pytester, monkeypatch):
    """A session in a folder that has the demo experiment, with the example of a rack as its lab."""
    monkeypatch.setenv("FAULTBED_CACHE", CACHE)  # pytester's home is empty, and asking Ansible takes a while
    (pytester.path / "experiments").mkdir()
    (pytester.path / "experiments/demo.toml").write_text((FOLDER / "demo.toml").read_text())
    (pytester.path / "tests").mkdir()
    (pytester.path / "tests/quarantine.toml").write_text("")
    return lambda *argv: pytester.runpytest_inprocess("--rootdir=.", "-rs", "--lab", str(RACK.path), *argv)


def test_names_that_a_lab_does_not_have_are_a_skip_and_no_pass(of_the_demo, pytester):
    done = of_the_demo("--junitxml=junit.xml", "experiments")
    done.assert_outcomes(skipped=1)
    assert done.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    done.stdout.fnmatch_lines(
        ["*that is no pass*", "*rack-h100 has no host3:rxe0: it is an experiment of another lab*"]
    )
    page = markdown("x", read_junit([pytester.path / "junit.xml"]), [])
    assert page.startswith("## ❌")
    assert "has no host3:rxe0" in page


def test_beside_something_that_ran_a_skip_is_only_that(of_the_demo, pytester):
    pytester.makepyfile(test_own="def test_own(): ...\n")
    done = of_the_demo("experiments", "test_own.py")
    done.assert_outcomes(passed=1, skipped=1)
    assert done.ret == 0
