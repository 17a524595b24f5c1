"""A folder with all files that the pages name, such as runs, a capture and a JUnit file, with synthetic contents."""

from __future__ import annotations

import shutil

import msgspec
from finished_run import finished
from gbn_model import go_back_n
from house import HOUSE
from labelled_run import campaign
from pages import RUN
from repeated_runs import without_faults
from synthetic_run import synthetic_run

from faultbed.harness.packets import evidence
from faultbed.testbed.observe.packet_capture import Captured, PortProof

_JUNIT = '<testsuites><testsuite name="pytest"><testcase classname="a" name="b" time="1"/></testsuite></testsuites>\n'


def _fault_free(runs, factor):
    run = finished(runs, without_faults(synthetic_run(), factor))
    run.write_plan(msgspec.structs.replace(run.read_plan(), faults=(), expect=msgspec.UNSET))
    return run.path


def make(folder):
    """Create the folder: `runs/`, `artifacts/`, `some.pcapng`, and the project's files that the pages name."""
    for name in ("docs", "tests", "inventory"):
        (folder / name).symlink_to(HOUSE / name)
    runs = folder / "runs"
    run = finished(runs, synthetic_run()).path
    assert run.name == RUN
    frames = go_back_n(count=40, losses={7}).wire.frames()
    proof = PortProof(name=frames.interfaces[0], captured=len(frames), counted=len(frames), drops=0)
    kept = evidence.keep(Captured(frames=frames, proofs=(proof,), epoch_offset_ns=0, clock_error_ns=0), run, {})
    (run / "packets.json").write_bytes(evidence.write(kept))
    shutil.copy(run / evidence.CAPTURE, folder / "some.pcapng")
    for name in ("a", "b", "first", "before", "after"):
        shutil.copytree(run, runs / name)
    # A copy of a run is no second one.
    finished(runs, synthetic_run(seconds=51.0)).path.rename(runs / "second")
    for number in (1, 2, 3, 4):
        _fault_free(runs, 1 + number / 100).rename(runs / f"aa-{number}")
    for number in (1, 2, 3):
        _fault_free(runs, 1.002 + number / 100).rename(runs / f"bb-{number}")
    some = campaign()
    for _ in range(2):
        kind, _place, measured = next(some)
        finished(runs / "campaign", measured, name=f"c001-{kind}")
    (folder / "artifacts").mkdir()
    (folder / "artifacts" / "junit.xml").write_text(_JUNIT)
