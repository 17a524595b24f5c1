"""Storage faults on a real lab, during a job that fetches data and writes checkpoints over the front end."""

from __future__ import annotations

import threading

import pytest
from faults import stored_job

from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 4")]

CASES = (("storage.stall", 3.0, {}), ("storage.slow", 4.0, {"percent": 5}), ("storage.burst", 4.0, {}))


@pytest.fixture
def job(lab):
    """Run a job that is long enough for every case."""
    with stored_job(lab) as running:
        yield running


def longest_wait_s(running):
    iterations = [event.message for event in running.events if event.name == "iteration"]
    return max(max(iteration["ingest_ns"], iteration["checkpoint_ns"]) for iteration in iterations) / 1e9


@pytest.mark.parametrize("mutate", [None, "noop"])
def test_storage_stall_and_slowdown_are_proved_and_delay_the_job(lab, tmp_path, job, mutate):
    """Each fault is proved. If its action is replaced by a no-op, none is."""
    proved = {}
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, mutate=mutate) as injector:
        for index, (kind, for_s, params) in enumerate(CASES):
            spec = FaultSpec(kind=kind, target=lab.topology.hosts[3].name, for_s=for_s, params=params)
            prepared = injector.prepare(plan(spec, lab.topology, lab_kind="soft", index=index))
            prepared.arm()
            threading.Event().wait(for_s)
            receipt = prepared.clear()
            assert receipt.cleared.ok, receipt.cleared.error
            print(kind, receipt.fired.count, receipt.fired.witness, receipt.doubts, longest_wait_s(job))
            proved[kind] = receipt.proved
        assert not job.is_over, job.failure
    assert proved == {kind: mutate is None for kind, _, _ in CASES}
    if mutate is None:
        assert longest_wait_s(job) > 2.0, "storage.stall lasts 3 s"
