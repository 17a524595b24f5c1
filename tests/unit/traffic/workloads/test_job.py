"""Jobs: the collectives of all groups, in one program per rank."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from engine_labs import NothingStarts
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import Lanes, inputs_of
from samples import samples

from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.traffic import schedules
from faultbed.traffic.engine.run_results import Endpoint
from faultbed.traffic.schedules import cost
from faultbed.traffic.workloads import collective, job
from faultbed.traffic.workloads.collective import CollectiveSpec
from faultbed.traffic.workloads.job import JobPhase, JobSpec
from faultbed.traffic.workloads.ranks import group_size, host_group_size

TOPOLOGY = lab_inventory.load(Path("inventory/soft.yml")).topology
NETWORK = cost.NETWORKS["soft"]


def test_job_groups_differ_in_one_dimension_only():
    grid = (("tp", 2), ("pp", 3), ("dp", 2))
    assert job.groups(grid, "tp") == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
    assert job.groups(grid, "pp") == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    assert job.groups(grid, "dp") == ((0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11))


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_job_groups_of_a_dimension_hold_every_rank_once(sizes):
    grid = tuple((f"d{index}", size) for index, size in enumerate(sizes))
    for name, size in grid:
        members = job.groups(grid, name)
        assert sorted(rank for group in members for rank in group) == list(range(prod(sizes)))
        assert {len(group) for group in members} == {size}


def test_job_sixteen_two_rank_all_reduces_are_independent():
    """The job has 32 GPUs and data parallelism of two, so sixteen collectives run at once."""
    spec = JobSpec(
        grid=(("tp", 16), ("dp", 2)),
        phases=(JobPhase(along="dp", collective="all-reduce", size_bytes=4096, algorithm="ring"),),
    )
    made, _ = job.job_programs(spec, NETWORK)
    assert len(made) == 32
    assert set(schedules.peers_of(made)) == {(r, (r + 16) % 32) for r in range(32)}


@given(
    sizes=st.lists(st.integers(2, 3), min_size=1, max_size=2),
    names=st.lists(
        st.sampled_from(["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "barrier"]),
        min_size=1,
        max_size=3,
    ),
    segment=st.integers(2, 20),
    choice=st.randoms(use_true_random=False),
)
@settings(max_examples=samples(60))
def test_job_phases_are_right_whichever_rank_is_slow(sizes, names, segment, choice):
    grid = tuple((f"d{index}", size) for index, size in enumerate(sizes))
    phases = tuple(
        JobPhase(along=choice.choice(grid)[0], collective=name, size_bytes=4 * 6 * choice.randint(1, 5))
        for name in names
    )
    made, _ = job.job_programs(JobSpec(grid=grid, phases=phases), NETWORK)
    assert_right_whoever_is_slow(made, len(phases), segment, choice)


def assert_right_whoever_is_slow(made, phases, segment, choice):
    """Run programs in any allowed order, and compare every result with the sum of its inputs."""
    longest = 10_000  # patterns of later phases begin further on
    lanes = Lanes(made, longest, segment=segment, slots=2)
    while ready := list(lanes.moves()):
        lanes.do(*choice.choice(ready))
    assert lanes.are_done()
    for program, memory, plan in zip(made, lanes.data, lanes.plans, strict=True):
        assert len(plan.phases) == phases
        for offset, count, source, index in program["results"]:
            members = program["groups"][-1 - source] if source < 0 else [source]
            want = sum(inputs_of(rank, longest)[index : index + count] for rank in members)
            assert (memory[offset : offset + count] == want).all()


@given(
    name=st.sampled_from(["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast"]),
    choice=st.randoms(use_true_random=False),
)
@settings(max_examples=samples(30))
def test_job_hierarchical_phase_follows_rank_placement(name, choice):
    """A group of four ranks on two hosts reduces within hosts first and across them second, with correct results."""
    phase = JobPhase(along="dp", collective=name, size_bytes=4 * 24, algorithm="hierarchical")
    spec = JobSpec(grid=(("dp", 4), ("tp", 2)), phases=(phase,))
    made, algorithms = job.job_programs(spec, NETWORK, lambda members: 2)
    assert algorithms == ("hierarchical",)
    across = {(src, dst) for src, dst in schedules.peers_of(made) if src // 2 != dst // 2}
    if name != "broadcast":
        assert all(src % 2 == dst % 2 for src, dst in across), "only ranks of one local index talk across places"
    assert_right_whoever_is_slow(made, 1, 7, choice)


@pytest.mark.parametrize("error", [{(0, 1): 1, (2, 3): 1}, {(0, 1): 2, (2, 3): 1}])
def test_job_hierarchical_phase_without_a_hierarchy_is_rejected(error):
    """Such a phase used to run as a plain ring under that name."""
    phase = JobPhase(along="dp", collective="all-reduce", size_bytes=96, algorithm="hierarchical")
    with pytest.raises(UsageError, match="hierarchical all-reduce along dp needs groups that span several hosts"):
        job.job_programs(JobSpec(grid=(("dp", 2), ("tp", 2)), phases=(phase,)), NETWORK, error.__getitem__)


RACK = cost.NETWORKS["rack"]


@pytest.mark.parametrize(
    ("network", "together", "size", "chosen"),
    [
        (RACK, lambda _: 4, 64 << 20, True),
        (RACK, lambda _: 1, 64 << 20, False),
        (RACK, lambda members: 4 if members[0] else 1, 64 << 20, False),
        (NETWORK, lambda _: 4, 64, False),
    ],
)
def test_job_auto_is_hierarchical_where_the_model_predicts_it_faster(network, together, size, chosen):
    """With groups of eight ranks, four per host, the cost model's choice is never slower than the previous one."""
    phase = JobPhase(along="dp", collective="all-reduce", size_bytes=size)
    spec = JobSpec(grid=(("dp", 8), ("tp", 2)), phases=(phase,))
    made, (algorithm,) = job.job_programs(spec, network, together=together)
    assert (algorithm == "hierarchical") is chosen
    if chosen:
        named, _ = job.job_programs(
            replace(spec, phases=(replace(phase, algorithm="hierarchical"),)), network, lambda _: 4
        )
        assert made == named
        shape = cost.shape_for(8, size, group=4)
        times = {
            name: cost.predict_ns(schedules.build("all-reduce", name, shape), size, network, group=4)
            for name in schedules.algorithms_for("all-reduce")
        }
        assert min(times, key=times.get) == "hierarchical"


@pytest.mark.parametrize("size", [4096, 65536, 262144, 1 << 20, 16 << 20])
@pytest.mark.parametrize("name", ["all-reduce", "all-to-all", "broadcast"])
def test_job_auto_algorithm_equals_that_of_a_collective(name, size):
    """A collective used to treat racks as hosts, and chose full-mesh where a job chose a faster algorithm."""
    lab = NothingStarts()
    spec = CollectiveSpec(collective=name, size_bytes=size, iterations=1)
    _, schedule, _ = collective.fit(lab, spec)
    phase = JobPhase(along="dp", collective=name, size_bytes=size)
    _, (algorithm,) = job.job_programs(JobSpec(grid=(("dp", 4),), phases=(phase,)), NETWORK)
    assert schedule.algorithm == algorithm


def test_cost_near_and_far_traffic_share_a_single_network():
    """A soft lab has one network, however ranks are grouped. With two networks, both are used at once."""
    shape = cost.shape_for(4, 1 << 20, group=2)
    schedule = schedules.build("all-reduce", "full-mesh", shape)
    alike, two = (
        [cost.predict_ns(schedule, 1 << 20, network, group=group) for group in (1, 2)] for network in (NETWORK, RACK)
    )
    assert alike[0] == alike[1]
    assert two[1] < two[0]


@pytest.mark.parametrize(("kind", "alike"), [("rack", True), ("soft", False)])
def test_job_start_uses_rank_placement_on_a_rack_only(kind, alike, monkeypatch):
    """On a soft lab, ranks of one host cannot communicate directly, so placement is ignored there."""
    lab = NothingStarts()
    lab.kind = kind
    monkeypatch.setattr(job, "begin", lambda _lab, plan, *_, **__: [task.spec["program"] for task in plan.tasks])
    ranks = tuple(f"host{host}:rxe{rnic}" for host in (1, 2) for rnic in (0, 1))

    def programs(algorithm):
        phase = JobPhase(along="dp", collective="all-gather", size_bytes=64 << 20, algorithm=algorithm)
        return job.start(lab, JobSpec(grid=(("dp", 4),), phases=(phase,), ranks=ranks))

    assert (programs("auto") == programs("hierarchical")) is alike


def test_group_size_separates_ranks_of_one_host_from_ranks_of_one_rack():
    places = [Endpoint(host=host, rnic=rnic, address="") for host in ("host1", "host3") for rnic in ("rxe0", "rxe1")]
    assert (host_group_size(places), group_size(TOPOLOGY, places)) == (2, 2)
    assert (host_group_size(places[::2] + places[1::2]), host_group_size(places[:2])) == (1, 1)
    apart = [Endpoint(host=f"host{number}", rnic="rxe0", address="") for number in (1, 2, 3, 4)]
    assert (host_group_size(apart), group_size(TOPOLOGY, apart)) == (1, 2)


DP = JobPhase(along="dp", collective="all-reduce", size_bytes=4096)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": ()}, "a grid needs dimensions"),
        ({"grid": (("dp", 2), ("dp", 2))}, 'different names .* got "dp=2, dp=2"'),
        ({"grid": (("tp", 4),)}, 'the grid has no dimension "dp"; it has tp'),
        ({"grid": (("tp", 4), ("dp", 1))}, "has groups of 1 rank; it needs at least 2"),
        ({"grid": (("tp", 4), ("dp", 2))}, "a grid of tp 4 x dp 2 has 8 ranks, but 4 RNICs are given"),
        ({"phases": ()}, "at least one phase"),
        ({"phases": (JobPhase(along="dp", collective="all-reduce", size_bytes=0),)}, "multiple of 4 bytes"),
        ({"phases": (JobPhase(along="dp", collective="gossip", size_bytes=64),)}, 'no collective "gossip"'),
        ({"iterations": 0}, "at least 1 iteration"),
        (
            {"phases": (JobPhase(along="dp", collective="all-reduce", size_bytes=96, algorithm="hierarchical"),)},
            "hierarchical all-reduce along dp",
        ),
    ],
)
def test_job_rejects_invalid_specs(change, message):
    with pytest.raises(UsageError, match=message):
        job.start(NothingStarts(), JobSpec(**{"grid": (("tp", 2), ("dp", 2)), "phases": (DP,), **change}))
