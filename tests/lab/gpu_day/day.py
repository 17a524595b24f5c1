"""Shared parts of the GPU day's programs: their output folder, and how results are written.

Each program prints what it measured, writes it as JSON into the folder that is its first argument, and exits 1 if a
check failed. With FAULTBED_REHEARSAL=1 everything is a stand-in, and each file says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REHEARSAL = os.environ.get("FAULTBED_REHEARSAL") == "1"
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


def smi(*arguments):
    """Return what nvidia-smi prints; its error output if it fails."""
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if not done.returncode else f"{done.stdout}{done.stderr}"


def about():
    """Return what every file says of itself."""
    words = smi("--query-gpu=name,driver_version", "--format=csv,noheader").strip().splitlines()
    name, _, driver = (words[0] if words else "").partition(", ")
    return {
        "gpu": name,
        "driver": driver,
        "kernel": os.uname().release,
        "command": " ".join([*sys.argv[:1], "OUT", *sys.argv[2:]]),
        "measurement": "no: rehearsal on stand-ins" if REHEARSAL else "yes",
    }


def save(name, **values):
    """Write a JSON file into the output folder."""
    (OUT / name).write_text(json.dumps({"about": about(), **values}, indent=1) + "\n")


def attempted(checks):
    """Yield checks, and as the last one the error that ended them, if there was one."""
    try:
        yield from checks
    except Exception as error:  # noqa: BLE001 - a field that this driver lacks hides no other check
        yield f"the comparison ended: {error!r}", False


def conclude(checks, *, then=lambda: None):
    """Print each check as `ok` or `FAILED` with its words, call `then`, and exit accordingly."""
    for words, is_right in checks:
        print("ok    " if is_right else "FAILED", words)
    then()
    sys.exit(0 if checks and all(is_right for _, is_right in checks) else 1)
