"""The benches' command ends like every other one: one sentence, and the right exit code."""

from __future__ import annotations

import subprocess
import sys

from harness.verdict import ExitCode


def test_what_stops_it_is_a_sentence(tmp_path):
    """A lab that is not there: no traceback, the file named, exit code 4."""
    missing = tmp_path / "no-such-lab.yml"
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "--lab", missing, "flow"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == ExitCode.USAGE
    assert ended.stderr.startswith("faultbed: ")
    assert str(missing) in ended.stderr
    assert "Traceback" not in ended.stderr
