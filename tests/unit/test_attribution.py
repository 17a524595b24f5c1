"""The place of a fault is found from its traces alone, and what is not the network is not called so."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from ipaddress import ip_interface

import msgspec
import pytest
from click.testing import CliRunner
from labelled_run import Network, campaign, connections
from synthetic_run import MS, synthetic_run
from test_report import finished
from test_rtt import round_trips

from harness import stalls
from harness.attribution import attribute
from harness.cli.main import cli
from harness.confusion import score
from harness.findings import CAUSES, NOTHING, PLACES
from harness.measurements import Iteration, RankSeries, counter_deltas
from harness.report import render
from harness.signatures import Signs
from testbed.telemetry import Change
from traffic.flight import Entry, Flight
from traffic.probe import ProbeResult, ProbeSpec
from traffic.results import QpError, Standstill
from traffic.rtt import locate, times_of


@pytest.fixture(scope="module")
def labelled():
    return list(campaign())


def test_the_made_up_campaign_is_placed(labelled):
    """Over 60 made-up runs of all link, switch, host and GPU places: culprit >= 95 %, network or not >= 97 %."""
    total = score((run, ()) for _, _, run in labelled)
    assert total.runs == total.single == len(labelled) >= 60
    assert total.right >= 0.95 * total.single, total.matrix
    assert total.network_right >= 0.97 * total.single, total.matrix
    assert total.precision.low > 0.85
    assert sum(total.matrix.values()) == total.single


def test_a_fault_free_run_has_no_culprit():
    run = Network(3).run().measured(None, "")
    assert attribute(run) == (NOTHING,)


def test_the_plan_of_faults_is_not_looked_at(labelled):
    for _, _, run in labelled[::15]:
        assert attribute(run) == attribute(msgspec.structs.replace(run, faults=synthetic_run().faults))


def test_every_finding_is_of_the_documented_sets(labelled):
    for _, _, run in labelled[::5]:
        for one in attribute(run):
            assert one.cause in CAUSES
            assert one.place in PLACES
            assert 0 <= one.confidence <= 1
            assert one.evidence


def test_marks_are_placed_as_losses_are():
    network = Network(4).run(("rtsw2", "host3"), 0.05, "mark")
    best = attribute(network.measured("packet.mark", "rtsw2:host3:rxe0"))[0]
    assert (best.cause, best.name) == ("congestion", "rtsw2:host3:rxe0")


def test_a_switch_whose_links_all_went_is_one_finding():
    network = Network(5).run()
    for link in network.topology.links_of("ctsw1"):
        network.carrier(link)
    (found,) = attribute(network.measured("link.down", "ctsw1"))
    assert (found.cause, found.place, found.name) == ("link-down", "ctsw", "ctsw1")


def test_a_host_that_counts_anew_has_rebooted():
    """Its counters stand lower than before; that its links came up meanwhile, and that its peers waited, follows."""
    network = Network(5).run().hang("host3")
    run = network.measured("host.reboot", "host3")
    boot = {"ip.InDelivers": 900, "tcp.PassiveOpens": 4, "cpu0.wait_us": 7_000, "be0.carrier_changes": 2}
    before, after = ({**run.counters_before}, {**run.counters_after})
    before["host3"] = {**dict.fromkeys(boot, 5_000), "be0.carrier_changes": 1, "ip.hash_policy": 1}
    after["host3"] = {**boot, "ip.hash_policy": 0}
    run = msgspec.structs.replace(run, counters_before=before, counters_after=after)
    (found, *others) = attribute(run)
    assert (found.cause, found.place, found.name) == ("host-reboot", "rank", "host3")
    assert "ip.InDelivers from 5000 to 900" in found.evidence[0]
    assert not found.is_network
    assert not [one for one in others if one.confidence >= 0.5]
    assert score([(run, ())]).right == 1


def test_one_counter_that_fell_is_no_boot():
    run = Network(5).run().measured(None, "")
    before = {**run.counters_before, "host3": {"ip.InDelivers": 9, "rxe0.sent_pkts": 9, "clock.stepped": 9}}
    after = {**run.counters_after, "host3": {"ip.InDelivers": 8, "rxe0.sent_pkts": 0, "clock.stepped": 0}}
    run = msgspec.structs.replace(run, counters_before=before, counters_after=after)
    assert "host-reboot" not in {one.cause for one in attribute(run)}


def test_what_follows_from_a_link_that_went_is_no_second_finding():
    network = Network(6).run()
    link = network.topology.uplinks[0]
    network.carrier(link)
    network.counts["host1", "rxe0.completer_retry_err"] += 40
    assert [one.cause for one in attribute(network.measured("link.down", link.name))] == ["link-down"]


def test_a_run_whose_fault_is_in_doubt_is_no_truth(labelled):
    _, _, run = labelled[0]
    doubted = msgspec.structs.replace(run, faults=(msgspec.structs.replace(run.faults[0], doubts=("no witness",)),))
    assert score([(doubted, ())]).runs == 0


def entry(what, at_ms, *, iteration=7, step=2, peer=-1, segment=-1, psn=-1):
    return Entry(
        at_ns=at_ms * 1_000_000,
        what=what,
        iteration=iteration,
        step=step,
        peer=peer,
        qpn=17,
        segment=segment,
        psn=psn,
    )


def waiting(rank, peer, *, way="from", state=""):
    entries = [entry("begin", 1000), entry("post", 1100, peer=(rank + 1) % 4, segment=3, psn=512)]
    return Flight(
        rank=rank,
        endpoint=f"host{rank + 1}:rxe0",
        standing=f"iteration 7, step 2: waits for segment 3 of 8 {way} rank {peer} (QP 17{state})",
        entries=(*entries, entry("arrive", 1200 + rank, peer=peer, segment=2)),
    )


def test_the_rank_that_left_no_recording_is_at_the_root():
    run = synthetic_run()
    flights = [waiting(3, 2), waiting(0, 3), waiting(2, 1)]
    found = stalls.culprit(flights, run)
    assert found.rank == 1
    assert "left no recording" in found.words[0]
    assert found.words[1] == "rank 0 waits for rank 3 waits for rank 2 waits for rank 1"
    best = attribute(msgspec.structs.replace(run, faults=()), flights)[0]
    assert (best.cause, best.place, best.name) == ("lost-rank", "rank", "host2")


def test_the_rank_that_has_not_joined_is_named_with_where_it_is():
    late = Flight(rank=1, endpoint="host2:rxe0", standing="iteration 7, compute", entries=(entry("begin", 900),))
    found = stalls.culprit([waiting(2, 1), waiting(3, 2), late], synthetic_run())
    assert found.rank == 1
    assert "has not joined: iteration 7, compute" in found.words[0]


def test_a_stall_is_told_with_step_ranks_time_psn_and_hop():
    flights = [waiting(2, 1), waiting(1, 0)]
    (first, second) = stalls.stalls(flights)
    assert (first.waiter, second.waiter) == (1, 2)
    told = second.told(lost_at="rtsw1:ctsw2")
    assert told == "iteration 7, step 2: rank 1→2 waited 0 s for PSN 512, lost at rtsw1:ctsw2"
    assert "over host1 → rtsw1 → host2; its queue pair is broken" in stalls.stalls([waiting(2, 1, state=", lost")])[
        0
    ].told(path=("host1", "rtsw1", "host2"))


def test_a_circle_over_broken_queue_pairs_points_at_the_rank_where_they_end():
    flights = [waiting(0, 1), waiting(1, 2, state=", lost"), waiting(2, 3, state=", lost"), waiting(3, 0)]
    assert stalls.culprit(flights, synthetic_run()).rank == 2
    whole = [waiting(0, 1), waiting(1, 2), waiting(2, 3), waiting(3, 0)]
    assert stalls.culprit(whole, synthetic_run()) is None


def test_a_rank_that_left_no_recording_is_at_the_root_before_anybody_waits():
    """Killed while all compute; where two are silent, neither stands out."""
    run = synthetic_run()
    flights = [Flight(rank=one.rank, endpoint="", standing="iteration 3, compute", entries=()) for one in run.ranks]
    assert stalls.culprit(flights[:2] + flights[3:], run).rank == 2
    assert stalls.culprit(flights[2:], run) is None
    assert stalls.culprit(flights, run) is None


def test_nobody_waits_nobody_is_named():
    assert stalls.culprit([], synthetic_run()) is None
    assert stalls.stalls([Flight(rank=0, endpoint="a", standing="iteration 1, compute", entries=())]) == ()


def test_every_hop_of_the_made_up_workload_exists():
    network = Network(1)
    hops = Counter(pair for one in connections() for pair in itertools.pairwise(one.path))
    assert set(hops) <= set(network.ports)


def test_the_command_holds_runs_against_their_faults(tmp_path, labelled):
    kept = [finished(tmp_path / str(index), run).path for index, (_, _, run) in enumerate(labelled[:3])]
    done = CliRunner().invoke(cli, ["attribute", *map(str, kept), "--json"], standalone_mode=False)
    assert done.exception is None
    said = json.loads(done.output)
    assert said["judged"] == said["single"]["runs"] == 3
    assert said["recall"]["of"] == 3
    text = CliRunner().invoke(cli, ["attribute", *map(str, kept)], standalone_mode=False).output
    assert "precision" in text
    assert "it was / said" in text


def test_recordings_come_back_from_the_run_directory_and_onto_the_page(tmp_path):
    directory = finished(tmp_path, synthetic_run())
    assert directory.read_flights() == ()
    flights = (waiting(2, 1), waiting(3, 2))
    directory.write_flights(flights)
    assert directory.read_flights() == flights
    page = render(directory.path).read_text(encoding="utf-8")
    assert "iteration 7, step 2: rank 1→2 waited" in page
    assert "lost-rank" in page


def fed(*, ingest_ms=5, checkpoint_ms=0, slow_ranks=(), slow_ms=0):
    """A fault-free run of a job whose storage is host4; some ranks waited once, in iteration 20."""
    run = Network(3).run().measured(None, "")
    series = tuple(
        RankSeries(
            rank=rank,
            iterations=tuple(
                Iteration(
                    index=index, start_ns=index * 400 * MS, compute_ns=100 * MS, comm_ns=100 * MS, wait_ns=0,
                    ingest_ns=(slow_ms if rank in slow_ranks and index == 20 else ingest_ms) * MS,
                    checkpoint_ns=checkpoint_ms * MS if index % 10 == 9 else 0,
                )
                for index in range(40)
            ),
        )
        for rank in range(4)
    )  # fmt: skip
    return msgspec.structs.replace(run, series=series, workload={**run.workload, "storage": {"host": "host4"}})


def test_ranks_that_wait_for_their_data_point_at_storage():
    (found,) = attribute(fed(slow_ranks=(0, 1, 2, 3), slow_ms=3000))
    assert (found.cause, found.place, found.name, found.is_network) == ("slow-storage", "storage", "host4", False)
    assert "4 ranks waited up to 3.00 s for the data of an iteration" in found.evidence[0]


def test_waits_that_are_usual_in_a_run_point_at_nobody():
    """Checkpoints that all ranks wait for each time."""
    assert attribute(fed(checkpoint_ms=2000)) == (NOTHING,)


def test_one_rank_that_waited_long_points_at_storage_unless_it_stood_still_itself():
    run = fed(slow_ranks=(2,), slow_ms=3000)
    (found,) = attribute(run)
    assert (found.cause, found.name, found.confidence) == ("slow-storage", "host4", 0.6)
    start_ns = run.series[2].iterations[20].start_ns
    hung = Standstill(host="host3", start_ns=start_ns, end_ns=start_ns + 3000 * MS)
    (found,) = attribute(msgspec.structs.replace(run, standstills=(hung,)))
    assert (found.cause, found.place, found.name) == ("hung-rank", "rank", "host3")
    assert "did not run for 3.0 s" in found.evidence[0]


def test_what_stands_still_with_all_the_others_is_nobodys_fault():
    """The machine beneath the VMs had something else to do."""
    still = tuple(
        Standstill(host=f"host{number}", start_ns=number * MS, end_ns=2000 * MS + number * MS)
        for number in (1, 2, 3, 4)
    )
    assert attribute(msgspec.structs.replace(fed(), standstills=still)) == (NOTHING,)
    alone = (*still, Standstill(host="host1", start_ns=5000 * MS, end_ns=7000 * MS))
    (found,) = attribute(msgspec.structs.replace(fed(), standstills=alone))
    assert found.name == "host1"


def without_routes(run, *lost):
    """A run in which switches lost routes: (who, prefix)."""
    changes = [
        Change(at_ns=run.t0_ns + 10**9, node=node, subject=f"route main unicast {prefix} metric 20 bgp", text=None)
        for node, prefix in lost
    ]
    return msgspec.structs.replace(run, changes=tuple(changes))


def test_a_switch_that_withdraws_its_prefixes_is_named_by_those_who_lost_them():
    quiet = Network(3).run().measured(None, "")
    link = quiet.topology.rnic_link("host3", "rxe0")
    prefixes = [str(ip_interface(rnic.address).network) for rnic in quiet.topology.host_by_name["host3"].rnics]
    others = [one.name for one in quiet.topology.switches if one.name != link.a.node][:3]
    (found,) = attribute(without_routes(quiet, *[(node, prefix) for node in others for prefix in prefixes]))
    assert (found.cause, found.name, found.is_network) == ("control-plane", link.a.node, True)
    assert attribute(without_routes(quiet, (others[0], prefixes[0]))) == (NOTHING,), "one alone may have forgotten"
    elsewhere = str(ip_interface(quiet.topology.host_by_name["host1"].rnics[0].address).network)
    both = [(node, prefix) for node in others for prefix in (*prefixes, elsewhere)]
    assert attribute(without_routes(quiet, *both)) == (NOTHING,), "of several switches: no single one withdrew"


def with_dead(run, pairs):
    """A run some of whose queue pairs ran out of retries: (from, to)."""
    lost = tuple(
        QpError(
            time_ns=run.t0_ns + 10**9, connection=number, endpoint=f"{src}:rxe0", peer=f"{dst}:rxe0", qpn=17 + number,
            status="RETRY_EXC_ERR", generation=0,
        )
        for number, (src, dst) in enumerate(pairs)
    )  # fmt: skip
    return msgspec.structs.replace(run, qps_lost=lost)


HOSTS = ("host1", "host2", "host3", "host4")
TO_HOST1 = [(one.src[:5], one.dst[:5]) for one in connections() if one.dst == "host1:rxe0"]
OF_HOST1 = [(one.src[:5], one.dst[:5]) for one in connections() if "host1:rxe0" in (one.src, one.dst)]


def test_a_link_that_lets_nothing_through_is_where_all_dead_queue_pairs_cross():
    """No gap comes out of a black hole, and the timers of so many peers are usual ones."""
    (found,) = attribute(with_dead(Network(3).run().measured(None, ""), OF_HOST1))
    assert (found.cause, found.name) == ("loss", "rtsw1:host1:rxe0")
    assert "ran out of retries from host1:rxe0 to host2:rxe0" in found.evidence[-1]


def test_a_host_that_answers_nobody_kills_the_queue_pairs_towards_it():
    (found,) = attribute(with_dead(Network(3).run().measured(None, ""), TO_HOST1))
    assert (found.cause, found.place, found.name) == ("silent-host", "rank", "host1")


def test_what_is_too_big_for_a_link_is_all_the_data_that_takes_it():
    network = Network(3).run()
    network.counts["rtsw1", "ip.FragFails"] += 1648
    (found,) = attribute(with_dead(network.measured(None, ""), TO_HOST1))
    assert (found.cause, found.name, found.confidence) == ("mtu", "rtsw1:host1:rxe0", 0.9)
    network.counts["rtsw1", "ip.FragFails"] += 1
    (found,) = attribute(network.measured(None, ""))
    assert (found.cause, found.name, found.confidence) == ("mtu", "rtsw1", 0.5), "nobody else noticed"


def test_what_runs_out_of_retries_while_routes_are_gone_is_no_second_finding():
    network = Network(7).run().sessions("rtsw1")
    network.counts["rtsw2", f"{network.ports['rtsw2', 'host3']}.rx_packets"] += 3897
    across = [(a, b) for a, b in itertools.permutations(HOSTS, 2) if ("host1" in (a, b)) != ("host2" in (a, b))]
    found = attribute(with_dead(network.measured(None, ""), across))
    assert [(one.cause, one.name) for one in found] == [("control-plane", "rtsw1")]


def test_a_host_that_stood_still_explains_the_queue_pairs_it_let_die():
    run = Network(8).run().measured(None, "")
    still = Standstill(host="host1", start_ns=0, end_ns=1100 * MS)
    found = attribute(msgspec.structs.replace(with_dead(run, TO_HOST1[:1]), standstills=(still,)))
    assert [(one.cause, one.name) for one in found] == [("hung-rank", "host1")]
    elsewhere = attribute(msgspec.structs.replace(with_dead(run, [("host3", "host4")]), standstills=(still,)))
    assert len(elsewhere) == 2, "what died far from it has another reason"


def test_an_engine_that_waits_for_an_rnic_without_a_link_is_no_second_finding():
    network = Network(9).run()
    link = network.topology.rnic_link("host1", "rxe0")
    run = network.carrier(link).measured(None, "")
    still = Standstill(host="host1", start_ns=0, end_ns=2500 * MS)
    found = attribute(msgspec.structs.replace(run, standstills=(still,)))
    assert [(one.cause, one.name) for one in found] == [("link-down", link.name)]


def test_what_a_switch_says_and_hears_itself_is_no_loss():
    """Its BGP packets come in and do not go out: thirty of them once made a link next to it the culprit."""
    network = Network(4).run()
    network.counts["rtsw1", "host2-rxe0.rx_packets"] += 2000
    lossy = Signs.of(network.measured(None, ""), counter_deltas(network.measured(None, ""))).lost_in
    assert lossy == {"rtsw1": 2000}
    network.counts["rtsw1", "ip.InDelivers"] += 2040
    network.counts["rtsw1", "ip.OutRequests"] += 40
    assert Signs.of(network.measured(None, ""), counter_deltas(network.measured(None, ""))).lost_in == {}


def test_what_died_on_a_link_that_was_down_is_no_second_finding():
    """A switch beside it dropped what it could not deliver; queue pairs that died elsewhere have another reason."""
    network = Network(9).run()
    link = network.topology.rnic_link("host1", "rxe0")
    network.counts["rtsw2", "host3-rxe0.rx_packets"] += 300
    run = network.carrier(link).measured(None, "")
    assert [one.cause for one in attribute(with_dead(run, TO_HOST1))] == ["link-down"]
    elsewhere = [pair for pair in ((one.src[:5], one.dst[:5]) for one in connections()) if "host3" in pair]
    assert len(attribute(with_dead(run, elsewhere))) == 2


def test_marks_are_placed_before_the_first_node_that_sees_them():
    """Two links on the way of all marked packets: the switch between them has seen the marks already."""
    network = Network(4).run()
    network.counts["host3", "ip.InCEPkts"] += 60
    for switch in network.topology.switches:
        network.counts[switch.name, "ip.InCEPkts"] += 0
    for host in ("host1", "host2", "host4"):
        network.counts[host, "ip.InCEPkts"] += 0
    on_the_host_link = attribute(network.measured(None, ""))[0]
    assert (on_the_host_link.cause, on_the_host_link.name) == ("congestion", "rtsw2:host3:rxe0")
    network.counts["rtsw2", "ip.InCEPkts"] += 60
    network.counts["ctsw1", "ip.InCEPkts"] += 60
    earlier = attribute(network.measured(None, ""))[0]
    assert (earlier.cause, earlier.name) == ("congestion", "rtsw1:ctsw1")


def test_a_host_whose_programs_wait_for_a_cpu_is_told_with_little_confidence():
    network = Network(3).run()
    for number, host in enumerate(HOSTS):
        network.counts[host, "cpu0.wait_us"] += 9_000_000 + 100_000 * number
    assert attribute(network.measured(None, "")) == (NOTHING,)
    network.counts["host4", "cpu0.wait_us"] += 60_000_000
    (found,) = attribute(network.measured(None, ""))
    assert (found.cause, found.name, found.confidence < 0.5) == ("busy-host", "host4", True)


def test_links_that_nothing_tells_apart_are_all_told():
    """What is broken on the way to a spine or from it looks alike to the RNICs, where no switch misses a packet."""
    network = Network(11)
    for one in connections():
        if "ctsw2" in one.path and one.path[1] == "rtsw1":
            network.counts[one.dst[:5], "rxe0.out_of_seq_request"] += 20
            network.counts[one.src[:5], "rxe0.rcvd_seq_err"] += 18
    (found,) = attribute(network.run().measured(None, ""))
    named = {found.name, *found.evidence[-1].removesuffix(" would leave the same traces").split(", ")}
    assert named == {"rtsw1:ctsw2", "rtsw2:ctsw2"}


def test_which_gaps_belong_to_which_naks_tells_spines_apart():
    """As counted on VMs: over either spine, both hosts send to both others; of one pair 9 packets were lost."""
    network = Network(12).run()
    for host, name, count in (
        ("host1", "out_of_seq_request", 9), ("host2", "out_of_seq_request", 3),
        ("host3", "rcvd_seq_err", 2), ("host4", "rcvd_seq_err", 9),
    ):  # fmt: skip
        network.counts[host, f"rxe0.{name}"] += count
    over_ctsw1 = {("host1", "host3"), ("host2", "host3"), ("host3", "host1"), ("host4", "host2")}
    rack = {"host1": "rtsw1", "host2": "rtsw1", "host3": "rtsw2", "host4": "rtsw2"}
    crossing = tuple(
        msgspec.structs.replace(
            connections()[0],
            src=f"{src}:rxe0",
            dst=f"{dst}:rxe0",
            path=(src, rack[src], dst)
            if rack[src] == rack[dst]
            else (src, rack[src], "ctsw1" if (src, dst) in over_ctsw1 else "ctsw2", rack[dst], dst),
        )
        for src, dst in itertools.permutations(HOSTS, 2)
    )
    (found,) = attribute(msgspec.structs.replace(network.measured(None, ""), connections=crossing))
    assert {found.name, found.evidence[-1].split()[0]} == {"rtsw1:ctsw2", "rtsw2:ctsw2"}


def test_a_queue_pair_that_a_flap_has_cost_says_nothing_of_a_loss_elsewhere():
    """As in the demo: an uplink flaps and costs one queue pair, later a host's link loses packets."""
    network = Network(13)
    network.carrier(next(link for link in network.topology.uplinks if link.name == "rtsw1:ctsw1"))
    network.counts["host3", "rxe0.out_of_seq_request"] += 34
    network.counts["host2", "rxe0.rcvd_seq_err"] += 30
    network.counts["host2", "rxe0.completer_retry_err"] += 28
    network.counts["rtsw2", "host3-rxe0.rx_packets"] += 198
    ring = (
        ("host1", "rtsw1", "host2"), ("host2", "rtsw1", "ctsw2", "rtsw2", "host3"),
        ("host3", "rtsw2", "host4"), ("host4", "rtsw2", "ctsw1", "rtsw1", "host1"),
    )  # fmt: skip
    around = tuple(
        msgspec.structs.replace(connections()[0], src=f"{path[0]}:rxe0", dst=f"{path[-1]}:rxe0", path=path)
        for path in ring
    )
    run = msgspec.structs.replace(network.measured(None, ""), connections=around)
    found = attribute(with_dead(run, [("host4", "host1")]))
    assert [(one.cause, one.name) for one in found] == [("link-down", "rtsw1:ctsw1"), ("loss", "rtsw2:host3:rxe0")]


def test_what_a_gpus_driver_tells_of_errors_names_the_gpu():
    """By its address, and how often; one that no GPU of the inventory has is its host's."""
    run = synthetic_run()
    host = run.topology.hosts[0]
    gpu = host.gpus[0].name

    def told(address, xid):
        return Change(at_ns=run.t0_ns, node=host.name, subject="kernel", text=f"3 NVRM: Xid (PCI:{address}): {xid}, x")

    log = (told(gpu, 63), told(gpu, 63), told("0000:ff:00", 79))
    found = {one.name: one for one in attribute(msgspec.structs.replace(run, kernel=log)) if one.cause == "gpu-error"}
    assert found.keys() == {f"{host.name}:{gpu}", host.name}
    assert found[f"{host.name}:{gpu}"].evidence == (f"{host.name}:{gpu}: XID 63, 2 times",)


def test_a_host_that_waits_for_memory_is_named():
    """A healthy one's programs hardly ever do; a little is nobody's trouble."""
    run = synthetic_run()

    def stalled(us):
        after = {node: dict(names) for node, names in run.counters_after.items()}
        before = {node: dict(names) for node, names in run.counters_before.items()}
        for host in run.topology.hosts:
            before.setdefault(host.name, {})["memory.stalled_us"] = 5
            after.setdefault(host.name, {})["memory.stalled_us"] = 5 + (us if host.name == "host2" else 0)
        found = attribute(msgspec.structs.replace(run, counters_before=before, counters_after=after))
        return [one.name for one in found if one.cause == "low-memory"]

    assert stalled(900_000) == ["host2"]
    assert stalled(20_000) == []


def probed(place, times=6.0, count=40):
    """Round trips over the made-up fabric, of which a place makes each so many times as long."""
    return times_of(round_trips(place=place, times=times, count=count))


@pytest.mark.parametrize(
    ("place", "cause", "kind", "name"),
    [
        (("rtsw1", "ctsw1"), "congestion", "rtsw-ctsw-link", "rtsw1:ctsw1"),
        (("rtsw2", "host3:rxe1"), "congestion", "host-link", "rtsw2:host3:rxe1"),
        (("ctsw2",), "congestion", "ctsw", "ctsw2"),
        (("host2",), "busy-host", "rank", "host2"),
    ],
)
def test_long_round_trips_are_told_of_a_place_where_nothing_is_lost(place, cause, kind, name):
    run = Network(3).run().measured(None, "")
    assert attribute(run) == (NOTHING,)
    top = attribute(run, (), probed(place))[0]
    told = " ".join(top.evidence)
    # Up from one rack to a spine is down to the other: what the votes cannot tell is in the evidence.
    assert (top.cause, top.place) == (cause, kind)
    assert top.name == name or " -> ".join(place) in told
    assert "times what they take on like paths" in told
    assert "software times" in told


def test_round_trips_are_evidence_for_what_is_already_found_there(labelled):
    truth, run = next((truth, run) for truth, kind, run in labelled if attribute(run)[0].cause == "loss")
    before = attribute(run)
    link = next(one for one in run.topology.links if one.name == before[0].name)
    near, far = link.a.node, link.b.node if link.rnic is None else f"{link.b.node}:{link.rnic}"
    after = attribute(run, (), probed((near, far)))
    assert (after[0].cause, after[0].name, after[0].confidence) == (
        before[0].cause,
        before[0].name,
        before[0].confidence,
    ), truth
    assert len(after) == len(before)
    assert len(after[0].evidence) == len(before[0].evidence) + 1


def test_a_healthy_fabrics_round_trips_say_nothing():
    run = Network(3).run().measured(None, "")
    assert attribute(run, (), probed(())) == (NOTHING,)


def test_round_trips_in_the_run_directory_reach_the_command_and_the_page(tmp_path):
    """As `faultbed probe --json` writes them."""
    directory = finished(tmp_path, Network(3).run().measured(None, ""))
    assert directory.read_probes() == ()
    paths = probed(("rtsw1", "ctsw1"))
    result = ProbeResult(
        spec=ProbeSpec(), probes=(), suspects=(), links={}, uncovered=(), moved=0, paths=paths, slow=locate(paths)
    )
    (directory.path / "probes.json").write_bytes(msgspec.json.encode(result.to_dict()))
    assert directory.read_probes() == paths
    said = CliRunner().invoke(cli, ["attribute", str(directory.path), "--json"], standalone_mode=False)
    assert json.loads(said.output)["runs"][str(directory.path)][0]["cause"] == "congestion"
    assert "times what they take on like paths" in render(directory.path).read_text(encoding="utf-8")
