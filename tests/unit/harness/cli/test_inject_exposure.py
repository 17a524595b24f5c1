"""`faultbed inject` beside traffic: a fault on an uplink that no queue pair crosses proves nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner
from local_lab import Here
from synthetic_run import PATHS, synthetic_run

from faultbed.harness.cli.experiments import faults
from faultbed.harness.verdict import ExitCode
from faultbed.inject.evidence.workload_use import Exposure
from faultbed.testbed.observe import counters, fingerprint

SYNTHETIC = synthetic_run().injected.faults[0].receipt
RECEIPT = msgspec.structs.replace(
    SYNTHETIC,
    armed=msgspec.structs.replace(SYNTHETIC.armed, readback={"up": False}),
    cleared=msgspec.structs.replace(SYNTHETIC.cleared, readback={"up": True}),
)
USE = msgspec.structs.replace(RECEIPT.exposed.uses[0], at_ns=RECEIPT.armed.at_ns, paths=PATHS[:3])
"""Nothing crosses ctsw2."""
NOT_JUDGED = "exposure is not judged: no queue pair was connected when the fault was armed"


@pytest.fixture
def inject(tmp_path, monkeypatch):
    """Run `faultbed inject` with a proven fault, beside what workloads use; return exit code and output."""
    for module, name in ((counters, "read"), (fingerprint, "capture")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restores what the lab of `Here` replaces

    def run(target, uses, *options):
        receipt = msgspec.structs.replace(RECEIPT, target=target, exposed=Exposure(uses=uses))
        compared = SimpleNamespace(state="CLEAN", reasons=(), sentence="the lab is as it was before")
        monkeypatch.setattr(faults, "_inject", lambda *_: receipt)
        monkeypatch.setattr(faults.dirty, "begin", lambda *_, **__: None)
        monkeypatch.setattr(faults.ends, "finish", lambda *_: compared)
        words = ["link.down", target, "--for", "2s", "--journal", str(tmp_path / "journal"), *options]
        done = CliRunner().invoke(faults.inject, words, obj=Here(tmp_path), standalone_mode=False)
        assert done.exception is None
        return done.return_value, " ".join(done.output.split())

    return run


def test_inject_on_an_uplink_that_queue_pairs_cross_passes(inject):
    code, output = inject("rtsw1:ctsw1", (USE,))
    assert code == ExitCode.PASS
    assert NOT_JUDGED not in output


def test_inject_on_an_uplink_that_no_queue_pair_crosses_is_inconclusive(inject):
    code, output = inject("rtsw1:ctsw2", (USE,))
    assert code == ExitCode.INCONCLUSIVE
    assert "not proved: the workload did not use rtsw1:ctsw2" in output
    code, output = inject("rtsw1:ctsw2", (USE,), "--json")
    assert code == ExitCode.INCONCLUSIVE
    assert "did not use rtsw1:ctsw2" in json.loads(output)["unproven"][0]


def test_inject_of_a_fault_that_must_touch_nothing(inject):
    assert inject("rtsw1:ctsw2", (USE,), "--exposed", "none")[0] == ExitCode.PASS
    code, output = inject("rtsw1:ctsw1", (USE,), "--exposed", "none")
    assert code == ExitCode.INCONCLUSIVE
    assert "the workload used rtsw1:ctsw1, although the fault has exposed" in output


def test_inject_on_an_idle_lab_says_that_exposure_is_not_judged(inject):
    code, output = inject("rtsw1:ctsw2", ())
    assert code == ExitCode.PASS
    assert NOT_JUDGED in output
    for exposed in ("workload", "none"):
        code, output = inject("rtsw1:ctsw2", (), "--exposed", exposed)
        assert code == ExitCode.INCONCLUSIVE
        assert "it is unknown whether the workload used rtsw1:ctsw2" in output
