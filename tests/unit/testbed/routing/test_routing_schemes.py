"""Routing schemes: the hash, the paths, the load of each link by scheme, and the search for conflicts."""

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import samples

from faultbed.harness.cli.main import cli
from faultbed.harness.experiment import experiment_file
from faultbed.harness.model.routing_prediction import ALL_RANKS, flows_of, job_traffic, predict
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.model.topology import Link, Port, Switch, Topology
from faultbed.testbed.routing.jenkins_hash import jhash, nft_jhash
from faultbed.testbed.routing.offered_load import Fabric, max_over_mean, offered_load, tier_mmr, uplink_mmr
from faultbed.testbed.routing.replacements import replacements
from faultbed.testbed.routing.schemes import SCHEMES, Choice, Flow, Routing, bucket_counts, scheme_named
from faultbed.testbed.routing.valley_free import ValleyFreePaths
from faultbed.testbed.shipped import inventory_named
from faultbed.traffic.schedules import build
from faultbed.traffic.schedules.cost import shape_for
from faultbed.traffic.schedules.traffic_matrix import pair_bytes
from faultbed.traffic.workloads.job import JobPhase, JobSpec
from faultbed.traffic.workloads.job import fit as fit_job

LAB = lab_inventory.load(inventory_named("soft-3rack")).topology
JOB = tuple(f"host{number}:rxe0" for number in (1, 2, 3, 4))
REPLACED = (*JOB[:3], "host5:rxe0")


def flow(src="host1:rxe0", dst="host3:rxe0", *, size_bytes=1.0, src_port=50000, dst_qpn=17):
    return Flow(src=src, dst=dst, size_bytes=size_bytes, src_port=src_port, dst_qpn=dst_qpn)


def all_pairs(ranks):
    return [flow(src, dst) for src in ranks for dst in ranks if src != dst]


def three_tiers():
    """Return a topology with two zones: RTSWs r1 to r4, two CTSWs per zone and two ATSWs. Hosts have no links."""
    switches, links = [], []

    def switch(name, role, zone):
        rack = f"rack{name[1:]}" if role == "rtsw" else None
        switches.append(
            Switch(name=name, role=role, zone=zone, rack=rack, asn=65000, loopback="10.0.0.1/32", carrier="fabric")
        )

    def link(low, high):
        ends = [Port(node=node, netdev=f"to-{far}", mac="", address=None) for node, far in ((low, high), (high, low))]
        links.append(Link(a=ends[0], b=ends[1], rnic=None))

    for zone in (1, 2):
        for number in (1, 2):
            switch(f"r{2 * (zone - 1) + number}", "rtsw", f"zone{zone}")
            switch(f"c{2 * (zone - 1) + number}", "ctsw", f"zone{zone}")
        for rack in (1, 2):
            for spine in (1, 2):
                link(f"r{2 * (zone - 1) + rack}", f"c{2 * (zone - 1) + spine}")
    for number in (1, 2):
        switch(f"a{number}", "atsw", "zone1")
    for spine in (1, 2, 3, 4):
        for number in (1, 2):
            link(f"c{spine}", f"a{number}")
    return Topology(hosts=(), switches=tuple(switches), links=tuple(links))


def names(links):
    return [link.name for link in links]


@pytest.mark.parametrize(
    ("key", "seed", "expected"),
    [
        (b"", 0, 0xDEADBEEF),
        (b"Four score and seven years ago", 0, 0x17770551),
        (b"Four score and seven years ago", 1, 0xCD628161),
    ],
)
def test_jhash_of_published_vectors(key, seed, expected):
    """The vectors of lookup3.c's own driver (Bob Jenkins, public domain)."""
    assert jhash(key, seed) == expected


@given(key=st.binary(min_size=3, max_size=3), modulus=st.integers(1, 64), seed=st.integers(0, 2**32 - 1))
def test_nft_jhash_is_below_its_modulus(key, modulus, seed):
    assert 0 <= nft_jhash(key, modulus=modulus, seed=seed) < modulus


def test_paths_inside_a_zone_use_its_spines_only():
    paths = ValleyFreePaths(three_tiers())
    assert names(paths.next_hops("r1", "r2")) == ["r1:c1", "r1:c2"]
    assert names(paths.next_hops("c1", "r2")) == ["r2:c1"]
    assert paths.next_hops("r1", "r1") == ()


def test_paths_across_zones_go_up_to_the_top_and_down():
    paths = ValleyFreePaths(three_tiers())
    assert names(paths.next_hops("r1", "r3")) == ["r1:c1", "r1:c2"]
    assert names(paths.next_hops("c1", "r3")) == ["c1:a1", "c1:a2"]
    assert names(paths.next_hops("a1", "r3")) == ["c3:a1", "c4:a1"]


def test_paths_avoid_a_spine_that_lost_its_downlink():
    """Without r2:c1, c1 could reach r2 only through another rack switch, so r1 must not send it packets for r2."""
    paths = ValleyFreePaths(three_tiers(), failed=frozenset({"r2:c1"}))
    assert names(paths.next_hops("r1", "r2")) == ["r1:c2"]
    assert names(paths.next_hops("a1", "r2")) == ["c2:a1"]


@given(failed=st.sets(st.sampled_from(names(three_tiers().uplinks)), max_size=10))
def test_paths_never_go_up_after_they_went_down(failed):
    topology = three_tiers()
    tier = {switch.name: {"rtsw": 0, "ctsw": 1, "atsw": 2}[switch.role] for switch in topology.switches}
    paths = ValleyFreePaths(topology, failed=frozenset(failed))
    racks = [switch.name for switch in topology.switches if switch.role == "rtsw"]

    def walk(at, target, *, fell, hops):
        assert hops <= 4, "no path of this fabric is longer"
        for link in paths.next_hops(at, target):
            assert link.name not in failed
            far = link.other(at).node
            down = tier[far] < tier[at]
            assert down or not fell, f"{at} sends up what came down, on the way to {target}"
            walk(far, target, fell=down, hops=hops + 1)
        assert at == target or paths.next_hops(at, target) or not hops, f"{at} drops what is for {target}"

    for source in racks:
        for target in racks:
            walk(source, target, fell=False, hops=0)


def test_paths_refuse_a_link_that_does_not_exist():
    with pytest.raises(UsageError, match="rtsw1:ctsw9"):
        ValleyFreePaths(LAB, failed=frozenset({"rtsw1:ctsw9"}))


def test_static_parity_shares_a_whole_job_evenly():
    load = offered_load(Fabric.of(LAB, scheme_named("static-parity")), all_pairs(JOB))
    assert uplink_mmr(LAB, load) == {"rtsw1": 1.0, "rtsw2": 1.0}


def test_static_parity_after_a_replacement_gives_the_ratios_of_the_seed():
    """Servers 1, 2, 3 and 5 remain: rack 1 sends to odd servers only. Of 10 flows across racks, 8 pass one spine."""
    load = offered_load(Fabric.of(LAB, scheme_named("static-parity")), all_pairs(REPLACED))
    assert uplink_mmr(LAB, load) == pytest.approx({"rtsw1": 2.0, "rtsw2": 4 / 3, "rtsw3": 4 / 3})
    assert tier_mmr(LAB, load) == pytest.approx({"ctsw": 1.6})


def test_spray_is_even_for_any_placement():
    load = offered_load(Fabric.of(LAB, scheme_named("spray")), all_pairs(REPLACED))
    assert set(uplink_mmr(LAB, load).values()) == {1.0}


def test_e_ecmp_spreads_queue_pairs_that_share_one_source_port():
    """All queue pairs have one source port, so ECMP uses one uplink. E-ECMP also hashes the destination queue pair."""
    flows = [flow(dst_qpn=number) for number in range(17, 17 + 256)]
    ecmp = uplink_mmr(LAB, offered_load(Fabric.of(LAB, scheme_named("ecmp")), flows))["rtsw1"]
    by_queue_pair = uplink_mmr(LAB, offered_load(Fabric.of(LAB, scheme_named("e-ecmp")), flows))["rtsw1"]
    assert ecmp == 2.0
    assert by_queue_pair < 1.25


def test_weighted_gives_a_link_its_share():
    flows = [flow(src_port=49152 + number) for number in range(4000)]
    routing = Routing(weights={"rtsw1:ctsw1": 3.0})
    load = offered_load(Fabric.of(LAB, scheme_named("weighted"), routing), flows)
    assert load["rtsw1:ctsw1", "rtsw1"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_sprayed_packets_of_a_dead_next_hop_all_take_one_other():
    """The marks still name it, and its table is empty: its packets take BGP's ECMP, by their 5-tuple."""
    hops = LAB.uplinks[:4]
    at = Choice(topology=LAB, switch="rtsw1", routing=Routing(), flow=flow(), hops=hops, alive=hops[1:])
    shares = scheme_named("spray").choose(at)
    assert [link for link, _ in shares] == list(hops[1:])
    assert sorted(share for _, share in shares) == [0.25, 0.25, 0.5]
    assert scheme_named("spray").choose(dataclasses.replace(at, alive=hops)) == tuple((link, 0.25) for link in hops)


@pytest.mark.parametrize(
    ("buckets", "hops", "counts"), [(128, 2, (64, 64)), (3, 2, (2, 1)), (4, 3, (1, 2, 1)), (2, 3, (1, 0, 1))]
)
def test_buckets_of_a_resilient_group_are_those_of_the_kernel(buckets, hops, counts):
    assert bucket_counts(buckets, hops) == counts


def test_resilient_moves_only_the_flows_of_the_dead_next_hop():
    flows = [flow(src_port=49152 + number) for number in range(64)]
    healthy = Fabric.of(LAB, scheme_named("resilient"))
    hurt = Fabric.of(LAB, scheme_named("resilient"), failed=frozenset({"rtsw1:ctsw1"}))
    for one in flows:
        before, after = (offered_load(fabric, [one]) for fabric in (healthy, hurt))
        assert after["rtsw1:ctsw1", "rtsw1"] == 0
        if before["rtsw1:ctsw2", "rtsw1"]:
            assert after == before


@pytest.mark.parametrize("name", SCHEMES)
@settings(max_examples=samples(30))
@given(
    flows=st.lists(
        st.builds(
            flow,
            st.sampled_from(JOB[:2]),
            st.sampled_from(("host3:rxe0", "host4:rxe1", "host5:rxe0", "host6:rxe1")),
            size_bytes=st.floats(1, 1e9),
            src_port=st.integers(49152, 65535),
            dst_qpn=st.integers(17, 0xFFFFFF),
        ),
        min_size=1,
        max_size=12,
    ),
    failed=st.sampled_from([frozenset(), frozenset({"rtsw1:ctsw1"}), frozenset({"rtsw2:ctsw2"})]),
)
def test_scheme_delivers_every_byte_and_uses_no_failed_link(name, flows, failed):
    load = offered_load(Fabric.of(LAB, scheme_named(name), failed=failed), flows)
    sent = sum(flow.size_bytes for flow in flows)
    spines = {"ctsw1", "ctsw2"}
    assert sum(size for (_, by), size in load.items() if by == "rtsw1") == pytest.approx(sent)
    assert sum(size for (_, by), size in load.items() if by in spines) == pytest.approx(sent)
    assert all(load[link, by] == 0 for link, by in load if link in failed)


def test_offered_load_of_a_rack_that_is_cut_off_is_refused():
    fabric = Fabric.of(LAB, scheme_named("spray"), failed=frozenset({"rtsw1:ctsw1", "rtsw1:ctsw2"}))
    with pytest.raises(UsageError, match="host1:rxe0 cannot reach host3:rxe0: all paths from rtsw1 to rtsw2"):
        offered_load(fabric, [flow()])


def test_conflicts_of_single_replacements_of_a_parity_job():
    actual = list(replacements(Fabric.of(LAB, scheme_named("static-parity")), JOB, all_pairs, replaced=1))
    assert len(actual) == 4 * 2
    worst = {one.moved for one in actual if one.mmr == 2.0}
    assert (("host4", "host5"),) in worst
    assert (("host4", "host6"),) not in worst
    assert next(one for one in actual if one.moved == (("host4", "host5"),)).ranks == REPLACED


@pytest.mark.parametrize(
    ("scheme", "ranks", "replaced", "message"),
    [
        ("ecmp", JOB, 1, "ecmp chooses paths by queue pair"),
        ("pinned", JOB, 3, "cannot replace 3 of 4 hosts; 2 hosts"),
        ("pinned", tuple(f"host{number}:rxe0" for number in range(1, 7)), 1, "0 hosts of this lab have no rank"),
    ],
)
def test_conflicts_that_cannot_be_searched_are_refused(scheme, ranks, replaced, message):
    with pytest.raises(UsageError, match=message):
        list(replacements(Fabric.of(LAB, scheme_named(scheme)), ranks, all_pairs, replaced=replaced))


def test_scheme_that_does_not_exist_is_refused_with_the_nearest_name():
    with pytest.raises(UsageError, match="did you mean static-parity"):
        scheme_named("static-party")


@pytest.mark.parametrize(("values", "ratio"), [([1, 1], 1.0), ([2, 0], 2.0), ([0, 0], None), ([5], None), ([], None)])
def test_max_over_mean(values, ratio):
    assert max_over_mean(values) == ratio


@pytest.mark.parametrize(
    ("collective", "algorithm", "sends"),
    [("all-reduce", "ring", 2 * 3 / 4), ("all-gather", "ring", 3 / 4), ("all-to-all", "full-mesh", 3 / 4)],
)
def test_pair_bytes_of_a_rank_add_up_to_what_nccl_tests_count(collective, algorithm, sends):
    """`doc/PERFORMANCE.md` of nccl-tests: 2 (n - 1) / n of the buffer for all-reduce, (n - 1) / n for the others."""
    sent = pair_bytes(build(collective, algorithm, shape_for(4, 1 << 20)), 1 << 20)
    for rank in range(4):
        assert sum(size for (src, _), size in sent.items() if src == rank) == pytest.approx(sends * 2**20)


def one_collective(collective="all-to-all", *, algorithm="auto", size_bytes=1 << 20, rnics=JOB, **more):
    phase = JobPhase(along=ALL_RANKS, collective=collective, size_bytes=size_bytes, algorithm=algorithm)
    return job_traffic((phase,), rnics=len(rnics), lab_kind="soft", **more)


def test_prediction_of_more_queue_pairs_is_more_even():
    def mean(qps):
        traffic = one_collective(qps_per_peer=qps)
        (answer,) = predict(LAB, JOB, traffic, {"ecmp": Routing()}, draws=60)
        return answer.uplinks["rtsw1"].mean

    one, four, sixteen = mean(1), mean(4), mean(16)
    assert one > four > sixteen > 1


def test_prediction_is_inside_the_exact_distribution():
    """With four flows over two links the busier one has 2, 3 or 4, with probabilities 6, 8 and 2 of 16."""
    draws = samples(2000)
    (answer,) = predict(LAB, JOB, one_collective(), {"ecmp": Routing()}, draws=draws)
    four_errors = 4 * 0.33 / draws**0.5
    assert answer.uplinks["rtsw1"].mean == pytest.approx((6 * 1.0 + 8 * 1.5 + 2 * 2.0) / 16, abs=four_errors)


def test_flows_of_a_collective_split_each_pair_over_its_queue_pairs():
    flows = flows_of(one_collective(qps_per_peer=4, size_bytes=4096), JOB, np.random.default_rng(1))
    assert len(flows) == 4 * 3 * 4
    assert sum(flow.size_bytes for flow in flows) == pytest.approx(4 * 3 * 1024)
    assert len({flow.dst_qpn for flow in flows}) == len(flows)


def test_flows_with_several_ranks_per_rnic_follow_the_repeated_order():
    """Each pair of RNICs has the flows of four pairs of ranks; ranks on one RNIC exchange two more flows."""
    flows = flows_of(one_collective(ranks_per_rnic=2, size_bytes=8192), JOB, np.random.default_rng(1))
    counts = Counter((flow.src, flow.dst) for flow in flows)
    assert {pair: count for pair, count in counts.items() if pair[0] != pair[1]} == dict.fromkeys(
        itertools.permutations(JOB, 2), 4
    )
    assert {counts[rnic, rnic] for rnic in JOB} == {2}
    assert {flow.size_bytes for flow in flows} == {1024}


def test_prediction_with_several_ranks_per_rnic_has_their_flows_and_none_inside_an_rnic():
    """Ranks of one RNIC load no link, so static schemes keep their ratios; more flows make hashed ones more even."""
    traffic, many = one_collective(), one_collective(ranks_per_rnic=4)
    static = {"static-parity": Routing()}
    assert predict(LAB, REPLACED, many, static) == predict(LAB, REPLACED, traffic, static)
    (few,), (more,) = (predict(LAB, JOB, one, {"ecmp": Routing()}, draws=60) for one in (traffic, many))
    assert few.uplinks["rtsw1"].mean > more.uplinks["rtsw1"].mean > 1


def test_prediction_of_a_ring_with_several_ranks_per_rnic_includes_all_ranks():
    """Four ranks on two RNICs of two racks: each sends to the other rack, as the order of RNICs repeats."""
    pair = ("host1:rxe0", "host3:rxe0")
    traffic = one_collective("all-reduce", algorithm="ring", rnics=pair, ranks_per_rnic=2)
    flows = flows_of(traffic, pair, np.random.default_rng(1))
    assert Counter((flow.src, flow.dst) for flow in flows) == {pair: 2, pair[::-1]: 2}


def test_flows_of_a_grid_match_what_the_job_sends():
    """The flows are compared with the programs that the job's ranks really run on the lab's inventory."""
    phases = (
        JobPhase(along="dp", collective="all-reduce", size_bytes=1 << 20),
        JobPhase(along="tp", collective="all-to-all", size_bytes=1 << 16),
        JobPhase(along="dp", collective="all-gather", size_bytes=1 << 18, algorithm="ring"),
    )
    grid = (("tp", 2), ("dp", 2))
    spec = JobSpec(grid=grid, phases=phases, ranks=JOB)
    ranks, programs, algorithms = fit_job(lab_inventory.load(inventory_named("soft-3rack")), spec)
    sent = Counter()
    for mine in programs:
        for _, peer, _, length, *_ in mine["sends"]:
            sent[ranks[mine["rank"]].name, ranks[peer].name] += 4 * length

    traffic = job_traffic(phases, rnics=len(JOB), lab_kind="soft", grid=grid, qps_per_peer=2)
    assert tuple(phase.algorithm for phase in traffic.phases) == algorithms
    predicted = Counter()
    for flow in flows_of(traffic, JOB, np.random.default_rng(1)):
        predicted[flow.src, flow.dst] += flow.size_bytes
    assert predicted == pytest.approx(sent)


def test_groups_that_cross_racks_conflict_and_groups_inside_a_rack_do_not():
    """Hosts 1 and 2 share a rack, so a tensor-parallel group on them sends nothing up."""
    ranks = [word for number in (1, 2, 3, 5) for word in ("--rank", f"host{number}")]

    def answer(*phases):
        words = ["--grid", "tp=2,dp=2", *(word for phase in phases for word in ("--phase", phase))]
        return json.loads(routing("predict", "--scheme", "static-parity", *ranks, *words, "--json").output)[0]

    inside, across = answer("tp:all-reduce:1MiB"), answer("dp:all-reduce:1MiB")
    assert "rtsw1" not in inside["uplinks"]
    assert across["uplinks"]["rtsw1"]["mean"] > 1
    assert answer("tp:all-reduce:1MiB", "dp:all-reduce:1MiB")["uplinks"]["rtsw1"] == across["uplinks"]["rtsw1"]


def routing(*words):
    return CliRunner().invoke(cli, ["--lab", "soft-3rack", "routing", *words], standalone_mode=False)


def test_routing_predict_prints_the_conflict_of_the_seed():
    ranks = [word for number in (1, 2, 3, 5) for word in ("--rank", f"host{number}")]
    done = routing("predict", "--scheme", "static-parity", *ranks, "--json")
    (answer,) = json.loads(done.output)
    assert {name: round(spread["mean"], 2) for name, spread in answer["uplinks"].items()} == {
        "rtsw1": 2.0,
        "rtsw2": 1.33,
        "rtsw3": 1.33,
    }
    assert answer["tiers"]["ctsw"]["mean"] == pytest.approx(1.6)
    assert answer["draws"] == 1


def test_routing_predict_draws_the_spines_choice_apart_from_that_of_the_racks():
    """Each tier has its own hash seed, so a spine spreads its flows over both of its uplinks."""
    words = ("predict", "--scheme", "ecmp", "--scheme", "e-ecmp", "--draws", "100", "--json")
    done = CliRunner().invoke(cli, ["--lab", "soft-zones", "routing", *words], standalone_mode=False)
    by_tuple, by_queue_pair = (scheme["uplinks"]["ctsw1"] for scheme in json.loads(done.output))
    assert by_tuple["p1"] == 1.0
    assert by_tuple["mean"] < 1.9
    assert by_queue_pair["p1"] == 2.0, "the marks of all tiers have one seed"


def test_routing_conflicts_counts_worse_placements():
    ranks = [word for number in (1, 2, 3, 4) for word in ("--rank", f"host{number}")]
    answer = json.loads(routing("conflicts", *ranks, "--worst", "3", "--json").output)
    assert (answer["before"]["mmr"], answer["placements"], answer["worse"]) == (1.0, 8, 8)
    assert len(answer["worst"]) == 3
    assert answer["worst"][0]["mmr"] == 2.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict", "--rank", "host1"), "a job needs at least 2 ranks; got 1"),
        (("predict", "--rank", "host1", "--rank", "host1:rxe0"), "host1:rxe0 is named twice"),
        (("predict", "--ranks-per-rnic", "22"), "6 RNICs would have 132 ranks; a job has at most 128"),
        (
            ("conflicts", "--rank", "host1", "--rank", "host3", "--ranks-per-rnic", "2", "--write", "/nowhere/x.toml"),
            "-> host2:rxe0 is inside one host",
        ),
        (("predict", "--grid", "dp=4"), "--grid and --phase go together"),
        (("predict", "--grid", "dp=2x", "--phase", "dp:all-reduce:1MiB"), '--grid dp=2x: "dp=2x" is not a dimension'),
        (("predict", "--grid", "dp=6", "--phase", "dp:all-reduce"), "--phase dp:all-reduce: write it as in"),
        (("predict", "--grid", "dp=6", "--phase", "tp:all-reduce:1MiB"), 'the grid has no dimension "tp"; it has dp'),
        (("predict", "--grid", "dp=4", "--phase", "dp:all-reduce:1MiB"), "dp 4 has 4 ranks, but the job has 6"),
        (
            ("predict", "--grid", "dp=6", "--phase", "dp:all-reduce:1MiB", "--size", "1MiB"),
            "--size describes one collective of all ranks; with --grid, give it in --phase",
        ),
        (("predict", "--weight", "rtsw1:ctsw9=2"), "--weight rtsw1:ctsw9=2: must be LINK=SHARE; links are rtsw1:ctsw1"),
        (("predict", "--failed", "rtsw1"), "no link between switches is called rtsw1"),
    ],
)
def test_routing_command_rejects_invalid_arguments(words, message):
    error = routing(*words).exception
    assert isinstance(error, UsageError), error
    assert message in str(error)


def test_routing_weight_that_is_no_number_is_a_usage_error():
    assert "nan" in str(routing("predict", "--weight", "rtsw1:ctsw1=nan").exception)


def test_conflicts_write_the_experiment_that_reproduces_the_worst_placement(tmp_path):
    """The written file is a valid experiment on the lab, and its bounds enclose the values computed for its ranks."""
    path = tmp_path / "worst.toml"
    words = ["conflicts", *(word for number in (1, 2, 3, 4) for word in ("--rank", f"host{number}"))]
    done = CliRunner().invoke(cli, ["--lab", "soft-3rack", "routing", *words, "--write", str(path)])
    assert done.exit_code == 0, done.output
    experiment = fit(experiment_file.load(path), LAB, "soft")

    assert experiment.fabric.routing == "static-parity"
    bound = next(expectation for expectation in experiment.expectations if expectation.metric.name.startswith("mmr."))
    flows = flows_of(one_collective(), experiment.workload.ranks, np.random.default_rng(1))
    load = offered_load(Fabric.of(LAB, scheme_named("static-parity")), flows)
    assert bound.minimum < uplink_mmr(LAB, load)[bound.metric.name.removeprefix("mmr.")] < bound.maximum
    again = CliRunner().invoke(cli, ["--lab", "soft-3rack", "routing", *words, "--write", str(path)])
    assert isinstance(again.exception, UsageError)
    assert "exists already" in str(again.exception)


def test_conflicts_leave_out_hosts_with_too_few_rnics_and_find_the_others():
    """One spare with a single RNIC used to end the whole search."""
    small = dataclasses.replace(LAB.host_by_name["host5"], rnics=LAB.host_by_name["host5"].rnics[:1])
    hosts = tuple(small if host.name == "host5" else host for host in LAB.hosts)
    lab = dataclasses.replace(LAB, hosts=hosts)
    job = tuple(f"host{number}:rxe1" for number in (1, 2, 3, 4))
    fabric = Fabric.of(lab, scheme_named("static-parity"))
    found = list(replacements(fabric, job, all_pairs, replaced=1))
    assert {come for placement in found for _, come in placement.moved} == {"host6"}
    with pytest.raises(UsageError, match="host5 has 1 RNICs, so it cannot replace host"):
        list(replacements(fabric, (*job, "host6:rxe1"), all_pairs, replaced=1))


@pytest.mark.parametrize(("size", "iterations"), [("1MiB", 12), ("64KiB", 64)])
def test_conflicts_write_enough_iterations_to_measure_the_ratio(tmp_path, size, iterations):
    """With 12 iterations of a small job the uplinks carry mostly BGP, and the bounds did not hold."""
    ranks = [word for number in (1, 2, 3, 4) for word in ("--rank", f"host{number}")]
    words = ["routing", "conflicts", *ranks, "--size", size, "--write", str(tmp_path / "x.toml")]
    done = CliRunner().invoke(cli, ["--lab", "soft-3rack", *words])
    assert done.exit_code == 0, done.output
    assert fit(experiment_file.load(tmp_path / "x.toml"), LAB, "soft").workload.iterations == iterations


@pytest.mark.parametrize("more", [("--size", "16KiB"), ("--size", "1MiB", "--qps-per-peer", "32")])
def test_conflicts_write_no_experiment_that_measures_acks(tmp_path, more):
    ranks = [word for number in (1, 2, 3, 4) for word in ("--rank", f"host{number}")]
    error = routing("conflicts", *ranks, *more, "--write", str(tmp_path / "x.toml")).exception
    assert isinstance(error, UsageError), error
    assert "bytes in an iteration, so that ACKs and control traffic would change the ratio" in str(error)
    assert not (tmp_path / "x.toml").exists()


def test_conflicts_write_keeps_the_queue_pairs_per_peer_and_the_ranks_per_rnic(tmp_path):
    words = ["routing", "conflicts", "--rank", "host1", "--rank", "host3", "--qps-per-peer", "4"]
    words += ["--collective", "all-reduce", "--algorithm", "ring", "--ranks-per-rnic", "2"]
    done = CliRunner().invoke(cli, ["--lab", "soft-3rack", *words, "--write", str(tmp_path / "x.toml")])

    assert done.exit_code == 0, done.output
    workload = fit(experiment_file.load(tmp_path / "x.toml"), LAB, "soft").workload
    assert (workload.qps_per_peer, workload.ranks_per_rnic) == (4, 2)


def test_conflicts_write_a_job_on_a_grid(tmp_path):
    words = ["routing", "conflicts", *(word for number in (1, 2, 3, 4) for word in ("--rank", f"host{number}"))]
    words += ["--grid", "tp=2,dp=2", "--phase", "dp:all-reduce:1MiB:ring", "--phase", "tp:all-to-all:64KiB"]
    done = CliRunner().invoke(cli, ["--lab", "soft-3rack", *words, "--write", str(tmp_path / "x.toml")])

    assert done.exit_code == 0, done.output
    workload = fit(experiment_file.load(tmp_path / "x.toml"), LAB, "soft").workload
    assert workload.grid == (("tp", 2), ("dp", 2))
    assert [(phase.along, phase.collective, phase.size_bytes, phase.algorithm) for phase in workload.phases] == [
        ("dp", "all-reduce", 1 << 20, "ring"),
        ("tp", "all-to-all", 1 << 16, "full-mesh"),
    ]


def test_conflicts_write_a_grid_whose_dimension_has_the_name_of_all_ranks(tmp_path):
    words = ["routing", "conflicts", *(word for number in (1, 2, 3, 4) for word in ("--rank", f"host{number}"))]
    words += ["--grid", "ranks=4", "--phase", "ranks:all-reduce:1MiB:ring", "--phase", "ranks:all-to-all:64KiB"]
    done = CliRunner().invoke(cli, ["--lab", "soft-3rack", *words, "--write", str(tmp_path / "x.toml")])

    assert done.exit_code == 0, done.output
    workload = fit(experiment_file.load(tmp_path / "x.toml"), LAB, "soft").workload
    assert (workload.grid, len(workload.phases)) == ((("ranks", 4),), 2)
