"""The rank at the root of a stall, from the flight recorders of the waiting ranks."""

from __future__ import annotations

import itertools
from collections import Counter

from finished_run import finished
from labelled_run import Network, connections
from synthetic_run import changed, synthetic_run

from faultbed.harness.attribution import stalls
from faultbed.harness.attribution.attribute import attribute
from faultbed.harness.report.run_page import render
from faultbed.traffic.engine.flight_recorder import Entry, Flight


def entry(what, at_ms, *, iteration=7, step=2, peer=-1, segment=-1, psn=-1, qpn=17, connection=-1):
    return Entry(
        at_ns=at_ms * 1_000_000,
        what=what,
        iteration=iteration,
        step=step,
        peer=peer,
        qpn=qpn,
        segment=segment,
        psn=psn,
        connection=connection,
    )


def waiting(rank, peer, *, way="from", state=""):
    entries = [entry("begin", 1000), entry("post", 1100, peer=(rank + 1) % 4, segment=3, psn=512)]
    return Flight(
        rank=rank,
        endpoint=f"host{rank + 1}:rxe0",
        standing=f"iteration 7, step 2: waits for segment 3 of 8 {way} rank {peer} (QP 17{state})",
        entries=(*entries, entry("arrive", 1200 + rank, peer=peer, segment=2)),
    )


def test_stall_root_is_the_rank_without_a_recording():
    run = synthetic_run()
    flights = [waiting(3, 2), waiting(0, 3), waiting(2, 1)]
    result = stalls.culprit(flights, run)
    assert result.rank == 1
    assert "left no recording" in result.words[0]
    assert result.words[1] == "rank 0 waits for rank 3 waits for rank 2 waits for rank 1"
    best = attribute(changed(run, faults=()), flights)[0]
    assert (best.cause, best.place, best.name) == ("lost-rank", "rank", "host2")


def test_stall_root_that_has_not_joined_is_named_with_its_position():
    late = Flight(rank=1, endpoint="host2:rxe0", standing="iteration 7, compute", entries=(entry("begin", 900),))
    joins = Flight(rank=0, endpoint="host1:rxe0", standing="iteration 7, compute", entries=(entry("begin", 1300),))
    flights = [waiting(2, 1), waiting(3, 2), late]
    result = stalls.culprit([joins, *flights], synthetic_run())
    assert result.rank == 1
    assert "has not joined: iteration 7, compute" in result.words[0]
    silent = stalls.culprit(flights, synthetic_run())
    assert silent.rank == 0, "who computes may join at any time, who left no recording will not"
    assert "rank 0 left no recording" in silent.words[0]


def test_stall_describes_step_ranks_time_psn_and_hop():
    flights = [waiting(2, 1), waiting(1, 0)]
    (first, second) = stalls.stalls(flights)
    assert (first.waiter, second.waiter) == (1, 2)
    reported = second.describe(lost_at="rtsw1:ctsw2")
    assert reported == "iteration 7, step 2: rank 1→2 waited 0 s for PSN 512, lost at rtsw1:ctsw2"
    assert "over host1 → rtsw1 → host2; its queue pair is broken" in stalls.stalls([waiting(2, 1, state=", lost")])[
        0
    ].describe(path=("host1", "rtsw1", "host2"))


def test_stall_on_one_of_several_queue_pairs_has_the_psn_of_that_one():
    """Each queue pair counts its own segments, and its number differs at its two ends."""
    posts = [
        entry("post", 1100, peer=1, segment=3, psn=512 + 100 * one, qpn=30 + one, connection=one) for one in (0, 1)
    ]
    sender = Flight(rank=0, endpoint="host1:rxe0", standing="iteration 7, at its end", entries=tuple(posts))
    waits = "iteration 7, step 2: waits for segment 3 of 8 from rank 0 (QP 40)"
    for connection, psn in ((0, 512), (1, 612)):
        arrived = (
            entry("begin", 1000),
            entry("arrive", 1150, peer=0, segment=2, qpn=40, connection=connection),
            entry("arrive", 1200, peer=0, segment=5, qpn=41, connection=1 - connection),
        )
        waiter = Flight(rank=1, endpoint="host2:rxe0", standing=waits, entries=arrived)
        (stall,) = stalls.stalls([sender, waiter])
        assert stall.psn == psn
        assert stall.waited_ns == 50_000_000, "another queue pair of the peer that moved does not count"


def test_stall_cycle_over_broken_queue_pairs_ends_at_the_root():
    flights = [waiting(0, 1), waiting(1, 2, state=", lost"), waiting(2, 3, state=", lost"), waiting(3, 0)]
    assert stalls.culprit(flights, synthetic_run()).rank == 2
    whole = [waiting(0, 1), waiting(1, 2), waiting(2, 3), waiting(3, 0)]
    assert stalls.culprit(whole, synthetic_run()) is None


def test_stall_root_without_recording_is_found_before_any_rank_waits():
    """A rank is killed while all ranks compute. If two ranks are silent, the root is ambiguous."""
    run = synthetic_run()
    flights = [
        Flight(rank=rank.rank, endpoint="", standing="iteration 3, compute", entries=()) for rank in run.workload.ranks
    ]
    assert stalls.culprit(flights[:2] + flights[3:], run).rank == 2
    assert stalls.culprit(flights[2:], run) is None
    assert stalls.culprit(flights, run) is None


def test_stall_without_waiting_ranks_has_no_root():
    assert stalls.culprit([], synthetic_run()) is None
    assert stalls.stalls([Flight(rank=0, endpoint="a", standing="iteration 1, compute", entries=())]) == ()


def test_synthetic_workload_paths_use_existing_hops():
    network = Network(1)
    hops = Counter(pair for connection in connections() for pair in itertools.pairwise(connection.path))
    assert set(hops) <= set(network.ports)


def test_flight_recordings_round_trip_and_are_in_the_report(tmp_path):
    directory = finished(tmp_path, synthetic_run())
    assert directory.read_flights() == ()
    flights = (waiting(2, 1), waiting(3, 2))
    directory.write_flights(flights)
    assert directory.read_flights() == flights
    page = render(directory.path).read_text(encoding="utf-8")
    assert "iteration 7, step 2: rank 1→2 waited" in page
    assert "lost-rank" in page
