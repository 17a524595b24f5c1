"""The pure state machine of a job that survives losses, and the placement of its ranks, for any losses at any time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import samples

from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventories
from faultbed.traffic.node.ranks import pattern
from faultbed.traffic.node.ranks.elements import STORED
from faultbed.traffic.node.ranks.rank_state import FACTOR, State, expected
from faultbed.traffic.workloads.elastic import machine
from faultbed.traffic.workloads.elastic.machine import ENDS, Diagnosed, Lost, Policy, Progress, Restored, host_of
from faultbed.traffic.workloads.elastic.placement import choose_spare, reschedule, shrunk_grid
from faultbed.traffic.workloads.elastic.resilience import Resilience, check, check_on_lab
from faultbed.traffic.workloads.elastic.state_history import StateHistory
from faultbed.traffic.workloads.job import JobPhase, JobSpec
from faultbed.traffic.workloads.storage_service import Storage

THREE_RACKS = load(inventories() / "soft-3rack.yml").topology
RANKS = tuple(f"host{number}:rxe0" for number in (1, 2, 3, 4))
SPARES = ("host5:rxe0", "host6:rxe0")

losses = st.lists(
    st.tuples(
        st.sampled_from(["running", "diagnose", "reschedule", "initialise", "restore", "catch_up"]),
        st.integers(0, 40),
        st.sets(st.sampled_from([host_of(name) for name in (*RANKS, *SPARES)]), max_size=2),
        st.sampled_from(["process", "host", "gpu", "network", "rank"]),
    ),
    max_size=8,
)
policies = st.builds(
    Policy,
    restart=st.sampled_from(["spare", "shrink", "same"]),
    without_spare=st.sampled_from(["shrink", "fail"]),
    most_restarts=st.integers(1, 5),
)


class Simulated:
    """A driver without a lab: it reports simulated events, and keeps the checkpoints that a lab would have."""

    def __init__(self, policy, losses, every, total=40, spares=SPARES):
        self.policy, self.losses, self.every = policy, list(losses), every
        self.state = machine.begin(total=total, grid=(("dp", 4),), ranks=RANKS, spares=spares)
        self.gone, self.cause, self.stored, self.steps, self.lost = (), "rank", 0, 0, []

    def loss_now(self):
        for item in self.losses:
            phase, at, hosts, cause = item
            if phase == self.state.phase and (phase not in ("running", "catch_up") or self.state.finished >= at):
                self.losses.remove(item)
                self.gone, self.cause = tuple(sorted(hosts & {host_of(name) for name in self.state.ranks})), cause
                return True
        return False

    def event(self):
        state = self.state
        if self.loss_now():
            return Lost(reason=f"{', '.join(self.gone) or 'a rank'} was lost")
        outcomes = {
            "diagnose": lambda: Diagnosed(cause=self.cause, hosts=self.gone),
            "reschedule": lambda: reschedule(state, self.policy, THREE_RACKS),
            "initialise": machine.Initialised,
            "restore": lambda: Restored(iterations=self.stored),
        }
        if state.phase == "restore":
            self.lost.append(state.finished - self.stored)
        if state.phase in outcomes:
            return outcomes[state.phase]()
        if state.finished == state.total:
            return machine.Ended()
        finished = state.finished + 1
        self.stored = finished if finished % self.every == 0 else self.stored
        return Progress(finished=finished)

    def run(self):
        while self.state.phase not in ENDS:
            self.steps += 1
            assert self.steps < 2000, "it never ends"
            self.state = machine.step(self.state, self.event(), self.policy)
        return self.state


@settings(deadline=None, max_examples=samples(300))
@given(losses=losses, policy=policies, every=st.integers(1, 10))
def test_job_with_any_losses_ends_and_repeats_at_most_a_checkpoint_interval(losses, policy, every):
    simulated = Simulated(policy, losses, every)
    state = simulated.run()
    assert all(0 <= lost < every for lost in simulated.lost)
    assert state.lost_iterations == sum(simulated.lost)
    assert state.restarts <= policy.most_restarts
    if state.phase == "finished":
        assert state.finished == state.total
        assert len(state.ranks) == len(set(state.ranks)) == dict(state.grid)["dp"]
        assert not set(state.ranks) & set(state.spares)
    else:
        assert state.reason


@settings(deadline=None, max_examples=samples(200))
@given(losses=losses, policy=policies)
def test_every_rank_continues_the_state_of_one_rank_of_each_generation(losses, policy):
    state = Simulated(policy, losses, 5).run()
    for generation in range(state.generation + 1):
        ancestors = [state.ancestor(rank, generation) for rank in range(len(state.ranks))]
        assert ancestors == sorted(set(ancestors))
        assert max(ancestors) < len(state.origins[generation])


def lose(state, policy, *hosts, cause="host"):
    state = machine.step(state, Lost(reason=f"{' and '.join(hosts)} lost"), policy)
    state = machine.step(state, Diagnosed(cause=cause, hosts=hosts), policy)
    return machine.step(state, reschedule(state, policy, THREE_RACKS), policy)


def job(spares=("host5:rxe0",)):
    return machine.begin(total=100, grid=(("dp", 4),), ranks=RANKS, spares=spares)


def test_job_catches_up_to_what_a_checkpoint_held_beyond_the_reported_iterations():
    """A host that is lost takes the report of iteration 11 along, but its checkpoint was stored."""

    def restored(state, iterations):
        state = machine.step(lose(state, Policy(restart="same")), machine.Initialised(), Policy())
        return machine.step(state, Restored(iterations=iterations), Policy())

    state = restored(machine.step(job(), Progress(finished=10), Policy()), 11)
    assert (state.phase, state.finished) == ("running", 11)
    again = restored(state, 10)  # the newest checkpoint is corrupt
    assert (again.phase, again.lost_iterations) == ("catch_up", 1)
    assert machine.step(again, Progress(finished=11), Policy()).phase == "running"


def test_two_losses_with_one_spare_fail_or_shrink_by_policy():
    failed = lose(job(), Policy(), "host2", "host3")
    assert failed.phase == "failed"
    assert "1 spares are left for host2:rxe0, host3:rxe0, and without_spare is fail" in failed.reason
    shrunk = lose(job(), Policy(without_spare="shrink"), "host2", "host3")
    assert (shrunk.phase, shrunk.grid, shrunk.ranks) == ("initialise", (("dp", 2),), ("host1:rxe0", "host4:rxe0"))
    assert shrunk.origins[-1] == (0, 3)


def test_loss_of_the_spare_during_recovery_takes_the_next_one():
    policy = Policy()
    first = lose(job(SPARES), policy, "host2")
    assert first.ranks[1] == "host6:rxe0"
    second = lose(first, policy, "host6")
    assert (second.phase, second.ranks[1], second.spares) == ("initialise", "host5:rxe0", ())
    assert second.restarts == 2


def test_lost_spare_is_never_used():
    state = lose(job(SPARES), Policy(), "host2", "host6")
    assert (state.ranks[1], state.spares) == ("host5:rxe0", ())


def test_loss_of_storage_fails_with_the_reason():
    state = lose(job(), Policy(), cause="storage")
    assert state.phase == "failed"
    assert "without its storage" in state.reason


def test_job_that_is_lost_too_often_fails():
    policy = Policy(restart="same", most_restarts=2)
    state = job()
    for _ in range(2):
        state = lose(state, policy, "host2")
    state = machine.step(state, Lost(reason="host2 again"), policy)
    assert (state.phase, "restarted 2 times, which is its limit" in state.reason) == ("failed", True)


def test_event_of_another_phase_is_a_defect():
    with pytest.raises(ValueError, match="in phase running"):
        machine.step(job(), machine.Initialised(), Policy())


@pytest.mark.parametrize(
    ("lost", "spares", "best"),
    [
        ("host1:rxe0", ("host4:rxe0", "host2:rxe0"), "host2:rxe0"),  # same rack
        ("host1:rxe0", ("host4:rxe0", "host5:rxe0"), "host5:rxe0"),  # same parity
        ("host2:rxe0", ("host3:rxe0", "host4:rxe0", "host6:rxe0"), "host4:rxe0"),  # the first of equally good ones
    ],
)
def test_spare_of_the_same_rack_and_parity_is_chosen(lost, spares, best):
    assert choose_spare(THREE_RACKS, lost, spares) == best


def test_spare_with_fewer_cut_links_is_chosen():
    cut = [link.name for link in THREE_RACKS.links if link.a.node == "rtsw2" and link.b.node.startswith("ctsw")][:1]
    assert cut
    assert choose_spare(THREE_RACKS, "host2:rxe0", ("host4:rxe0", "host6:rxe0"), cut) == "host6:rxe0"
    assert choose_spare(THREE_RACKS, "host1:rxe0", ()) is None


def test_shrinking_removes_the_whole_group_of_a_lost_rank():
    assert shrunk_grid((("tp", 2), ("dp", 3)), [2]) == ((("tp", 2), ("dp", 2)), (0, 1, 4, 5))
    with pytest.raises(UsageError, match="from 2 to 1"):
        shrunk_grid((("dp", 2),), [0])
    with pytest.raises(UsageError, match="has no dimension dp"):
        shrunk_grid((("tp", 2), ("pp", 2)), [0])


def test_healthy_ranks_of_a_removed_group_become_spares():
    state = machine.begin(total=9, grid=(("tp", 2), ("dp", 3)), ranks=(*RANKS, *SPARES), spares=())
    assert lose(state, Policy(restart="shrink"), "host3").spares == ("host4:rxe0",)


SPEC = JobSpec(
    grid=(("dp", 3),),
    phases=(JobPhase(along="dp", collective="all-reduce", size_bytes=1 << 16),),
    ranks=RANKS[:3],
    storage=Storage(host="host6", checkpoint_bytes=1 << 17),
)
LAB = SimpleNamespace(kind="soft", topology=THREE_RACKS)


@pytest.mark.parametrize(
    ("changes", "policy", "spares", "message"),
    [
        ({"storage": None}, Policy(), SPARES, "this one stores none"),
        ({"storage": Storage(host="host6", ingest_bytes=1)}, Policy(), SPARES, "this one stores none"),
        ({"storage": replace(SPEC.storage, readers=("host5",))}, Policy(), SPARES, "no readers of its storage"),
        ({}, Policy(), (), "needs at least one spare"),
        ({}, Policy(restart="same"), SPARES, "uses no spares"),
        ({}, Policy(most_restarts=0), SPARES, "at least once"),
        ({"grid": (("tp", 3),)}, Policy(), ("host3:rxe1",), "has a rank on host3"),
        ({"storage": Storage(host="host6", checkpoint_bytes=1 << 10)}, Policy(), SPARES, "cannot hold a rank's state"),
        ({"grid": (("dp", 2),), "ranks": RANKS[:2]}, Policy(restart="shrink"), (), "from 2 to 1"),
        (
            {"phases": (JobPhase(along="dp", collective="all-gather", size_bytes=3 << 14),)},
            Policy(restart="shrink"),
            (),
            None,
        ),
        (
            {"phases": (JobPhase(along="dp", collective="reduce-scatter", size_bytes=3 << 14),)},
            Policy(without_spare="shrink"),
            SPARES,
            "a rank's state would change",
        ),
    ],
)
def test_job_that_could_not_be_restarted_is_refused(changes, policy, spares, message):
    spec = replace(SPEC, **changes)
    if "grid" in changes and "tp" in dict(changes["grid"]):
        spec = replace(spec, phases=(replace(SPEC.phases[0], along="tp"),))
    if message is None:
        check_on_lab(LAB, spec, Resilience(policy=policy, spares=spares))
        return
    with pytest.raises(UsageError, match=message):
        check_on_lab(LAB, spec, Resilience(policy=policy, spares=spares))


def test_job_that_can_be_restarted_is_accepted():
    check(SPEC, Resilience(policy=Policy(without_spare="shrink"), spares=SPARES))
    check_on_lab(LAB, SPEC, Resilience(policy=Policy(without_spare="shrink"), spares=SPARES))


# The compared state.

RESULTS = [[0, 5000, -1, 0], [6000, 300, 1, 17]]


def advanced(first, iterations, *, ranks=3, state=None, dtype="fp32"):
    """Return the state after iterations with correct results, computed element by element."""
    data = pattern.Pattern(ranks, dtype, "sum")
    state = State(RESULTS) if state is None else state
    array = np.zeros(7000, dtype=STORED[dtype])
    for iteration in range(first, first + iterations):
        for offset, count, source, index in RESULTS:
            period = data.reduced(list(range(ranks)), iteration) if source < 0 else data.period(source, iteration)
            pattern.fill(array[offset : offset + count], period, index)
        state.advance(array)
    return state


def part(first, iterations, ranks=3):
    groups = [list(range(ranks))]
    return {"ranks": ranks, "results": RESULTS, "groups": groups, "first": first, "iterations": iterations}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int32"])
def test_state_equals_its_closed_form_also_after_the_number_of_ranks_changed(dtype):
    state = advanced(2, 7, dtype=dtype)
    assert state.count_wrong([part(2, 7)], dtype, "sum") == 0
    advanced(9, 4, ranks=2, state=state, dtype=dtype)
    assert state.count_wrong([part(2, 7), part(9, 4, ranks=2)], dtype, "sum") == 0
    assert len(state.words) == 5300


@pytest.mark.parametrize(
    ("first", "iterations"),
    [(5, 6), (2, 8), (2, 10), (3, 9)],
    ids=["nothing restored", "one iteration left out at the end", "one too many", "one left out at the start"],
)
def test_state_of_a_wrong_restart_differs_in_most_elements(first, iterations):
    wrong = advanced(first, iterations).count_wrong([part(2, 9)], "fp32", "sum")
    assert wrong > 5300 * 0.9


def test_restored_state_is_that_of_the_checkpoint():
    stored = advanced(0, 5)
    state = State(RESULTS)
    state.restore(stored.words.tobytes() + b"filler")
    assert state.digest() == stored.digest()
    assert advanced(5, 3, state=state).digest() == advanced(0, 8).digest()
    with pytest.raises(ValueError, match="cannot hold a state"):
        state.restore(b"short")
    assert FACTOR % 2 == 1
    assert expected([part(0, 0)], "fp32", "sum").max() == 0


def test_history_leaves_out_placements_that_did_not_contribute_to_the_restored_checkpoint():
    """A store of placement 0 ends late, so its checkpoint is newer than those of placement 1."""
    second = StateHistory().resumed(1, stored_by=0, iterations=20)
    assert second.parts == ((0, 0), (1, 20))
    assert second.resumed(2, stored_by=0, iterations=40).parts == ((0, 0), (2, 40))
    assert second.resumed(2, stored_by=1, iterations=40).parts == ((0, 0), (1, 20), (2, 40))
    assert second.resumed(2, stored_by=0, iterations=20).parts == ((0, 0), (2, 20))
    assert second.resumed(2, stored_by=0, iterations=0).parts == ((2, 0),)


def test_history_of_a_rank_follows_its_lineage():
    state = lose(job(spares=()), Policy(restart="shrink"), "host2")
    programs = {
        generation: [
            {"ranks": ranks, "results": [[generation, rank]], "groups": [[generation]]} for rank in range(ranks)
        ]
        for generation, ranks in ((0, 4), (1, 3))
    }
    history = StateHistory().resumed(1, stored_by=0, iterations=20)
    parts = history.of_rank(1, state, programs, warmup=3)
    assert [(one["results"], one["first"], one["iterations"]) for one in parts] == [
        ([[0, 2]], 3, 20), ([[1, 1]], 23, 80),
    ]  # fmt: skip


def test_two_spares_on_one_host_are_refused_on_a_soft_lab():
    resilience = Resilience(policy=Policy(), spares=("host5:rxe0", "host5:rxe1"))
    with pytest.raises(UsageError, match="host5:rxe0, host5:rxe1: a host can have only one spare"):
        check_on_lab(LAB, SPEC, resilience)
    check_on_lab(SimpleNamespace(kind="rack", topology=THREE_RACKS), SPEC, resilience)


@pytest.mark.parametrize(("restart", "without_spare", "may"), [
    ("spare", "fail", False), ("spare", "shrink", True), ("shrink", "fail", True), ("same", "shrink", False),
])  # fmt: skip
def test_policy_may_shrink_only_where_a_restart_can_come_to_that(restart, without_spare, may):
    policy = Policy(restart=restart, without_spare=without_spare)
    assert policy.may_shrink == may
    assert may == (lose(job(()), policy, "host2").ranks == ("host1:rxe0", "host3:rxe0", "host4:rxe0"))
