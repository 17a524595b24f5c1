"""Memory errors, row remapping and heat of GPUs on a real lab: proved by the GPU's registers, never without action."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from faults import work

from inject.fault_plan import FaultSpec, plan
from inject.injector import Injector
from inject.journal import Journal
from testbed.observe import counters

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts >= 4")]

CASES = (
    ("gpu.ecc", "host2:gpu0", 2.0, {"error": "corrected", "count": 3, "rate": 2}),
    ("gpu.ecc", "host2:gpu0", 2.0, {"error": "high-rate", "count": 100}),
    ("gpu.ecc", "host2:gpu0", 2.0, {"error": "uncontained"}),
    ("gpu.row-remap", "host2:gpu0", 10.0, {}),
    ("gpu.row-remap", "host2:gpu0", 10.0, {"state": "failed"}),
    ("gpu.overheat", "host2:gpu0", 10.0, {"celsius": 80}),
    ("gpu.overheat", "host1:gpu0", 10.0, {"celsius": 92}),
    ("gpu.overheat", "host2:gpu0", 15.0, {"celsius": 96}),
)
"""The GPU of host1 is busy: an idle one is not slowed by heat."""
LONGEST_S = 3.0
"""A fault is cleared after that long. Its window is longer for states that are read while it is on."""
ELSEWHERE = {"host1": "host2", "host2": "host4"}


def receipts(lab, folder, *, mutate=None, elsewhere=False):
    """Inject every case in turn; yield it with its receipt."""
    with (
        work(lab, "throttle"),
        Journal(folder / "journal.jsonl") as journal,
        Injector(lab, journal, until_cleared=True, mutate=mutate) as injector,
    ):
        for index, (kind, target, for_s, params) in enumerate(CASES):
            planned, there = (
                plan(
                    FaultSpec(kind=kind, target=name, for_s=for_s, params=params),
                    lab.topology,
                    lab_kind="soft",
                    index=index,
                )
                for name in (target, target.replace(target[:5], ELSEWHERE[target[:5]]))
            )
            if elsewhere:
                planned = dataclasses.replace(planned, request=there.request, place=there.place)
            prepared = injector.prepare(planned)
            prepared.arm()
            threading.Event().wait(min(for_s, LONGEST_S))
            receipt = prepared.clear()
            print(kind, params, receipt.fired.count, receipt.fired.witness, receipt.fired.must_move, receipt.doubts)
            yield kind, params, receipt


def test_gpu_health_fault_is_proved_by_registers_and_cleared(lab, tmp_path):
    doubts = [
        (kind, params, receipt.doubts, receipt.cleared.error)
        for kind, params, receipt in receipts(lab, tmp_path)
        if not receipt.proved or not receipt.cleared.ok
    ]
    assert doubts == []
    values = counters.read(lab, ["host1", "host2"])
    for host in ("host1", "host2"):
        states = {
            name: values[host][f"gpu0.{name}"] for name in ("remap_pending", "remap_failed", "temp_c", "quota_us")
        }
        assert states == {"remap_pending": 0, "remap_failed": 0, "temp_c": 45, "quota_us": -1}
    assert values["host2"]["gpu0.remapped_rows"] == values["host2"]["gpu0.ecc_uncorrected_total"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("mutation", ["noop", "lie"])
def test_gpu_health_fault_without_action_is_never_proved(lab, tmp_path, mutation):
    believed = [(kind, params) for kind, params, receipt in receipts(lab, tmp_path, mutate=mutation) if receipt.proved]
    assert believed == []


@pytest.mark.slow
def test_gpu_health_fault_at_another_gpu_is_never_proved(lab, tmp_path):
    believed = [(kind, params) for kind, params, receipt in receipts(lab, tmp_path, elsewhere=True) if receipt.proved]
    assert believed == []
