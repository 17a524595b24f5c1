"""Fixtures that load the programs of roles as Ansible or a node would; for unit tests and the rehearsal of a rack."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from faultbed.testbed.shipped import playbooks


@pytest.fixture(scope="module")
def load():
    """Return a function that imports a file as Ansible or a node would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(playbooks() / "module_utils"))
        patch.setattr(sys, "dont_write_bytecode", True)

        def one(path):
            spec = importlib.util.spec_from_file_location(f"under_test_{path.stem}", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module

        yield one
    for path in (playbooks() / "module_utils").glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def saved_state(load):
    return load(playbooks() / "module_utils" / "faultbed_saved.py").SavedState


@pytest.fixture(scope="module")
def changes(load):
    return load(playbooks() / "module_utils" / "faultbed_state.py").Changes


@pytest.fixture(scope="module")
def program(load):
    return lambda name: load(playbooks() / f"roles/{name}/files/{name}.py")
