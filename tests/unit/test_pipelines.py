"""The pipelines of CI: every command in them exists, every level is a target, and a rack is never touched unasked."""

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml
from commands import parse

HOUSE = Path(__file__).resolve().parents[2]
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
            assert words[0] in ("test", "apt-get"), f"a command nobody checks: {line}"


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


def test_results_are_kept_also_of_a_failure():
    for path in (HOUSE / ".github" / "workflows").glob("*-lab.yml"):
        steps = yaml.safe_load(path.read_text())["jobs"]["lab"]["steps"]
        for word in ("upload-artifact", "summary --title"):
            step = next(step for step in steps if word in step.get("uses", "") + step.get("run", ""))
            assert step["if"] == "always()", (path, word)
