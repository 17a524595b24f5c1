"""A run with a stand-in for workload and faults: everything around them in `loop._run_and_compare` is real."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run import loop
from faultbed.harness.run.run_record import RunRecord
from faultbed.inject.journal import Journal


def run(lab, journal_path, monkeypatch, with_faults):
    """Execute the run with its journal at a path, and return the data of the run."""
    monkeypatch.setattr(loop, "_with_faults", with_faults)
    monkeypatch.setattr(loop, "sealed_at_end", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(loop, "wants_twin", lambda *_, **__: False)
    monkeypatch.setattr(loop.emulation_limit, "offered_load_bps", lambda *_: None)
    decided = SimpleNamespace(
        experiment=SimpleNamespace(fabric=None, workload=None, bystander=None, expectations=()),
        plan=SimpleNamespace(is_control=False),
    )
    result = RunRecord(run_dir=RunDir(journal_path.parent))
    with Journal(journal_path) as journal:
        loop._run_and_compare(decided, lab, journal, result, lambda _: None, None, None)
    return result
