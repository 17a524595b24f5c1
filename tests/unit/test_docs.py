"""The documentation: every command in it would be understood, every file and page that it names is there."""

import re
import shlex

import pytest
from commands import parse
from house import HOUSE

PAGES = [HOUSE / "README.md", HOUSE / "CONTRIBUTING.md", *sorted((HOUSE / "docs").glob("*.md"))]
TARGETS = set(re.findall(r"^([a-z-]+):", (HOUSE / "Makefile").read_text(), re.MULTILINE))
STAND_INS = {"RUN_DIR": "runs/20261121T000000Z-demo-7", "runs/<utc>-demo-7": "runs/20261121T000000Z-demo-7"}


def commands(path):
    """Command lines in the code blocks of a page, and `faultbed …` in its text."""
    text = path.read_text()
    blocks = re.findall(r"^ *```(?:sh)?\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    for line in (line for block in blocks for line in block.splitlines()):
        if re.match(r" *(faultbed|make|python -m pytest) ", line):
            yield shlex.split(line, comments=True)
    for found in re.findall(r"`(faultbed [a-z][^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        yield shlex.split(found)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_would_be_understood(path, monkeypatch):
    monkeypatch.chdir(HOUSE)
    for found in commands(path):
        words = [STAND_INS.get(word, word) for word in found]
        if words[0] == "make":
            assert set(words[1:]) <= TARGETS, words
        elif words[0] == "faultbed":
            parse(words[1:])
        else:
            named = [word for word in words[3:] if word.startswith("tests/")]
            assert named
            assert all((HOUSE / word).exists() for word in named), words


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_file_that_is_named_is_there(path):
    text = path.read_text()
    named = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert all((path.parent / name).exists() for name in named), named
    for name in re.findall(r"`((?:testbed|inject|traffic|harness|tests|inventory|playbooks|docs)/[\w./-]+)`", text):
        assert (HOUSE / name).exists(), name


def test_the_pages_hold_commands_at_all():
    assert sum(1 for path in PAGES for _ in commands(path)) > 40
