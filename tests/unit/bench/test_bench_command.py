"""The command `python -m bench` ends like every other command: with one sentence and the right exit code."""

from __future__ import annotations

import signal
import sys

import pytest

from bench import __main__ as bench
from faultbed.harness.verdict import ExitCode


def test_bench_missing_lab_is_one_sentence(tmp_path, monkeypatch, capsys):
    """A missing inventory is reported by its name and with exit code 4, not with a traceback."""
    missing = tmp_path / "no-such-lab.yml"
    monkeypatch.setattr(sys, "argv", ["bench", "--lab", str(missing), "flow"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of this process stay
    with pytest.raises(SystemExit) as ended:
        bench.main()
    error = capsys.readouterr().err
    assert ended.value.code == ExitCode.USAGE
    assert error.startswith("faultbed: ")
    assert str(missing) in error
    assert "Traceback" not in error
