"""Placement of ranks: every policy uses each RNIC once, and heavy neighbours come near."""

import itertools
import json

import pytest
from click.testing import CliRunner
from house import HOUSE
from hypothesis import given, settings
from hypothesis import strategies as st

from faultbed.harness.cli.main import cli
from faultbed.harness.experiment.experiment_file import load
from faultbed.harness.model.job_placement import POLICIES, crossing, placed, spares
from faultbed.harness.model.routing_prediction import job_traffic
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.traffic.workloads.job import JobPhase

ZONES = lab_inventory.load(HOUSE / "inventory/soft-zones-8.yml").topology
FIRST = tuple(name for name in ZONES.rnic_names if name.endswith(":rxe0"))
JOB = HOUSE / "docs/sweeps/placement.toml"


def traffic_of(sizes, grid=(("tp", 2), ("pp", 2), ("dp", 2)), **more):
    """Return a job with an all-reduce of the given bytes along each dimension."""
    phases = [
        JobPhase(along=name, collective="all-reduce", size_bytes=size, algorithm="ring")
        for (name, _), size in zip(grid, sizes, strict=True)
        if size
    ]
    ranks = 1
    for _, size in grid:
        ranks *= size
    return job_traffic(phases, rnics=ranks, lab_kind="soft", grid=grid, **more)


def put(policy, traffic, rnics=FIRST, seed=1):
    return placed(policy, ZONES, traffic, rnics, seed=seed, is_local_refused=True)


@pytest.mark.parametrize("policy", POLICIES)
@given(sizes=st.tuples(*[st.sampled_from([0, 4096, 1 << 20])] * 3).filter(any), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_each_policy_uses_each_rnic_once_and_repeats_itself(policy, sizes, seed):
    traffic = traffic_of(sizes)
    ranks = put(policy, traffic, seed=seed)
    assert sorted(ranks) == sorted(FIRST)
    assert put(policy, traffic, rnics=tuple(reversed(FIRST)), seed=seed) == ranks


@pytest.mark.parametrize("order", list(itertools.permutations([1 << 20, 1 << 16, 1 << 12])))
def test_layers_send_least_across_zones_whichever_dimension_sends_most(order):
    """A grid of 2 x 2 x 2 on two zones of four hosts: only the dimension that sends least crosses."""
    traffic = traffic_of(order)
    least = traffic.grid[order.index(1 << 12)][0]
    for policy in ("layered", "min-cut"):
        assert crossing(ZONES, traffic, put(policy, traffic)).zones == (least,)
    drawn = [crossing(ZONES, traffic, put("random", traffic, seed=seed)).zone_bytes for seed in range(20)]
    assert min(drawn) >= crossing(ZONES, traffic, put("min-cut", traffic)).zone_bytes


@given(sizes=st.tuples(*[st.sampled_from([0, 4096, 1 << 16, 1 << 20])] * 2).filter(any))
@settings(deadline=None, max_examples=20)
def test_min_cut_is_never_worse_than_layers(sizes):
    """Also where a dimension of 3 does not divide a zone of 4."""
    traffic = traffic_of(sizes, grid=(("tp", 3), ("dp", 2)))
    by_cut, by_layer = (crossing(ZONES, traffic, put(policy, traffic)) for policy in ("min-cut", "layered"))
    assert (by_cut.zone_bytes, by_cut.rack_bytes) <= (by_layer.zone_bytes, by_layer.rack_bytes)


def test_min_cut_of_a_small_job_is_the_best_of_all_orders():
    traffic = traffic_of((1 << 20, 1 << 14), grid=(("tp", 2), ("dp", 3)))
    rnics = FIRST[1:7]
    best = min(crossing(ZONES, traffic, order).zone_bytes for order in itertools.permutations(rnics))
    assert crossing(ZONES, traffic, put("min-cut", traffic, rnics=rnics)).zone_bytes == best


def test_ranks_never_share_a_host_that_cannot_carry_their_data():
    """Linux delivers data within a soft host by its loopback, where rxe does not listen."""
    traffic = traffic_of((1 << 20, 1 << 14), grid=(("tp", 2), ("dp", 3)))
    ranks = put("min-cut", traffic, rnics=ZONES.rnic_names)
    sent = [(ranks[a], ranks[b]) for a, b in ((0, 1), (2, 3), (4, 5), (0, 2), (2, 4), (1, 3), (3, 5))]
    assert all(a.partition(":")[0] != b.partition(":")[0] for a, b in sent)


def test_spares_next_to_most_ranks_come_first():
    assert spares(ZONES, FIRST[:3], FIRST)[0] == FIRST[3]
    assert spares(ZONES, FIRST, ZONES.rnic_names) == ()


def ran(*words):
    return CliRunner().invoke(cli, ["--lab", "soft-zones-8", "place", *map(str, words)])


def test_place_shows_every_policy_and_writes_one(tmp_path):
    document = json.loads(ran(JOB, "--json").output)
    by_policy = {row["policy"]: row for row in document["placements"]}
    assert list(by_policy) == ["as given", *POLICIES]
    assert by_policy["layered"]["iteration_s"]["median"] <= 0.8 * by_policy["as given"]["iteration_s"]["median"]
    path = tmp_path / "placed.toml"
    assert ran(JOB, "--policy", "layered", "--write", path).exit_code == 0
    assert list(load(path).workload.ranks) == by_policy["layered"]["ranks"]
    again = ran(JOB, "--policy", "layered", "--write", path)
    assert isinstance(again.exception, UsageError) or "exists already" in again.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--write", "x.toml"), "name the one --policy"),
        (("--on", "host1"), "--on host1: a host; name an RNIC"),
        (("--on", "host1:rxe0"), "--on: 1 RNICs for a job on 8"),
        (("--on", "host9:rxe0"), "host9"),
    ],
)
def test_place_refuses_in_one_sentence(words, says):
    answer = ran(JOB, *words)
    assert says in str(answer.exception)
    assert answer.exit_code != 0


def test_place_needs_a_workload_with_ranks(tmp_path):
    path = tmp_path / "flow.toml"
    path.write_text('name = "f"\n[workload]\nflow = "write"\nsrc = "host1:rxe0"\ndst = "host3:rxe0"\nduration = "1s"\n')
    assert "only jobs (grid) and collectives have ranks" in str(ran(path).exception)
