"""Every command on the pages of the documentation can be parsed, and every file that a page names exists."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter

import pytest
from commands import parse
from documented import LONG, NO_LAB, NOT_RUN, ON_LAB, ON_LAB_READING, TABLES, TOGETHER
from house import HOUSE, TRACES
from pages import NAMED, PAGES, blocks, commands

from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.run.loop import resolve
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventories

TARGETS = set(re.findall(r"^([a-z-]+):", (HOUSE / "Makefile").read_text(), re.MULTILINE))
LAB_TESTS = HOUSE / "tests" / "soft" / "test_docs.py"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_documented_commands_can_be_parsed(path, monkeypatch):
    monkeypatch.chdir(HOUSE)
    for command in commands(path):
        words = [NAMED.get(word, word) for word in shlex.split(command)]
        if words[0] == "make":
            assert set(words[1:]) <= TARGETS, words
        elif words[0] == "faultbed":
            parse(words[1:])
        else:
            named = [word for word in words[3:] if word.startswith("tests/")]
            assert named
            assert all((HOUSE / word).exists() for word in named), words


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_documented_files_exist(path):
    text = path.read_text()
    named = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert all((path.parent / name).exists() for name in named), named
    for name in re.findall(r"`((?:testbed|inject|traffic|harness|tests|inventory|playbooks|docs)/[\w./-]+)`", text):
        assert (HOUSE / name).exists(), name


def test_documented_commands_are_run_or_have_a_reason():
    """Each command is in exactly one table, and each table has only commands that a page shows."""
    tabled = Counter(text for table in TABLES for text in table)
    assert [text for text, count in tabled.items() if count > 1] == []
    shown = {command for path in PAGES for command in commands(path)}
    assert shown - set(tabled) == set(), "tests/soft/documented.py says where each command is run"
    assert set(tabled) - shown == set(), "tests/soft/documented.py has a command that no page shows"


def test_documented_commands_with_an_unusual_result_have_a_reason():
    assert all(NOT_RUN.values())
    for table in (NO_LAB, ON_LAB_READING, ON_LAB, LONG):
        for text, expected in table.items():
            assert bool(expected.why) is (expected.codes != (0,) or bool(expected.more)), text


def test_documented_command_sequences_have_a_test():
    assert set(TOGETHER.values()) <= set(re.findall(r"^def (\w+)", LAB_TESTS.read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("```sh\nfaultbed up  # now\n```\n", ["faultbed up"]),
        (
            "```toml\na = 1\n```\nNot `faultbed` but `faultbed\nheal`.\n  ```sh\n  faultbed down\n  ```\n",
            ["faultbed down", "faultbed heal"],
        ),
        ("```python\nfaultbed = 1\n```\n`faultbed --lab soft-mini up`", ["faultbed --lab soft-mini up"]),
    ],
)
def test_commands_are_found_only_in_shell_and_text_blocks(page, expected, tmp_path):
    """A block in another language used to hide all blocks after it."""
    path = tmp_path / "page.md"
    path.write_text(page)
    assert list(commands(path)) == expected


REQUIRED_SECTIONS = {
    "[workload]": '[workload]\ncollective = "all-reduce"\nsize = "1MiB"\niterations = 9\ncompute_units = 8\n',
    "[[faults]]": '[[faults]]\nkind = "link.flap"\ntarget = "rtsw1:ctsw1"\nat = "5s"\nfor = "10s"\n',
}


def experiments():
    """Yield each part of an experiment on a page, completed with the sections that every experiment needs."""
    for path in PAGES:
        for number, part in enumerate(blocks(path, "toml")):
            rest = [text for name, text in REQUIRED_SECTIONS.items() if name not in part]
            top = [] if "\nseed = " in part else ['name = "x"\nseed = 1']
            yield pytest.param("\n".join([*top, part, *rest]), id=f"{path.stem}-{number}")


EXPERIMENTS = list(experiments())


@pytest.mark.parametrize("text", EXPERIMENTS)
def test_documented_experiment_parts_are_accepted(text, tmp_path):
    """Each part is decoded and planned on the default soft lab, and no section of it is lost."""
    (tmp_path / "traces").mkdir()
    shutil.copy(TRACES / "ranking.json", tmp_path / "traces")
    shutil.copytree(TRACES / "tensor-parallel", tmp_path / "traces" / "job")
    request = tomllib.loads(text)

    experiment = decode(text.encode(), source=str(tmp_path / "page.toml"))
    resolved = resolve(experiment, text.encode(), lab_inventory.load(inventories() / "soft.yml"))

    assert [fault.kind for fault in resolved.faults] == [fault["kind"] for fault in request["faults"]]
    assert len(experiment.needs) == len(request.get("lab", {}).get("needs", ()))
    assert len(experiment.stops) == len(request.get("stop", ()))
    assert experiment.capture == tuple(request.get("capture", {}).get("ports", ()))
    assert len(resolved.plan.workload) >= len(request["workload"])


def test_pages_contain_experiment_parts():
    """Without such parts, `test_documented_experiment_parts_are_accepted` would check nothing."""
    assert {experiment.id.rpartition("-")[0] for experiment in EXPERIMENTS} == {
        "experiment-reference",
        "replay-a-trace",
        "your-program",
        "write-an-experiment",
    }


@pytest.mark.process
def test_command_reference_is_up_to_date():
    """Regenerate it with `python -m faultbed.harness.cli.document > docs/commands.md`.

    It runs in its own process, because click caches the help option of a command that another test has called without
    its group.
    """
    argv = [sys.executable, "-m", "faultbed.harness.cli.document"]
    printed = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=HOUSE).stdout
    assert (HOUSE / "docs" / "commands.md").read_text() == printed
