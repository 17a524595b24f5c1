"""The GPU day's script runs on stand-ins, records every step, and says that nothing of it is a measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile

import pytest
from house import HOUSE

pytestmark = [pytest.mark.slow, pytest.mark.process]


def day(out, *steps, seconds=200):
    environment = {**os.environ, "PYTHON": sys.executable, "GPU_DAY_S": str(seconds)}
    return subprocess.run(
        [HOUSE / "tests/lab/gpu_day.sh", "--rehearse", out, *steps],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_gpu_day_rehearsal_records_readers_and_plans(tmp_path):
    done = day(tmp_path, "before", "readers", "plans", "after")
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / "recorded.tar.gz") as kept:
        for name in ("machine-before", "readers", "plans", "machine-after"):
            recorded = json.load(kept.extractfile(f"./{name}.json"))
            assert recorded["about"]["measurement"] == "no: rehearsal on stand-ins"
    assert (tmp_path / "summary.txt").read_text().startswith("REHEARSAL")


def test_gpu_day_without_time_names_the_steps_that_are_left(tmp_path):
    done = day(tmp_path, "before", "power-fma", seconds=30)
    assert done.returncode == 1
    assert "run it with: tests/lab/gpu_day.sh OUT power-fma" in done.stdout
    assert "before       ok" in done.stdout
