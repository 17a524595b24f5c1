"""The benches' command ends like every other one: one sentence, and the right exit code."""

from __future__ import annotations

import os

from house import HOUSE

from harness.verdict import ExitCode


def test_bench_missing_lab_is_one_sentence(tmp_path, forked):
    """A missing inventory: no traceback, the file named, exit code 4."""
    missing = tmp_path / "no-such-lab.yml"
    ended = forked.faultbed(["--lab", str(missing), "flow"], env={**os.environ}, cwd=HOUSE, program="bench.__main__")
    assert ended.returncode == ExitCode.USAGE
    assert ended.stderr.startswith("faultbed: ")
    assert str(missing) in ended.stderr
    assert "Traceback" not in ended.stderr
