"""What make targets run on soft labs: every test runs on some lab that is large enough for it."""

from __future__ import annotations

import argparse
import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from house import HOUSE

from faultbed.harness.experiment.needs import parse_need, unmet
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.shipped import inventory_named

TARGETS = ("test", "smoke", "nightly", "soak")
FILES = sorted((HOUSE / "tests" / "soft").glob("test_*.py")) + sorted((HOUSE / "tests" / "common").glob("test_*.py"))


@functools.cache
def topology_of(lab: str) -> Topology:
    """The topology of a lab of ours."""
    return lab_inventory.load(inventory_named(lab)).topology


@dataclass(frozen=True, kw_only=True)
class LabTest:
    """A test, what it needs of a lab, and whether it is slow."""

    name: str
    needs: tuple[str, ...]
    slow: bool


@dataclass(frozen=True, kw_only=True)
class Selection:
    """One command of pytest: a lab, files and folders, words of test or file names, and whether slow tests are run."""

    lab: str
    paths: tuple[Path, ...]
    words: tuple[str, ...]
    slow: bool

    def runs(self, path: Path, test: LabTest) -> bool:
        """Whether it runs a test, and does not skip it because the lab is too small."""
        if not any(path.is_relative_to(given) for given in self.paths) or not any(
            word in f"{path.stem}::{test.name}" for word in self.words
        ):
            return False
        return self.slow >= test.slow and not unmet(tuple(map(parse_need, test.needs)), topology_of(self.lab))


def made(target: str, folder: Path, *, ends: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a make target with programs that print their arguments; `ends` is shell that sets their exit status."""
    for name in ("python", "faultbed"):
        (folder / name).write_text(
            f'#!/bin/sh\nall=" {name} $*"\nprintf "%s" {name}; printf "|%s" "$@"; echo\n{ends}\n'
        )
        (folder / name).chmod(0o755)
    argv = [
        "make",
        "--no-print-directory",
        "-o",
        "setup",
        "-o",
        "setup-tests",
        "-o",
        "setup-image",
        target,
        f"RUN={folder}/",
        "OUT=out",
    ]
    argv += [f"{name}={value}" for name, value in variables.items()]
    return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=HOUSE)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(0, 0, ""), (1, 2, "FAILED"), (2, 2, "INCONCLUSIVE, which is no pass"), (5, 2, "heal"), (3, 2, "an error")],
)
def test_demo_ends_with_a_sentence_instead_of_a_number(tmp_path, status, code, words):
    done = made("demo", tmp_path, ends=f'case "$all" in *" run "*) exit {status};; esac', ENDED=f"{tmp_path}/ended")
    assert done.returncode == code
    assert words in done.stderr
    assert not re.search(r"Error \d", done.stderr)


def test_demo_whose_lab_does_not_come_up_runs_nothing(tmp_path):
    done = made("demo", tmp_path, ends='case "$all" in *" up"*) exit 3;; esac', ENDED=f"{tmp_path}/ended")
    assert done.returncode == 2
    assert "run" not in done.stdout
    assert "an error" in done.stderr


def selections(lines: list[str]) -> Iterator[Selection]:
    """The commands of pytest among printed words."""
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--lab", default="soft")
    parser.add_argument("-m", dest="marks", default="not slow")
    parser.add_argument("-k", dest="word", default="")
    for line in lines:
        if line.startswith("python|-m|pytest|"):
            given, _ = parser.parse_known_args(line.split("|")[3:])
            words = tuple(given.word.split(" or "))
            assert not any(set(word) & set(" ()") for word in words), f"words and `or` only: {given.word}"
            paths = tuple(HOUSE / path for path in given.paths)
            yield Selection(lab=given.lab, paths=paths, words=words, slow=given.marks in ("", "slow"))


@functools.cache
def needs_in(path: Path) -> tuple[LabTest, ...]:
    """The tests of a file, with the marks of the file and their own."""
    return tuple(_needs_in(path))


def _needs_in(path: Path) -> Iterator[LabTest]:
    tree = ast.parse(path.read_text())
    marks = [
        one.value for one in tree.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "pytestmark"
    ]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            inner = [one for root in (*marks, *node.decorator_list) for one in ast.walk(root)]
            calls = [one for one in inner if isinstance(one, ast.Call) and ast.unparse(one.func) == "pytest.mark.needs"]
            slow = any(isinstance(one, ast.Attribute) and ast.unparse(one) == "pytest.mark.slow" for one in inner)
            yield LabTest(
                name=node.name, needs=tuple(ast.literal_eval(arg) for call in calls for arg in call.args), slow=slow
            )


def never_run(selected: list[Selection]) -> list[str]:
    """Tests that no selection runs."""
    return [
        f"{path.name}::{test.name} needs {', '.join(test.needs)}"
        for path in FILES
        for test in needs_in(path)
        if not any(one.runs(path, test) for one in selected)
    ]


def test_every_test_of_soft_labs_is_run_by_a_make_target_on_a_lab_that_is_large_enough(tmp_path):
    lines = [line for target in TARGETS for line in made(target, tmp_path).stdout.splitlines()]
    every = list(selections(lines))
    assert never_run(every) == []
    # Each row of the list is needed: without this lab, some test is never run.
    for lab in ("soft-3rack", "soft-tapered", "soft-zones"):
        assert any(one.lab == lab for one in every)
        assert never_run([one for one in every if one.lab != lab]), lab


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("exit 0", 0),
        ("case $all in *tests/unit*) exit 1;; esac", 2),
        ('case $all in *"--lab soft-3rack"*) exit 5;; esac', 2),  # 5: no test has that name
        ('case $all in *"--lab soft-zones"*) exit 1;; esac', 2),
        ("case $all in *tests/common*) exit 1;; esac", 2),
        ('case $all in " faultbed"*) exit 1;; esac', 2),
    ],
)
def test_nightly_runs_everything_even_if_a_test_failed(ends, code, tmp_path):
    """The history needs the experiment of every night, so a flaky test before it must not leave a gap."""
    done = made("nightly", tmp_path, ends=ends)
    assert [line.split("|")[0] for line in done.stdout.splitlines()] == [*["python"] * 5, "faultbed"]
    assert done.returncode == code


def test_nightly_keeps_the_results_of_each_lab(tmp_path):
    """CI names one result file in PYTEST_ADDOPTS, so each command would overwrite the results of the one before."""
    for one in made("nightly", tmp_path).stdout.splitlines():
        words = one.split("|")
        lab = words[words.index("--lab") + 1] if "--lab" in words else None
        kept = [word for word in words if word.startswith("--junitxml")]
        assert kept == ([f"--junitxml=out/junit-{lab}.xml"] if lab else []), shlex.join(words)


@pytest.mark.process
@pytest.mark.parametrize(("status", "code"), [(0, 0), (3, 1)])
def test_make_test_stops_if_the_tests_that_run_while_the_lab_comes_up_fail(status, code, tmp_path):
    (unit,) = (line for line in made("test", tmp_path).stdout.splitlines() if "tests/unit" in line)
    words = unit.split("|")
    assert " -m pytest tests/unit " in words[words.index("--meanwhile") + 1]
    own = ["-m", "pytest", "-p", "no:cacheprovider", "tests/unit/project/test_layering.py", "-k", "unique"]
    meanwhile = shlex.join([sys.executable, "-c", f"print('unit tests'); raise SystemExit({status})"])
    done = subprocess.run(
        [sys.executable, *own, "--meanwhile", meanwhile], capture_output=True, text=True, check=False, cwd=HOUSE
    )
    assert "unit tests" in done.stdout
    assert (done.returncode, " passed" in done.stdout) == (code, status == 0), done.stdout + done.stderr


@pytest.mark.process
def test_make_test_begins_with_the_lab_and_then_with_the_unit_tests(tmp_path):
    """The plugin leaves a lab that the first test needs to that test, which comes after minutes of unit tests here."""
    (tmp_path / "early.py").write_text(
        "from faultbed.harness.pytest_plugin import session_lab\n"
        "session_lab.prewarm = lambda _config: print('the lab')\n"
    )
    own = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "early", "-s", "tests/soft/test_lab.py", "-k", "loopback"]
    meanwhile = shlex.join([sys.executable, "-c", "print('unit tests'); raise SystemExit(3)"])
    done = subprocess.run(
        [sys.executable, "-u", *own, "--meanwhile", meanwhile], capture_output=True, text=True, check=False, cwd=HOUSE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    first, _, rest = done.stdout.partition("the lab\n")
    assert "unit tests" in rest, done.stdout + done.stderr
    assert "unit tests" not in first
