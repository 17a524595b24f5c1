"""Memory errors, row remapping and heat of GPUs on a real lab: proved by the GPU's registers, never without action."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from faults import work
from planned_faults import with_mechanism

from faultbed.harness.attribution.gpu_readings import readings_of_preflight, readings_of_run
from faultbed.harness.attribution.offenders import Thresholds, offenders, strikes_of_run
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.run import loop as run
from faultbed.harness.run.prepare.preflight import preflight
from faultbed.harness.verdict import Verdict
from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.observe import counters

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
    """Inject every case in turn; yield each one with its receipt."""
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
                planned = with_mechanism(planned, request=there.request, place=there.place)
            prepared = injector.prepare(planned)
            prepared.arm()
            threading.Event().wait(min(for_s, LONGEST_S))
            receipt = prepared.clear()
            print(kind, params, receipt.fired.count, receipt.fired.witness, receipt.fired.must_move, receipt.doubts)
            yield kind, params, receipt


@pytest.mark.slow
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


def listed(readings, strikes=(), *, topology):
    """Return the rows of `faultbed offenders`, by name."""
    ranking = offenders(strikes, topology, Thresholds(), now=datetime.now(UTC), readings=readings)
    return {one.name: (one.host, one.action) for one in ranking if one.action != "watch"}


def test_preflight_reports_a_gpu_beyond_a_threshold_and_offenders_sends_it_to_repair(lab, tmp_path):
    """The detectors report the synthetic failure like a real one, and nothing after the reset."""
    planned = plan(
        FaultSpec(kind="gpu.row-remap", target="host2:gpu0", for_s=120.0, params={"state": "failed"}),
        lab.topology,
        lab_kind="soft",
    )
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, until_cleared=True) as injector:
        prepared = injector.prepare(planned)
        assert prepared.arm().ok
        during = preflight(lab, print, with_burnin=False)
        assert prepared.clear().proved
    (finding,) = (finding for finding in during.findings if finding.check == "gpu-health")
    assert (finding.where, finding.observed) == (
        "host2:gpu0",
        "RMA: remap_failed is 1 (from 1 on): a row could not be remapped",
    )
    assert "return the GPU" in finding.expected
    afterwards = preflight(lab, print, with_burnin=False)
    assert [finding for finding in afterwards.findings if finding.check == "gpu-health"] == []
    assert [unchecked for unchecked in afterwards.unchecked if unchecked.check == "gpu-health"] == []
    first, second = (
        readings_of_preflight(outcome.to_dict(), lab.topology, origin="p.json", at=datetime.fromtimestamp(at, UTC))
        for at, outcome in enumerate((during, afterwards))
    )
    assert listed(first, topology=lab.topology) == {"host2:gpu0": ("host2", "RMA")}
    assert listed([*first, *second], topology=lab.topology) == {}


@pytest.mark.slow
def test_job_whose_gpu_has_an_uncontained_error_restarts_on_the_spare_and_its_host_is_an_offender(lab, tmp_path):
    """XID 95 ends the rank. The job continues on the spare from its newest checkpoint, with the correct state.

    `make test` leaves the experiment out: `tests/unit/traffic/workloads/test_elastic_jobs.py` has the restart.
    """
    text = (Path(__file__).parents[1] / "experiments" / "gpu-memory-error.toml").read_text()
    source = text.encode()
    resolved = run.resolve(decode(source, source="here.toml"), source, lab.inventory_model)
    done = run.execute(resolved, lab.inventory_model, out=tmp_path, progress=print)
    lab.forget_connections()
    measured = done.run_dir.read_run()
    print(done.verdict.verdict, [(check.name, check.verdict, check.observed) for check in done.verdict.checks])
    print(
        [
            (restart.cause, restart.hosts, restart.after, restart.reason)
            for restart in measured.workload.resilience.restarts
        ]
    )
    print(done.verdict.attribution)
    assert done.verdict.verdict is Verdict.PASS, done.verdict
    (restart,) = measured.workload.resilience.restarts
    assert (restart.cause, restart.hosts) == ("gpu", ("host3",))
    assert restart.after == ("host1:rxe0", "host2:rxe0", "host4:rxe0")
    assert "XID 95" in restart.reason
    assert {state.wrong for state in measured.workload.resilience.states} == {0}
    now = {"origin": "run", "at": datetime.now(UTC)}
    assert listed(readings_of_run(measured, **now), topology=lab.topology) == {}, "the injector blames no part"
    readings = readings_of_run(measured, **now, rehearsal=True)
    strikes = strikes_of_run(measured, done.verdict, **now, rehearsal=True)
    assert listed(readings, strikes, topology=lab.topology)["host3:gpu0"] == ("host3", "drain")
