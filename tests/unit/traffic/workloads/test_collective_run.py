"""A collective ends with a typed outcome for every rank, and with the flight recorders of surviving ranks.

The engines here use the real protocol over real queues, without verbs. The controller is under test.
"""

from __future__ import annotations

import time

import pytest
from engine_labs import RANK_OF, RankLab
from local_collective import start

from faultbed.testbed.errors import UsageError
from faultbed.traffic import schedules
from faultbed.traffic.engine import flight_recorder
from faultbed.traffic.engine.engine_client import Engines
from faultbed.traffic.engine.run_results import Endpoint
from faultbed.traffic.schedules import cost
from faultbed.traffic.workloads import collective
from faultbed.traffic.workloads.collective import CollectiveSpec
from faultbed.traffic.workloads.ranks import rank_plan


def test_collective_completes_on_all_ranks():
    result = start(lambda engine: engine.over()).wait(10)
    assert result.outcome == "completed"
    assert [end.outcome for end in result.ends] == ["completed"] * 4
    assert result.flights == ()
    assert result.checked_elements == 4 * (1 << 18)
    assert result.busbw_gbytes_per_s == pytest.approx(1.5 * (1 << 20) / 1000)


def test_wrong_elements_in_the_warm_up_are_wrong_elements_of_the_result():
    """The command ended with the exit code of an error (3), as if the harness had failed, and not with FAIL (1)."""

    def on_start(engine):
        if engine.host in ("host1", "host2"):
            engine.emit("warm", task=f"rank{RANK_OF[engine.host]}", at_ns=time.monotonic_ns(), wrong=7)

    result = start(on_start, warmup=1).wait(10)
    assert (result.outcome, result.iterations_completed) == ("failed", 0)
    assert result.wrong_elements in (7, 14), "those of the ranks that had reported when the run failed"
    assert "7 wrong elements in the warm-up" in result.where


def test_killed_rank_fails_and_other_ranks_report_their_position():
    result = start(lambda engine: engine.do_quit() if engine.host == "host3" else None).wait(20)
    assert result.outcome == "failed"
    assert "host3: the traffic engine is gone" in result.where
    assert [end.outcome for end in result.ends] == ["failed"] * 4
    assert result.ends[2].where == "its engine sent no flight recorder at the end"
    assert result.ends[0].where == "iteration 3, step 2: waits for segment 1 of 4 from rank 1 (QP 9, lost)"
    assert sorted(one.rank for one in result.flights) == [0, 1, 3]
    assert result.flights[0].entries[0].what == "post"
    assert result.flights[0].entries[0].psn == 256


def test_finished_rank_has_completed_when_another_one_fails():
    def on_start(engine):
        if engine.host == "host2":
            engine.emit("overdue", task="rank1", iteration=0, after_ms=2000)
        else:
            engine.over()

    result = start(on_start, deadline_s=2.0).wait(20)
    assert result.outcome == "failed"
    assert result.where == "host2, rank1: iteration 0 is not over after 2 s"
    assert result.ends[1].outcome == "failed"


def test_rebuild_records_redone_segments():
    def on_start(engine):
        if engine.host == "host1":
            lost = {"task": "rank0", "conn": 0, "generation": 0, "qpn": 17, "status": "RETRY_EXC_ERR"}
            engine.emit("qp_error", **lost, at_ns=time.monotonic_ns())
        elif engine.host != "host2":
            engine.over()

    result = start(on_start).wait(20)
    assert result.outcome == "recovered"
    (rebuild,) = result.rebuilds
    # Both fake ends report it; of real ends only the sender does.
    assert (rebuild.redone_segments, rebuild.redone_bytes) in ((3, 12288), (6, 24576))


def test_dump_returns_flight_recorders_during_a_run():
    running = start(lambda engine: None)
    result = running.dump(timeout_s=5.0)
    assert sorted(result) == ["rank0", "rank1", "rank2", "rank3"]
    running.abort("enough")
    assert running.wait(20).outcome == "failed"


def test_engines_serve_several_collectives():
    lab = RankLab(lambda engine: engine.over())
    with Engines.start(lab, RANK_OF) as engines:
        for _ in range(2):
            result = start(None, engines=engines, lab=lab).wait(10)
            assert result.outcome == "completed"
            assert not result.samples, "of the collective before"
            assert not any(engine.ended for engine in lab.engines)
    assert len(lab.engines) == 4
    assert all(engine.ended for engine in lab.engines)


def test_collective_on_engines_of_too_few_hosts_is_refused():
    lab = RankLab(None)
    with Engines.start(lab, ["host1", "host2"]) as engines, pytest.raises(UsageError, match="not run on host3, host4"):
        start(None, engines=engines, lab=lab)


@pytest.mark.parametrize(
    ("message", "position"),
    [
        ({"phase": "compute", "iteration": 5, "lanes": []}, "iteration 5, compute"),
        ({"phase": "comm", "iteration": 5, "lanes": []}, "iteration 5, at its end"),
    ],
)
def test_rank_position_without_waiting_is_its_phase(message, position):
    assert flight_recorder.standing(message) == position


@pytest.mark.parametrize("count", [2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("size_bytes", [4, 1 << 16, 1 << 24])
@pytest.mark.parametrize("qps", [1, 4])
def test_rank_data_in_flight_is_independent_of_its_number_of_peers(count, size_bytes, qps):
    spec = CollectiveSpec(collective="all-to-all", size_bytes=size_bytes * count, qps_per_peer=qps)
    made = schedules.build("all-to-all", "full-mesh", cost.shape_for(count, spec.size_bytes))
    places = [Endpoint(host=f"host{rank}", rnic="rxe0", address="192.0.2.1") for rank in range(count)]
    plan = rank_plan("x", spec, places, schedules.programs(made, collective.layout(spec, count)), iterations=1)
    for task in plan.tasks:
        segment_bytes, lanes = task.spec["segment_bytes"], len(task.spec["lanes"]) // 2
        assert 0 < segment_bytes <= min(spec.segment_bytes, size_bytes)
        under_way = task.spec["window"] * segment_bytes * lanes
        assert under_way <= max(2 * spec.slots * spec.segment_bytes, 4 * 65536 * lanes)
        rings = task.spec["slots"] * segment_bytes * lanes
        assert under_way <= rings <= max(4 * spec.slots * spec.segment_bytes, under_way)
