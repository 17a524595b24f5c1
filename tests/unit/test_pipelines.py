"""The pipelines of CI: every command in them exists, every level is a target, and a rack is never touched unasked."""

import re
import shlex
import subprocess

import click
import pytest
import yaml
from commands import parse
from house import HOUSE

FILES = [*sorted((HOUSE / ".github" / "workflows").glob("*.yml")), HOUSE / ".gitlab-ci.yml"]
LEVELS = ("smoke", "nightly", "soak")
TARGETS = set(re.findall(r"^([a-z-]+):", (HOUSE / "Makefile").read_text(), re.MULTILINE))


def lines(value):
    """Every shell line of a pipeline."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("run", "script", "before_script", "after_script"):
                texts = [inner] if isinstance(inner, str) else inner
                yield from (line for text in texts for line in text.splitlines() if line.strip())
            else:
                yield from lines(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from lines(inner)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_command_exists(path):
    found = list(lines(yaml.safe_load(path.read_text())))
    assert found
    for line in found:
        words = shlex.split(line)
        if words[0] == "make":
            for level in LEVELS if "$LEVEL" in words[1] else [""]:
                assert words[1].replace("$LEVEL", level) in TARGETS, line
        elif words[0].endswith("faultbed"):
            parse([word.replace("${{ github.run_id }}", "1") for word in words[1:]])
        else:
            assert words[0] in ("test", "apt-get", "mkdir", "echo"), f"a command nobody checks: {line}"


@pytest.mark.parametrize("argv", [["frobnicate"], ["inject", "link.flap"], ["status", "--colour"], ["summary", "x"]])
def test_the_check_sees_a_command_that_would_be_refused(argv):
    with pytest.raises(click.UsageError):
        parse(argv)


def test_a_rack_is_reserved_checked_and_released_in_any_case():
    github = yaml.safe_load((HOUSE / ".github/workflows/rack-lab.yml").read_text())
    steps = github["jobs"]["lab"]["steps"]
    said = [step.get("run", "") for step in steps]
    order = [
        next(i for i, text in enumerate(said) if word in text) for word in ("reserve", "preflight", "rack-", "release")
    ]
    assert order == sorted(order)
    assert steps[order[-1]]["if"] == "always()"
    assert "pull_request" not in github[True]  # YAML 1.1 reads `on` as true
    gitlab = yaml.safe_load((HOUSE / ".gitlab-ci.yml").read_text())["rack-lab"]
    assert any("release" in line for line in gitlab["after_script"])
    assert "merge_request" not in str(gitlab["rules"])


def test_unit_tests_run_on_every_python_that_is_promised():
    """Digests of schedules are the same on all of them (test_profiles.py): a replay does not depend on whose it is."""
    promised = ["3.11", "3.12", "3.13"]
    github = yaml.safe_load((HOUSE / ".github/workflows/soft-lab.yml").read_text())["jobs"]["unit"]
    assert github["strategy"]["matrix"]["python"] == promised
    assert github["steps"][1]["with"]["python-version"] == "${{ matrix.python }}"
    gitlab = yaml.safe_load((HOUSE / ".gitlab-ci.yml").read_text())["unit"]
    assert gitlab["parallel"]["matrix"] == [{"PYTHON_VERSION": promised}]
    assert "$PYTHON_VERSION" in gitlab["image"]
    assert f'requires-python = ">={promised[0]}"' in (HOUSE / "pyproject.toml").read_text()


def test_results_are_kept_also_of_a_failure():
    for path in (HOUSE / ".github" / "workflows").glob("*-lab.yml"):
        steps = yaml.safe_load(path.read_text())["jobs"]["lab"]["steps"]
        for word in ("upload-artifact", "summary --title"):
            step = next(step for step in steps if word in step.get("uses", "") + step.get("run", ""))
            assert step["if"].startswith("always()"), (path, word)


def summaries():
    """(file, the command, what ran before it in that job) of every page that is written."""
    for path in FILES:
        for name, job in (yaml.safe_load(path.read_text()).get("jobs") or yaml.safe_load(path.read_text())).items():
            said = list(lines({name: job}))
            for line in said:
                if "faultbed summary" in line:
                    yield path, shlex.split(line), said[: said.index(line)]


def test_a_page_is_told_of_every_step_and_of_what_preflight_found():
    """A job that fails before its tests leaves no JUnit file: then these are all that the page has."""
    found = list(summaries())
    assert len(found) == 4
    for path, words, before in found:
        steps = [words[at + 1] for at, word in enumerate(words) if word == "--step"]
        assert steps, path
        assert words[words.index("--preflight") + 1] == "artifacts/preflight.json"
        text = "\n".join(before)
        assert "--out artifacts/preflight.json" in text or "OUT=artifacts" in text, path
        if path.name == "rack-lab.yml":
            assert [step.partition("=")[0] for step in steps] == ["inventory", "reserve", "preflight", "tests"]
        if path.name == ".gitlab-ci.yml":
            told = [line for line in before if line.startswith("echo ") and line.endswith(">artifacts/step")]
            work = [line for line in before if line.startswith(("make ", ".venv")) and "release" not in line]
            assert len(told) == len([line for line in work if "history" not in line]), path


def test_steps_that_a_page_names_are_there():
    for path in (HOUSE / ".github" / "workflows").glob("*-lab.yml"):
        steps = yaml.safe_load(path.read_text())["jobs"]["lab"]["steps"]
        known = {step["id"] for step in steps if "id" in step}
        named = set(re.findall(r"steps\.(\w+)\.outcome", path.read_text()))
        assert named == known, path


def test_nights_are_compared_with_earlier_ones():
    """Runs are kept where the next job finds them: a cache of hosted runners, the home of a runner of one's own."""
    for path in FILES:
        text = path.read_text()
        if "lab" in path.name or path.name == ".gitlab-ci.yml":
            assert "make history RUNS=artifacts/runs" in text, path
            assert "runs-kept" in text or "$HOME/faultbed-history" in text, path


def test_kept_runs_are_the_last_ones(tmp_path):
    """The target's own commands, over folders named as runs are."""
    for day in range(1, 6):
        (tmp_path / f"kept/2026110{day}T000000Z-demo-7").mkdir(parents=True)
    (tmp_path / "runs/20261106T000000Z-demo-7").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/faultbed").write_text("#!/bin/sh\necho $@\n")
    (tmp_path / "bin/faultbed").chmod(0o755)
    variables = {"RUN": f"{tmp_path}/bin/", "RUNS": tmp_path / "runs", "HISTORY": tmp_path / "kept", "KEPT": 3}
    # `make test` runs this, too: a make beneath another one tells of the folders that it enters and leaves.
    make = ["make", "--no-print-directory", "-o", "setup", "history"]
    argv = [*make, *(f"{name}={value}" for name, value in variables.items())]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=HOUSE)
    assert done.stdout.splitlines()[-1] == f"history --runs {tmp_path}/kept"
    assert sorted(path.name[:8] for path in (tmp_path / "kept").iterdir()) == ["20261104", "20261105", "20261106"]
