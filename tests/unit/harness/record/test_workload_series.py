"""Bytes that each rank sent, also if several ranks share an RNIC."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from local_traffic import LocalLab

from faultbed.harness.experiment.workload_specs import between
from faultbed.harness.record import workload_series
from faultbed.harness.record.workload_series import series_of
from faultbed.traffic.engine.run_results import Sample
from faultbed.traffic.flows.flow_run import FlowsResult
from faultbed.traffic.flows.flow_spec import FlowSpec
from faultbed.traffic.workloads import job
from faultbed.traffic.workloads.job import JobPhase, JobSpec

PHASE = JobPhase(along="dp", collective="all-reduce", size_bytes=1 << 18, algorithm="ring")


@pytest.fixture
def lab(tmp_path):
    made = LocalLab(tmp_path)
    yield made
    made.close()


def bytes_of(result):
    return [sum(sample.bytes for sample in series.samples) for series in series_of(result)]


def test_ranks_that_share_an_rnic_have_each_their_own_bytes(lab):
    """In a group of two ranks, an all-reduce of 256 KiB makes each rank send 256 KiB per iteration."""
    spec = JobSpec(
        grid=(("dp", 2), ("tp", 2)), phases=(PHASE,), ranks=("host1", "host3"), ranks_per_rnic=2, iterations=3
    )
    with job.start(lab, spec) as running:
        result = running.wait(60)
    assert (result.outcome, result.where) == ("completed", None)
    assert bytes_of(result) == [3 * PHASE.size_bytes] * 4
    assert sum(bytes_of(result)) == sum(sample.size_bytes for sample in result.samples)


def test_an_rnic_at_the_end_of_two_flows_has_the_bytes_of_both():
    flows = tuple(
        SimpleNamespace(
            spec=FlowSpec(src="host1:rxe0", dst=dst),
            samples=(Sample(endpoint="host1:rxe0", start_ns=0, duration_ns=100, size_bytes=size, task=f"tx{number}"),),
        )
        for number, (dst, size) in enumerate((("host2:rxe0", 40), ("host3:rxe0", 2)))
    )
    result = FlowsResult(outcome="completed", where=None, flows=flows, goodput_bps=0.0, jain_index=1.0)
    assert bytes_of(result) == [42, 0, 0]
    assert [len(series.samples) for series in series_of(result)] == [1, 0, 0]  # a bin twice would be refused when read


@pytest.mark.parametrize(("transport", "stalled"), [("rc", [0, 0]), ("uc", [0, 0])])
def test_bytes_of_a_probe_do_not_hide_that_its_flow_stands_still(transport, stalled):
    main = FlowSpec(src="host1:rxe0", dst="host2:rxe0", transport=transport, duration_s=9.0)
    specs = between(main, probe=True)
    sizes = (0, 6400)
    flows = tuple(
        SimpleNamespace(
            spec=spec,
            samples=(Sample(endpoint="host1:rxe0", start_ns=0, duration_ns=100, size_bytes=size, task=f"tx{number}"),),
        )
        for number, (spec, size) in enumerate(zip(specs, sizes, strict=True))
    )
    result = FlowsResult(outcome="completed", where=None, flows=flows, goodput_bps=0.0, jain_index=1.0)
    assert bytes_of(result) == stalled
    assert bytes_of(replace(result, flows=flows[1:])) == [6400, 0], "probes alone are the workload"


@pytest.mark.parametrize(("transport", "sizes"), [("rc", [100, 0]), ("uc", [0, 60]), ("ud", [0, 60])])
def test_datagrams_count_where_they_arrive(transport, sizes):
    """A sender of datagrams does not notice a dead link. Its bytes would hide every dip, and count twice."""
    ends = {"tx": ("host1:rxe0", 100), "rx": ("host2:rxe0", 60)}
    samples = tuple(
        Sample(endpoint=name, start_ns=0, duration_ns=100, size_bytes=size, task=task)
        for task, (name, size) in ends.items()
        if task == "tx" or transport != "rc"
    )
    flow = SimpleNamespace(spec=FlowSpec(src="host1:rxe0", dst="host2:rxe0", transport=transport), samples=samples)
    result = FlowsResult(outcome="completed", where=None, flows=(flow,), goodput_bps=0.0, jain_index=1.0)
    assert bytes_of(result) == sizes


def test_samples_stored_without_a_task_are_those_of_the_rank_on_their_rnic(lab):
    with job.start(lab, JobSpec(grid=(("dp", 2),), phases=(PHASE,), ranks=("host1", "host3"), iterations=3)) as running:
        result = running.wait(60)
    old = replace(result, samples=tuple(replace(sample, task="") for sample in result.samples))
    assert bytes_of(old) == bytes_of(result) == [3 * PHASE.size_bytes] * 2


def test_checked_bytes_are_those_of_flows_that_were_to_compare_theirs():
    def flows(*rows):
        made = tuple(
            SimpleNamespace(spec=SimpleNamespace(check=check), checked_bytes=checked, wrong_bytes=wrong)
            for check, checked, wrong in rows
        )
        return SimpleNamespace(flows=made)

    assert workload_series.checked_of(flows((False, None, None))) == (None, 0)
    assert workload_series.checked_of(flows((True, None, None))) == (0, 0)
    assert workload_series.checked_of(flows((True, 40, 3), (True, 2, 0), (False, None, None))) == (42, 3)


def test_silent_and_unchecked_flows_are_named_one_by_one():
    """Flows share RNICs in an incast: what the others carried to the sink hid a flow that carried nothing."""
    incast = [FlowSpec(src=f"host{number}:rxe0", dst="host4:rxe0", check=True, verb="send") for number in (1, 2, 3)]
    probe = between(FlowSpec(src="host1:rxe0", dst="host4:rxe0", duration_s=9.0), probe=True)[1]
    sizes = (4096, 0, 4096, 0)
    flows = tuple(
        SimpleNamespace(spec=spec, size_bytes=size, checked_bytes=checked, samples=())
        for spec, size, checked in zip([*incast, probe], sizes, (4096, None, 0, None), strict=True)
    )
    result = FlowsResult(outcome="completed", where=None, flows=flows, goodput_bps=0.0, jain_index=1.0)
    assert workload_series.silent_of(result) == ("host2:rxe0 > host4:rxe0",)
    assert workload_series.unchecked_of(result) == ("host2:rxe0 > host4:rxe0", "host3:rxe0 > host4:rxe0")
