"""CI pipelines: their commands exist, their levels are make targets, and only the rack's own job touches a rack."""

import os
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
def test_pipeline_commands_all_exist(path):
    actual = list(lines(yaml.safe_load(path.read_text())))
    assert actual
    for line in actual:
        for words in commands(line):
            if words[0] == "make":
                for level in LEVELS if "$LEVEL" in words[1] else [""]:
                    assert words[1].replace("$LEVEL", level) in TARGETS, line
            elif words[0].endswith("faultbed"):
                parse([word.replace("${{ github.run_id }}", "1") for word in words[1:]])
            else:
                assert words[0] in ("test", "apt-get", "mkdir", "echo", "true", "sudo"), (
                    f"no test checks this command: {line}"
                )


def commands(line):
    """The commands of a line of shell, each in words."""
    words = shlex.split(line)
    while words:
        ends = next((at for at, word in enumerate(words) if word in ("||", "&&")), len(words))
        yield words[:ends]
        words = words[ends + 1 :]


def test_pipeline_actions_are_pinned_by_commit():
    """An attacker with access to the action's repository can move a tag, and the runner holds the keys of a rack."""
    for path in (HOUSE / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (.*)", path.read_text())
        assert used
        assert [one for one in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []
        checkouts = [
            step.get("with", {})
            for job in yaml.safe_load(path.read_text())["jobs"].values()
            for step in job["steps"]
            if step.get("uses", "").startswith("actions/checkout@")
        ]
        assert all(one.get("persist-credentials") is False for one in checkouts), path


def test_pipeline_level_is_one_of_the_known_levels():
    """The level becomes part of a command line, so nothing else may be injected there."""
    for name in ("rack-lab", "soft-lab"):
        request = yaml.safe_load((HOUSE / f".github/workflows/{name}.yml").read_text())[True]["workflow_dispatch"]
        assert (request["inputs"]["level"]["type"], request["inputs"]["level"]["options"]) == ("choice", list(LEVELS))
    gitlab = yaml.safe_load((HOUSE / ".gitlab-ci.yml").read_text())["variables"]["LEVEL"]
    assert gitlab["options"] == list(LEVELS)


def test_pipeline_inventory_of_the_rack_is_set_for_the_rack_job_only():
    """Variables of a GitLab project apply to every job and override those of the file: with FAULTBED_LAB in the
    project, the soft lab's job would work on the rack without a reservation.
    """
    gitlab = yaml.safe_load((HOUSE / ".gitlab-ci.yml").read_text())
    assert gitlab["rack-lab"]["variables"]["FAULTBED_LAB"] == "$RACK_LAB"
    assert "FAULTBED_LAB" not in str(gitlab["rack-lab"]["rules"])
    assert [name for name, job in gitlab.items() if "RACK_LAB" in str(job)] == ["rack-lab"]


@pytest.mark.parametrize("job", ["soft-lab", "rack-lab"])
@pytest.mark.parametrize("installed", [False, True])
def test_pipeline_gitlab_writes_its_page_after_any_failure(job, installed, tmp_path):
    """The lines that follow a job run in one shell (`set -eo pipefail`). Here no Makefile exists, so `make` fails."""
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts/step").write_text("make setup\n")
    if installed:
        binary = tmp_path / ".venv/bin/faultbed"
        binary.parent.mkdir(parents=True)
        binary.write_text('#!/bin/sh\n[ "$1" = summary ] && echo "$@" >artifacts/summary.md\n')
        binary.chmod(0o755)
    lines = yaml.safe_load((HOUSE / ".gitlab-ci.yml").read_text())[job]["after_script"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LEVEL": "nightly", "CI_JOB_STATUS": "failed"}
    subprocess.run(
        ["bash", "-c", "\n".join(["set -eo pipefail", *lines])],
        cwd=tmp_path, env={**environment, "FAULTBED_LAB": "/x/lab.yml"}, capture_output=True, check=True,
    )  # fmt: skip
    page = (tmp_path / "artifacts/summary.md").read_text()
    assert ("--step make setup=failed" if installed else "stopped at make setup") in page


def test_pipeline_keeps_runs_of_a_failed_night():
    """The plain cache action saves only after success (its action.yml: `post-if: "success()"`)."""
    steps = yaml.safe_load((HOUSE / ".github/workflows/soft-lab.yml").read_text())["jobs"]["lab"]["steps"]
    using = {step["uses"].partition("@")[0]: step for step in steps if step.get("with", {}).get("path") == "runs-kept"}
    assert set(using) == {"actions/cache/restore", "actions/cache/save"}
    assert using["actions/cache/save"]["if"] == "always() && steps.history.outcome == 'success'"
    (history,) = (step for step in steps if step.get("id") == "history")
    assert history["if"].startswith("always() && ")
    keys = {step["with"]["key"] for step in using.values()}
    assert len(keys) == 1
    assert "run_attempt" in keys.pop()  # a key is written once


@pytest.mark.parametrize("argv", [["frobnicate"], ["inject", "link.flap"], ["status", "--colour"], ["summary", "x"]])
def test_pipeline_check_rejects_an_invalid_command(argv):
    with pytest.raises(click.UsageError):
        parse(argv)


def test_pipeline_rack_is_reserved_checked_and_always_released():
    github = yaml.safe_load((HOUSE / ".github/workflows/rack-lab.yml").read_text())
    steps = github["jobs"]["lab"]["steps"]
    output = [step.get("run", "") for step in steps]
    order = [
        next(i for i, text in enumerate(output) if word in text)
        for word in ("reserve", "preflight", "rack-", "release")
    ]
    assert order == sorted(order)
    assert steps[order[-1]]["if"] == "always()"
    assert "pull_request" not in github[True]  # YAML 1.1 reads `on` as true
    gitlab = yaml.safe_load((HOUSE / ".gitlab-ci.yml").read_text())["rack-lab"]
    assert any("release" in line for line in gitlab["after_script"])
    assert "merge_request" not in str(gitlab["rules"])


def test_pipeline_runs_unit_tests_on_every_supported_python():
    """test_profiles.py compares digests of schedules, so a replay must not depend on the version of Python."""
    promised = ["3.11", "3.12", "3.13"]
    github = yaml.safe_load((HOUSE / ".github/workflows/soft-lab.yml").read_text())["jobs"]["unit"]
    assert github["strategy"]["matrix"]["python"] == promised
    assert github["steps"][1]["with"]["python-version"] == "${{ matrix.python }}"
    gitlab = yaml.safe_load((HOUSE / ".gitlab-ci.yml").read_text())["unit"]
    assert gitlab["parallel"]["matrix"] == [{"PYTHON_VERSION": promised}]
    assert "$PYTHON_VERSION" in gitlab["image"]
    assert f'requires-python = ">={promised[0]}"' in (HOUSE / "pyproject.toml").read_text()


def test_pipeline_keeps_results_of_a_failure():
    for path in (HOUSE / ".github" / "workflows").glob("*-lab.yml"):
        steps = yaml.safe_load(path.read_text())["jobs"]["lab"]["steps"]
        for word in ("upload-artifact", "summary --title"):
            step = next(step for step in steps if word in step.get("uses", "") + step.get("run", ""))
            assert step["if"].startswith("always()"), (path, word)


def summaries():
    """Return (file, command, commands before it in that job) for every summary page that a pipeline writes."""
    for path in FILES:
        for name, job in (yaml.safe_load(path.read_text()).get("jobs") or yaml.safe_load(path.read_text())).items():
            output = list(lines({name: job}))
            for line in output:
                if "faultbed summary" in line:
                    yield path, shlex.split(line), output[: output.index(line)]


def test_pipeline_page_lists_every_step_and_preflight_finding():
    """A job that fails before its tests leaves no JUnit file: then the page has only these."""
    actual = list(summaries())
    assert len(actual) == 4
    for path, words, before in actual:
        steps = [words[at + 1] for at, word in enumerate(words) if word == "--step"]
        assert steps, path
        assert words[words.index("--preflight") + 1] == "artifacts/preflight.json"
        text = "\n".join(before)
        assert "--out artifacts/preflight.json" in text or "OUT=artifacts" in text, path
        if path.name == "rack-lab.yml":
            assert [step.partition("=")[0] for step in steps] == ["inventory", "reserve", "preflight", "tests"]
        if path.name == ".gitlab-ci.yml":
            actuals = [line for line in before if line.startswith("echo ") and line.endswith(">artifacts/step")]
            work = [line for line in before if line.startswith(("apt", "make ", ".venv")) and "release" not in line]
            assert len(actuals) == len([line for line in work if "history" not in line]), path


def test_pipeline_steps_named_by_the_page_exist():
    for path in (HOUSE / ".github" / "workflows").glob("*-lab.yml"):
        steps = yaml.safe_load(path.read_text())["jobs"]["lab"]["steps"]
        known = {step["id"] for step in steps if "id" in step}
        named = set(re.findall(r"steps\.(\w+)\.outcome", path.read_text()))
        assert named == known, path


def test_pipeline_page_lists_regressions():
    for path, words, _ in summaries():
        kept = words[words.index("--history") + 1]
        assert kept == "runs-kept" or kept.startswith("$HOME/faultbed-history/"), path


def test_pipeline_nights_are_compared_with_earlier_ones():
    """Runs are kept where the next job finds them: a cache on hosted runners, the home of a self-hosted runner."""
    for path in FILES:
        text = path.read_text()
        if "lab" in path.name or path.name == ".gitlab-ci.yml":
            assert "make history RUNS=artifacts/runs" in text, path
            assert "runs-kept" in text or "$HOME/faultbed-history" in text, path


def test_pipeline_keeps_only_the_last_runs(tmp_path):
    """The make target's own commands run over folders named like runs."""
    for day in range(1, 6):
        (tmp_path / f"kept/2026110{day}T000000Z-demo-7").mkdir(parents=True)
    (tmp_path / "runs/20261106T000000Z-demo-7").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/faultbed").write_text("#!/bin/sh\necho $@\n")
    (tmp_path / "bin/faultbed").chmod(0o755)
    variables = {"RUN": f"{tmp_path}/bin/", "RUNS": tmp_path / "runs", "HISTORY": tmp_path / "kept", "KEPT": 3}
    # Under `make test` this make runs below another one, and would print the folders that it enters and leaves.
    make = ["make", "--no-print-directory", "-o", "setup", "history"]
    argv = [*make, *(f"{name}={value}" for name, value in variables.items())]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=HOUSE)
    assert done.stdout.splitlines()[-1] == f"history --runs {tmp_path}/kept"
    assert sorted(path.name[:8] for path in (tmp_path / "kept").iterdir()) == ["20261104", "20261105", "20261106"]
