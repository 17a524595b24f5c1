"""A run whose middle, with the faults, is replaced: what `loop._run_and_compare` does around it is real."""

from __future__ import annotations

from types import SimpleNamespace

from harness.run import loop
from harness.run.collect_measurements import RunData
from inject.journal import Journal


def run(lab, journal_path, monkeypatch, with_faults):
    """Run, with the journal at a path; return what the run found."""
    monkeypatch.setattr(loop, "_with_faults", with_faults)
    monkeypatch.setattr(loop, "wants_twin", lambda _: False)
    monkeypatch.setattr(loop.emulation_limit, "offered_load_bps", lambda *_: None)
    decided = SimpleNamespace(experiment=SimpleNamespace(fabric=None, workload=None, bystander=None))
    result = RunData()
    with Journal(journal_path) as journal:
        loop._run_and_compare(decided, lab, journal, result, lambda _: None, None, None)
    return result
