"""Parts of an operation's time: each moment belongs to exactly one part, the right one."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from local_traffic import LocalLab
from memory_fabric import CLOCK, Fabric, Rnic, modules
from synthetic_run import changed, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.traffic import schedules
from faultbed.traffic.engine import latency_split
from faultbed.traffic.engine.run_results import Endpoint, Iteration
from faultbed.traffic.node.ranks import parts_clock as on_node
from faultbed.traffic.schedules import cost
from faultbed.traffic.workloads import collective
from faultbed.traffic.workloads.collective import CollectiveSpec
from faultbed.traffic.workloads.ranks import rank_plan

PLACES = [Endpoint(host=f"host{number}", rnic="rxe0", address="192.0.2.1") for number in (1, 2)]
SPEC = CollectiveSpec(collective="all-to-all", algorithm="full-mesh", size_bytes=1 << 16, segment_bytes=1024)


def ranks_of(monkeypatch, spec, iterations=3):
    """Two connected ranks on a fabric in this process."""
    node, fabric = modules(monkeypatch), Fabric(random.Random(7))
    schedule = schedules.build(spec.collective, spec.algorithm, cost.shape_for(2, spec.size_bytes))
    programs = schedules.programs(schedule, collective.layout(spec, 2))
    plan = rank_plan("x", spec, PLACES, programs, iterations=iterations)
    for task in plan.tasks:
        made = node.rank.RankTask(task.name, Rnic("rxe0"), dict(task.spec), fabric.emit_for(task.name), None)
        fabric.tasks[task.name] = made
    fabric.connect(
        [fabric.connection(node, connection.index, connection.src, connection.dst) for connection in plan.connections]
    )
    return fabric


def iteration(index=0, comm_ns=10, split_ns=()):
    return Iteration(
        index=index, start_ns=0, end_ns=comm_ns, compute_ns=0, comm_ns=comm_ns, wait_ns=0, wrong_elements=0,
        split_ns=split_ns,
    )  # fmt: skip


def test_parts_have_the_same_names_on_nodes_and_controller():
    assert latency_split.PARTS == on_node.PARTS


def test_rank_parts_add_up_to_the_time_of_each_operation(monkeypatch):
    fabric = ranks_of(monkeypatch, SPEC)
    fabric.run(list(fabric.tasks))
    reports = [fields for _, event, fields in fabric.events if event == "iteration"]
    assert len(reports) == 6
    for fields in reports:
        assert sum(fields["split_ns"]) == fields["comm_ns"]
        parts = dict(zip(on_node.PARTS, fields["split_ns"], strict=True))
        assert min(parts["post"], parts["copy"], parts["completion"]) > 0
        assert parts["wire"] == parts["credit"] == 0  # this fabric never sleeps


@pytest.mark.parametrize(("part", "method"), [("post", "post_send"), ("copy", "reduce")])
def test_rank_slow_call_is_in_its_own_part(monkeypatch, part, method):
    """The mutation: 3 ms more in one call appear in one part, and in no other."""
    fabric = ranks_of(monkeypatch, replace(SPEC, collective="all-reduce", algorithm="ring"), iterations=1)
    task = fabric.tasks["rank0"]
    for owner in [task.memory] if method == "reduce" else [conn.qp for conn in task.conns.values()]:
        monkeypatch.setattr(owner, method, slowed(getattr(owner, method)))
    fabric.run(list(fabric.tasks))
    reports = [fields for name, event, fields in fabric.events if (name, event) == ("rank0", "iteration")]
    (split_ns,) = [fields["split_ns"] for fields in reports]
    parts = dict(zip(on_node.PARTS, split_ns, strict=True))
    assert parts[part] >= 3_000_000 * 8
    assert parts[part] > 0.6 * sum(split_ns), parts


def slowed(function):
    def call(*args):
        CLOCK.sleep(0.003)
        return function(*args)

    return call


def test_rank_idle_while_the_peer_sends_no_credit_waits_for_credit(monkeypatch):
    """Rank 1 does not start and returns no credits, so rank 0 fills the ring and then waits for credit."""
    fabric = ranks_of(monkeypatch, SPEC)
    sender = fabric.tasks["rank0"]
    sender.begin(CLOCK.monotonic_ns())
    sender.slept(CLOCK.monotonic_ns(), CLOCK.monotonic_ns())
    assert not sender.executor.clock.needs_credit  # its window is full, so it waits for acknowledgements
    fabric.drain()
    assert sender.executor.clock.needs_credit
    before, now_ns = sender.executor.clock.parts_ns[on_node.CREDIT], CLOCK.monotonic_ns()
    sender.slept(now_ns, now_ns + 5_000_000)
    assert sender.executor.clock.parts_ns[on_node.CREDIT] - before == 5_000_000
    fabric.tasks["rank1"].begin(CLOCK.monotonic_ns())
    fabric.drain()
    assert all(task.finished for task in fabric.tasks.values())


def test_split_idle_time_is_wire_and_a_pause_is_nowhere():
    split = on_node.PartsClock()
    split.begin(100)
    split.idle(130, 200, is_pause=False)
    split.idle(210, 1000, is_pause=True)
    assert split.end(1005) == [0, 0, 70, 0, 30 + 10 + 5]


def test_latency_split_is_that_of_the_last_rank_of_each_operation():
    late = [iteration(0, 10, (1, 0, 5, 3, 1)), iteration(1, 90, (0, 0, 90, 0, 0))]
    early = [iteration(0, 80, (0, 0, 80, 0, 0)), iteration(1, 20, (3, 2, 5, 7, 3))]
    split = latency_split.latency_split([late, early])
    assert split.operations == 2
    assert split.parts_ns == {"post": 2, "credit": 1, "wire": 5, "copy": 5, "completion": 2}
    assert split.shares["wire"] == pytest.approx(1 / 3)
    assert str(split).startswith("post 0 us (13%), credit 0 us (7%), wire 0 us (33%)")


@pytest.mark.parametrize("per_rank", [[], [[], []], [[iteration()], [iteration()]]])
def test_latency_split_without_recorded_operations_is_none(per_rank):
    assert latency_split.latency_split(per_rank) is None


def test_engines_report_where_the_time_of_a_collective_went(tmp_path):
    lab = LocalLab(tmp_path)
    try:
        spec = replace(SPEC, ranks=("host1", "host2"), iterations=5)
        with collective.start(lab, spec) as running:
            result = running.wait(60)
    finally:
        lab.close()
    assert (result.outcome, result.wrong_elements) == ("completed", 0)
    for rank in result.iterations:
        assert [sum(item.split_ns) for item in rank] == [item.comm_ns for item in rank]
    mean_ns = np.mean([min(rank[index].comm_ns for rank in result.iterations) for index in range(5)])
    assert sum(result.latency_split.parts_ns.values()) == pytest.approx(mean_ns)
    assert result.to_dict()["latency_split"]["operations"] == 5


def test_metrics_of_the_split_are_shares_with_intervals():
    run = synthetic_run()
    choice = np.random.default_rng(3)

    def recorded(item):
        parts = choice.normal([300, 5, 400, 100, 200], 10)
        return msgspec.structs.replace(item, split_ns=tuple(int(part) for part in parts))

    series = tuple(
        msgspec.structs.replace(rank, iterations=tuple(map(recorded, rank.iterations))) for rank in run.workload.series
    )
    metrics = observe(changed(run, series=series)).metrics
    wire = metrics["split.wire"]
    assert wire.value == pytest.approx(0.4, abs=0.02)
    assert wire.interval.low < wire.value < wire.interval.high
    shares = [metrics[f"split.{name}"].value for name in latency_split.PARTS]
    assert sum(shares) == pytest.approx(1)
    without = observe(run).metrics["split.wire"]
    assert (without.value, "no collective" in without.detail) == (None, True)
