"""The harness records its own reads from the lab, and the goodput baseline excludes these times."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from pass_stand_ins import pass_of
from synthetic_run import T0, changed, soft_topology, synthetic_run

from faultbed.harness.analysis import timeline
from faultbed.harness.analysis.observe import observe
from faultbed.harness.parts.faults import drive_faults
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.own_reads import _UNENDED_NS, recorded
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.testbed.errors import FaultError

S = 1_000_000_000


ONE = plan(FaultSpec(id="one", kind="link.down", target="rtsw1:ctsw1", for_s=1.0), soft_topology(), lab_kind="soft")


def prepared_fault():
    injector = Mock(ttl_s=10.0, mutate=None)
    injector.journal.doing = lambda *_, **__: contextlib.nullcontext({})
    return PreparedFault(injector, ONE)


def test_prepared_fault_records_its_baseline_use_and_lookup_reads(monkeypatch):
    one = prepared_fault()
    one._before = {}
    moments = []

    def read(*_, **__):
        moments.append(time.monotonic_ns())
        return {}

    monkeypatch.setattr(one._witnesses, "_read", read)
    monkeypatch.setattr("faultbed.inject.prepared_fault.bind", read)
    one._injector.use_of = lambda planned: read() or None
    one.lease._channel = SimpleNamespace(
        send=lambda _: None, receive=lambda timeout_s: {"event": "error", "error": "not now", "where": "arm", "seq": 1}
    )
    one.baseline()
    with pytest.raises(FaultError, match="not now"):
        one.arm()

    assert len(one.reads) == len(moments) == 3
    for (begin_ns, end_ns), at_ns in zip(one.reads, moments, strict=True):
        assert begin_ns <= at_ns <= end_ns


def driven(fault):
    """Drive a fault in a pass, and return the pass."""
    run = pass_of(lab=SimpleNamespace())
    run.injected.ready = [fault]
    drive_faults.drive_all(run, SimpleNamespace(is_over=False))
    return run


def test_run_loop_records_counter_reads_of_faults_that_could_not_be_armed(monkeypatch):
    def refuse(*_, **__):
        raise FaultError("not now")

    monkeypatch.setattr(drive_faults, "_drive", refuse)
    receipt = Mock(proved=False, doubts=("not now",), unproven=("not now",))
    fault = SimpleNamespace(planned=ONE, reads=[(5, 9)], clear=lambda keep_holder: receipt)

    assert driven(fault).readings.reads == [(5, 9)]


def test_run_loop_reports_a_fault_whose_clearing_ends_in_an_exception(monkeypatch):
    """Otherwise the clearing thread would end silently, and the run would lack the receipt."""

    def broken(keep_holder):
        raise RuntimeError("no such key")

    monkeypatch.setattr(drive_faults, "_drive", lambda *_: None)
    run = driven(SimpleNamespace(planned=ONE, reads=[], clear=broken))

    assert run.injected.receipts == {}
    assert len(run.setting.errors) == 1
    assert "one: not known to be cleared" in run.setting.errors[0]
    assert "no such key" in run.setting.errors[0]


def test_observe_dip_by_own_counter_reads_does_not_lower_the_noise_floor():
    """Reading the counters before the first fault takes two thirds of goodput for a second and a half."""
    run = synthetic_run()
    begin_ns, end_ns = T0 + 5 * S, T0 + 6_500_000_000
    loaded = changed(
        run,
        series=tuple(
            msgspec.structs.replace(
                series,
                samples=tuple(
                    msgspec.structs.replace(sample, bytes=sample.bytes // 3)
                    if begin_ns <= sample.t_ns < end_ns
                    else sample
                    for sample in series.samples
                ),
            )
            for series in run.workload.series
        ),
    )
    reported = changed(loaded, reads=((begin_ns, end_ns),))

    assert observe(loaded).baseline.floor < 0.6 * observe(run).baseline.floor
    assert observe(reported).baseline.floor > 0.95 * observe(run).baseline.floor


def test_read_that_is_not_over_covers_everything_since_its_begin():
    """On a busy machine the health before a fault is judged while its baseline is still being read."""
    reads = [(1, 2)]
    begin_ns = time.monotonic_ns()
    with contextlib.suppress(ZeroDivisionError), recorded(reads):
        (_, (read_ns, end_ns)) = reads
        assert begin_ns <= read_ns
        assert end_ns > time.monotonic_ns() + 3600 * S
        raise ZeroDivisionError
    assert reads[0] == (1, 2)
    assert reads[1][0] == read_ns
    assert reads[1][1] <= time.monotonic_ns()


def test_start_of_a_run_is_steady_if_only_an_unended_read_disturbs_it():
    steady = timeline.Goodput(t0_ns=0, step_ns=S // 10, bytes=np.array([10.0] * 60 + [0.0] * 40))
    assert timeline.steadiness(steady, until_ns=10 * S, window_ns=S) < timeline.STEADY_SHARE
    reads = [(6 * S, _UNENDED_NS)]
    assert timeline.steadiness(steady, until_ns=10 * S, window_ns=S, reads=reads) == 1.0
