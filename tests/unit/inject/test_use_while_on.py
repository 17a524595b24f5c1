"""What workloads use is read before a fault is armed, and until its end unless they are known to use its target."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from local_lab import SOFT, lab_at
from qmp_server import Qemu

from faultbed.inject import prepared_fault
from faultbed.inject.evidence.workload_use import WorkloadUse
from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.errors import LabError
from faultbed.testbed.observe import counters, fingerprint

MOST_S = 30.0


@pytest.fixture
def receipt_beside(tmp_path, monkeypatch):
    """Return a function that arms a fault on host1:rxe0 beside workloads, waits for readings, and clears it."""
    monkeypatch.setattr(counters, "read", counters.read)
    monkeypatch.setattr(fingerprint, "capture", fingerprint.capture)
    monkeypatch.setattr(prepared_fault, "USE_S", 0.01)
    server = Qemu(tmp_path / "qmp")
    planned = plan(FaultSpec(kind="link.flap", target="host1:rxe0", for_s=60.0), SOFT.topology, lab_kind="soft")

    def run(uses, *, readings):
        """`uses` are what workloads use, one RNIC a reading; an error is raised, and the last one repeats."""
        read, enough = itertools.count(1), threading.Event()

        def use_of(_):
            number = next(read)
            if number >= readings:
                enough.set()
            use = uses[min(number, len(uses)) - 1]
            if isinstance(use, Exception):
                raise use
            return use and WorkloadUse(at_ns=time.monotonic_ns(), rnics=(use,))

        with Journal(tmp_path / "journal") as journal, Injector(lab_at(tmp_path), journal) as injector:
            injector.use_of = use_of
            fault = injector.prepare(planned)
            fault.arm()
            assert enough.wait(MOST_S)
            return fault.clear(), next(read) - 1

    yield run
    server.close()


def test_use_is_read_once_if_it_shows_that_the_target_is_used(receipt_beside):
    receipt, readings = receipt_beside(["host1:rxe0"], readings=1)
    assert [use.rnics for use in receipt.exposed.uses] == [("host1:rxe0",)]
    assert receipt.exposed.uses[0].at_ns < receipt.armed.at_ns
    assert readings == 1


def test_use_is_read_while_the_fault_is_on_until_the_target_is_used(receipt_beside):
    receipt, readings = receipt_beside(["host2:rxe0", "host3:rxe0", "host3:rxe0", "host1:rxe0"], readings=4)
    assert [use.rnics[0] for use in receipt.exposed.uses] == [
        "host2:rxe0", "host3:rxe0", "host3:rxe0", "host1:rxe0",
    ]  # fmt: skip
    assert receipt.armed.at_ns < receipt.exposed.uses[-1].at_ns < receipt.cleared.at_ns
    assert readings == 4


def test_lab_without_a_workload_is_read_once(receipt_beside):
    """A frozen host of an idle lab does not answer any more, which would leave its exposure unknown."""
    receipt, readings = receipt_beside([None, LabError("host1: no answer")], readings=1)
    assert receipt.exposed.uses == ()
    assert readings == 1


def test_use_that_cannot_be_read_while_the_fault_is_on_is_unknown_and_ends_no_fault(receipt_beside):
    receipt, _ = receipt_beside(["host2:rxe0", LabError("host1: no answer")], readings=4)
    assert receipt.cleared.ok
    assert receipt.exposed.uses[1].unknown_paths == "LabError: host1: no answer"
    assert "host1" in receipt.exposed.uses[1].unread
