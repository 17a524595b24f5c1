"""Several ranks per RNIC: concurrent two-rank collectives, and how much they slow each other down."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from local_traffic import LocalLab

from faultbed.testbed.errors import UsageError
from faultbed.traffic.workloads import interference, job
from faultbed.traffic.workloads.job import GroupTime, JobPhase, JobSpec
from faultbed.traffic.workloads.ranks import place

PHASE = JobPhase(along="tp", collective="all-reduce", size_bytes=1 << 14, algorithm="ring")
SIXTEEN = JobSpec(
    grid=(("tp", 2), ("dp", 16)), phases=(PHASE,), ranks=("host1", "host3"), ranks_per_rnic=16, iterations=3
)


def test_ranks_per_rnic_repeats_the_order_of_rnics():
    lab = LocalLab(None)
    names = [rank.name for rank in place(lab, JobSpec(grid=(), phases=(), ranks=("host1", "host3"), ranks_per_rnic=3))]
    assert names == ["host1:rxe0", "host3:rxe0"] * 3
    with pytest.raises(UsageError, match="at least 1 rank, got ranks_per_rnic 0"):
        place(lab, JobSpec(grid=(), phases=(), ranks_per_rnic=0))
    with pytest.raises(UsageError, match="at most 128 ranks, got 132"):
        place(lab, JobSpec(grid=(), phases=(), ranks_per_rnic=22))


@pytest.fixture
def lab(tmp_path):
    made = LocalLab(tmp_path)
    yield made
    made.close()


def test_sixteen_two_rank_collectives_share_two_rnics_with_correct_results(lab):
    with job.start(lab, SIXTEEN) as running:
        together = running.wait(60)
    assert (together.outcome, together.where, together.wrong_elements) == ("completed", None, 0)
    assert [len(rank) for rank in together.iterations] == [3] * 32
    assert len(together.connections) == 32
    assert {(connection.src, connection.dst) for connection in together.connections} == {
        ("host1:rxe0", "host3:rxe0"),
        ("host3:rxe0", "host1:rxe0"),
    }
    jobs = interference.alone(SIXTEEN, together.ranks, together.algorithms)
    assert list(jobs) == [(0, ("host1:rxe0", "host3:rxe0"))], "groups on the same RNICs are alike"
    results = {}
    for where, spec in jobs.items():
        with job.start(lab, spec) as running:
            results[where] = running.wait(60)
        assert [len(rank) for rank in results[where].iterations] == [3] * 2
    disturbed = interference.interference(together, results)
    assert [one.members for one in disturbed] == [(2 * group, 2 * group + 1) for group in range(16)]
    assert all(one.ratio == one.together_ns / one.alone_ns > 0 for one in disturbed)


def test_interference_compares_each_group_with_a_run_alone_and_skips_groups_that_did_not_run():
    """Two phases on four RNICs: groups along dp use other RNICs than groups along tp."""
    spec = JobSpec(
        grid=(("tp", 2), ("dp", 2)), phases=(PHASE, JobPhase(along="dp", collective="all-reduce", size_bytes=4096))
    )
    ranks = ("a", "b", "c", "d")
    jobs = interference.alone(spec, ranks, ("ring", "tree"))
    assert list(jobs) == [(0, ("a", "b")), (0, ("c", "d")), (1, ("a", "c")), (1, ("b", "d"))]
    assert jobs[1, ("b", "d")].grid == (("dp", 2),)
    assert jobs[1, ("b", "d")].phases == (replace(spec.phases[1], algorithm="tree"),), "auto chose it for the whole job"

    def result(*times, outcome="completed", wrong_elements=0):
        groups = [
            GroupTime(phase=phase, members=members, time_ns=time_ns, busbw_gbytes_per_s=0.0)
            for (phase, members), time_ns in times
        ]
        return SimpleNamespace(ranks=ranks, groups=groups, outcome=outcome, wrong_elements=wrong_elements)

    together = result(((0, (0, 1)), 30.0), ((0, (2, 3)), 20.0), ((1, (0, 2)), 8.0), ((1, (1, 3)), 0.0))
    alone = {
        (0, ("a", "b")): result(((0, (0, 1)), 10.0)),
        (0, ("c", "d")): result(((0, (0, 1)), 0.0)),
        (1, ("a", "c")): result(((0, (0, 1)), 8.0)),
        (1, ("b", "d")): result(((0, (0, 1)), 8.0)),
    }
    disturbed = interference.interference(together, alone)
    assert [(one.phase, one.members, one.ratio) for one in disturbed] == [(0, (0, 1), 3.0), (1, (0, 2), 1.0)]
    alone[0, ("a", "b")] = result(((0, (0, 1)), 10.0), outcome="failed")
    alone[1, ("a", "c")] = result(((0, (0, 1)), 8.0), wrong_elements=1)
    assert interference.interference(together, alone) == ()


def test_a_group_that_has_several_ranks_on_an_rnic_has_them_alone_too():
    lab = LocalLab(None)
    spec = replace(SIXTEEN, grid=(("tp", 4), ("dp", 2)), ranks_per_rnic=4)
    places, _, algorithms = job.fit(lab, spec)
    ((where, one),) = interference.alone(spec, [place.name for place in places], algorithms).items()
    assert where == (0, ("host1:rxe0", "host3:rxe0") * 2)
    assert (one.ranks, one.ranks_per_rnic) == (("host1:rxe0", "host3:rxe0"), 2)
    assert job.fit(lab, one)[0] == places[:4]


def test_a_group_with_more_ranks_on_some_rnics_is_refused():
    spec = replace(SIXTEEN, grid=(("tp", 3), ("dp", 2)), ranks_per_rnic=3)
    with pytest.raises(UsageError, match=r"group of ranks 0, 1, 2 has more ranks on some of its RNICs.*another grid"):
        interference.alone(spec, ("a", "b") * 3, ("ring",))
