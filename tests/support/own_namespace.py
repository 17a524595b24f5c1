"""Programs in a network namespace of their own, where tests can change interfaces and routes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from house import HOUSE, SUPPORT


def answer_of(program):
    """Run the text of a Python program in a namespace, and return the JSON that it prints; skip where that fails."""
    return _printed(["-c", program])


def in_a_namespace(program, *words):
    """Run a program of `tests/support` in its own network namespace, and return the JSON that it prints."""
    return _printed([str(SUPPORT / program), *words])


def in_a_fabric(program):
    """Run a program of `tests/support` that makes namespaces of its own, and return the JSON that it prints."""
    return _printed([str(SUPPORT / program)], kind="-rnm")


def _printed(words, kind="-rn"):
    if subprocess.run(["unshare", kind, "ip", "link", "add", "up1", "type", "veth"], check=False).returncode:
        pytest.skip("no network namespaces for this user here")
    environment = {**os.environ, "PYTHONPATH": str(HOUSE)}
    argv = ["unshare", kind, sys.executable, *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
