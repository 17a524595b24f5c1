"""A run with a stand-in for its measured pass: everything around it in `loop._run_and_compare` is real."""

from __future__ import annotations

from types import SimpleNamespace

from pass_stand_ins import setting_of

from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run import loop
from faultbed.harness.run.run_record import RunRecord
from faultbed.inject.journal import Journal


def run(lab, journal_path, monkeypatch, measured):
    """Execute a run whose measured pass is the function `measured` of it; return the record of the run.

    Its journal is at a path.
    """
    monkeypatch.setattr(loop, "PARTS", ())
    monkeypatch.setattr(loop, "_run_pass", lambda run, _on_flights: measured(run))
    monkeypatch.setattr(loop, "passes_before", lambda _plan: {})
    with Journal(journal_path) as journal:
        setting = setting_of(
            lab=lab, journal=journal, run_dir=RunDir(journal_path.parent), experiment=SimpleNamespace(fabric=None)
        )
        record = RunRecord(setting=setting)
        monkeypatch.setattr("faultbed.harness.run.run_record.PARTS", ())
        loop._run_and_compare(record, None)
    return record
