"""Fixtures of the rehearsal; its output ends with what is a stand-in, from the docstring of each of its files."""

from pathlib import Path

import pytest
from role_programs import changes, load, program, saved_state  # noqa: F401 (fixtures)

HERE = Path(__file__).parent
NAMED = "What is a stand-in: "
STAND_INS = pytest.StashKey()


def stand_ins_of(module):
    """Return the paragraph of a test file's docstring that names its stand-ins; refuse a file without one."""
    for paragraph in (module.__doc__ or "").split("\n\n"):
        if paragraph.strip().startswith(NAMED):
            return " ".join(paragraph.strip().removeprefix(NAMED).split())
    raise pytest.UsageError(f'{module.__file__}: its docstring has no paragraph "{NAMED}…"; say what is not real in it')


def pytest_collection_modifyitems(config, items):
    modules = {item.path.name: item.module for item in items if HERE in item.path.parents and hasattr(item, "module")}
    config.stash[STAND_INS] = {name: stand_ins_of(module) for name, module in modules.items()}


def pytest_terminal_summary(terminalreporter, config):
    named = config.stash.get(STAND_INS, {})
    if named:
        terminalreporter.section("what is a stand-in")
    for name, what in named.items():
        terminalreporter.line(f"{name}: {what}")
