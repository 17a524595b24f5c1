"""The benches' command ends like every other one: one sentence, and the right exit code."""

from __future__ import annotations

import subprocess
import sys

from harness.verdict import ExitCode


def test_bench_missing_lab_is_one_sentence(tmp_path):
    """A missing inventory: no traceback, the file named, exit code 4."""
    missing = tmp_path / "no-such-lab.yml"
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "--lab", missing, "flow"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == ExitCode.USAGE
    assert ended.stderr.startswith("faultbed: ")
    assert str(missing) in ended.stderr
    assert "Traceback" not in ended.stderr
