"""Programs in a network namespace of their own, where tests can change interfaces and routes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from house import HOUSE


def answer_of(program):
    """Run the text of a Python program in a namespace, and return the JSON that it prints; skip where that fails."""
    if subprocess.run(["unshare", "-rn", "ip", "link", "add", "up1", "type", "veth"], check=False).returncode:
        pytest.skip("no network namespaces for this user here")
    environment = {**os.environ, "PYTHONPATH": str(HOUSE)}
    argv = ["unshare", "-rn", sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
