"""Python code in a process of its own, whose hash order differs from that of the test."""

from __future__ import annotations

import subprocess
import sys

from faultbed.testbed.shipped import inventories


def printed(code, *, hash_seed):
    """Return the stripped output of the code, which runs with an empty environment."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": str(hash_seed), "PATH": "/usr/bin:/bin"},
        cwd=inventories().parent,
        timeout=120,
    )
    return done.stdout.strip()
