"""The checker proves schedules correct for every algorithm, rank count and size, before any packet is sent."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import Lanes, inputs_of, memories
from samples import samples, some_of

from faultbed.testbed.errors import UsageError
from faultbed.traffic import schedules
from faultbed.traffic.schedules import (
    ALGORITHMS,
    ALL,
    Layout,
    Shape,
    build,
    cost,
    expanded,
    programs,
    results,
    schedule_check,
)
from faultbed.traffic.schedules.rooted import _trees

EVERY = pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS, ids=[f"{c}-{a}" for c, a in ALGORITHMS])


@st.composite
def shapes(draw, most=24):
    ranks = draw(st.integers(2, most))
    group = draw(st.sampled_from([size for size in range(1, ranks + 1) if ranks % size == 0]))
    return Shape(ranks=ranks, group=group, root=draw(st.integers(0, ranks - 1)), pieces=draw(st.integers(1, 5)))


@st.composite
def layouts(draw, shape, collective, most=200):
    if collective != "all-to-allv":
        elements = draw(st.integers(1, most))
        return Layout(elements=elements * shape.ranks if collective == "all-to-all" else elements)
    elements = draw(st.integers(shape.ranks, most))
    return Layout(elements=elements, counts=schedules.skewed_counts(elements, shape.ranks, draw(st.floats(0, 2))))


def may_run_in_place(schedule):
    return not schedule.moves["from_input"][schedule.moves["step"] >= 0].any()


@EVERY
@given(data=st.data())
@settings(max_examples=samples(40))
def test_schedule_gives_every_rank_the_result_of_its_collective(collective, algorithm, data):
    assert schedule_check.faults(build(collective, algorithm, data.draw(shapes()))) == []


@EVERY
@given(data=st.data())
@settings(max_examples=samples(25))
def test_schedule_without_any_single_move_is_wrong(collective, algorithm, data):
    """The checker notices every missing move, so schedules contain no useless one."""
    whole = build(collective, algorithm, data.draw(shapes(most=9)))
    row = data.draw(st.integers(0, len(whole.moves) - 1))
    assert schedule_check.faults(dataclasses.replace(whole, moves=np.delete(whole.moves, row)))


@EVERY
@given(data=st.data())
@settings(max_examples=samples(25))
def test_schedule_check_detects_a_misdirected_move(collective, algorithm, data):
    whole = build(collective, algorithm, data.draw(shapes(most=9)))
    moves = whole.moves.copy()
    row = data.draw(st.integers(0, len(moves) - 1))
    field = data.draw(st.sampled_from(["target", "reduce"] if whole.chunks > 1 else ["reduce"]))
    if field == "reduce":
        moves["reduce"][row] = not moves["reduce"][row]
    else:
        moves["target"][row] = (moves["target"][row] + 1) % whole.chunks
    if field == "target" and moves["span"][row] == whole.chunks:
        return  # if every rank shifts all blocks by one, the schedule may be correct again
    assert schedule_check.faults(dataclasses.replace(whole, moves=moves))


def test_schedule_check_explains_errors():
    good = build("all-reduce", "ring", Shape(ranks=3))
    lacking = dataclasses.replace(good, moves=good.moves[:-1])
    assert "it has 1 times the input of rank" in schedule_check.faults(lacking)[0]
    twice = dataclasses.replace(good, moves=np.append(good.moves, good.moves[-1:]))
    assert any("twice" in fault for fault in schedule_check.faults(twice))
    lost = good.moves.copy()
    lost["dst"] = 0
    output = schedule_check.faults(dataclasses.replace(good, moves=lost, period=3))
    assert any("sends to itself" in fault for fault in output)


# Programs, as sent to nodes, run on real numbers.


def check_memories(made, memories, elements, reduce):
    everything = reduce.reduce([inputs_of(rank, elements) for rank in range(len(made))])
    for program, memory in zip(made, memories, strict=True):
        assert program["results"] or "reduce"
        for offset, count, source, index in program["results"]:
            want = everything if source == ALL else inputs_of(source, elements)
            assert (memory[offset : offset + count] == want[index : index + count]).all()
        for offset, count, index, kept in program["fills"]:
            if kept:
                assert (memory[offset : offset + count] == inputs_of(program["rank"], elements)[index:][:count]).all()


@EVERY
@given(data=st.data())
@settings(max_examples=samples(20))
def test_programs_of_any_size_compute_the_result_and_keep_the_input(collective, algorithm, data):
    shape = data.draw(shapes(most=12))
    schedule = build(collective, algorithm, shape)
    layout = data.draw(layouts(shape, collective))
    in_place = may_run_in_place(schedule) and data.draw(st.booleans())
    reduce = data.draw(st.sampled_from([np.add, np.maximum]))
    made = programs(schedule, layout, in_place=in_place)
    longest = layout.elements if layout.counts is None else int(layout.counts.sum(axis=1).max())
    memory = memories(made, longest)
    for step in range(schedule.steps):
        wire = {(program["rank"], dst): [] for program in made for at, dst, _, _ in program["sends"] if at == step}
        for program in made:
            for at, dst, offset, count in program["sends"]:
                if at == step:
                    wire[program["rank"], dst].append(memory[program["rank"]][offset : offset + count].copy())
        for program in made:
            for at, src, offset, count, op in program["recvs"]:
                if at == step:
                    target = memory[program["rank"]][offset : offset + count]
                    piece = wire[src, program["rank"]].pop(0)
                    assert len(piece) == count
                    target[:] = reduce(target, piece) if op == "reduce" else piece
        assert not any(wire.values())
    check_memories(made, memory, longest, reduce)


@EVERY
@given(data=st.data())
@settings(max_examples=samples(20))
def test_segments_in_any_event_order_with_few_slots_give_the_result(collective, algorithm, data):
    """No order of events leads to a wrong result or a deadlock."""
    shape = data.draw(shapes(most=7))
    schedule = build(collective, algorithm, shape)
    layout = data.draw(layouts(shape, collective, most=60))
    made = programs(schedule, layout)
    longest = layout.elements if layout.counts is None else int(layout.counts.sum(axis=1).max())
    segment, qps = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 5))
    spread = data.draw(st.sampled_from(schedules.SPREADS))
    lanes = Lanes(made, longest, segment, slots=2, qps=qps, spread=spread)
    writes = schedules.writes_by_queue_pair(made, qps, spread, segment)
    assert {(src, dst, qp): sizes for (src, dst), each in writes.items() for qp, sizes in enumerate(each)} == {
        (src, *lane): [segment.size for segment in segments]
        for src, plan in enumerate(lanes.plans)
        for lane, segments in plan.sends.items()
    }, "the controller and a rank must spread alike"
    choice = data.draw(st.randoms(use_true_random=False))
    while ready := list(lanes.moves()):
        lanes.do(*choice.choice(ready))
    assert lanes.are_done()
    check_memories(made, lanes.data, longest, np.add)


# Known properties of the algorithms.


@given(elements=st.integers(0, 10_000), chunks=st.integers(1, 64))
def test_blocks_cover_the_buffer_once_and_evenly(elements, chunks):
    sizes = np.diff(schedules.block_bounds(elements, chunks))
    assert sizes.sum() == elements
    assert sizes.max() - sizes.min() <= 1


@given(ranks=st.integers(2, 20), extra=st.integers(0, 500), skew=st.floats(0, 3))
def test_skewed_counts_add_up_and_are_never_zero(ranks, extra, skew):
    counts = schedules.skewed_counts(ranks + extra, ranks, skew)
    assert (counts.sum(axis=1) == ranks + extra).all()
    assert counts.min() >= 1
    assert (np.diff(counts[0]) <= 1).all()  # the first rank is the hot one, except for rounding


@pytest.mark.parametrize("ranks", [2, 3, 7, 8, 20])
def test_schedule_step_counts_match_the_literature(ranks):
    log = (ranks - 1).bit_length()
    steps = {pair: build(*pair, Shape(ranks=ranks)).steps for pair in ALGORITHMS}
    assert steps["all-reduce", "ring"] == 2 * (ranks - 1)
    assert steps["all-reduce", "recursive-halving"] == 2 * log
    assert steps["all-gather", "recursive-doubling"] == steps["barrier", "recursive-doubling"] == log
    assert steps["all-to-all", "recursive-doubling"] == steps["broadcast", "recursive-doubling"] == log
    assert steps["all-to-all", "full-mesh"] == 1


@pytest.mark.parametrize("algorithm", ["ring", "recursive-halving", "full-mesh"])
def test_schedule_bytes_per_rank_are_optimal(algorithm):
    made = programs(build("all-reduce", algorithm, Shape(ranks=6)), Layout(elements=6000))
    for program in made:
        assert sum(count for *_, count in program["sends"]) == 2 * 5 * 1000


@pytest.mark.parametrize(("algorithm", "peers"), [("ring", 1), ("recursive-halving", 3), ("full-mesh", 7)])
def test_all_reduce_uses_the_same_connections_in_both_halves(algorithm, peers):
    """Reduce-scatter and all-gather use the same pairs of ranks, so fewer queue pairs are needed."""
    pairs = schedules.peers_of(programs(build("all-reduce", algorithm, Shape(ranks=8)), Layout(elements=80)))
    assert len(pairs) == 8 * peers


@given(ranks=st.integers(2, 40))
def test_double_binary_tree_has_no_rank_interior_in_both_trees(ranks):
    interior = [set(parent.tolist()) for _, parent, _, _ in _trees(ranks)]
    assert not interior[0] & interior[1]


def test_hierarchical_sends_only_a_share_between_groups():
    made = expanded(build("all-reduce", "hierarchical", Shape(ranks=8, group=4)))
    across = made[(made["step"] >= 0) & (made["src"] // 4 != made["dst"] // 4)]
    assert across["span"].sum() == 2 * 8  # each rank sends its eighth, there and back, not all eight


@pytest.mark.parametrize("ranks", some_of([3072, 24576], 1))
def test_schedule_for_thousands_of_ranks_is_small(ranks):
    for collective, algorithm in ALGORITHMS:
        made = build(collective, algorithm, Shape(ranks=ranks, group=8, pieces=16))
        assert len(made.moves) < 70 * ranks, f"{collective} by {algorithm}"


# Cost.

NETWORK = cost.NETWORKS["rack"]


def test_cost_of_a_ring_matches_the_formula():
    network = dataclasses.replace(NETWORK, near=NETWORK.far)
    ranks, size = 10, 1 << 20
    link = network.far
    want = 2 * (ranks - 1) * (link.alpha_ns + size / ranks * link.ns_per_byte)
    assert cost.predict_ns(build("all-reduce", "ring", Shape(ranks=ranks)), size, network) == pytest.approx(want)


@EVERY
@given(shape=shapes())
@settings(max_examples=samples(20))
def test_cost_from_one_period_equals_cost_of_all_ranks(collective, algorithm, shape):
    """The cost of one rank's short schedule equals the cost of the schedule of all ranks."""
    short = build(collective, algorithm, shape)
    long = dataclasses.replace(short, moves=expanded(short), period=short.ranks)
    times = [cost.predict_ns(one, 1 << 20, NETWORK, group=shape.group) for one in (short, long)]
    # A run of blocks that wraps around the buffer's end is two messages in the long form, and one in the short form.
    assert times[0] <= times[1] <= times[0] + short.steps * short.chunks * NETWORK.far.overhead_ns


def test_auto_algorithm_depends_on_size_and_rank_count():
    def best(ranks, size):
        return cost.best_algorithm("all-reduce", cost.shape_for(ranks, size), size, NETWORK)

    assert best(64, 1024) == "recursive-doubling"
    assert best(64, 1 << 26) != "recursive-doubling"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all-reduce", "ring", Shape(ranks=1)), "at least 2 ranks"),
        (("all-reduce", "star", Shape(ranks=4)), 'no algorithm "star" for all-reduce; choose one of ring'),
        (("all-in", "ring", Shape(ranks=4)), 'no collective "all-in"; choose one of all-reduce'),
        (("broadcast", "ring", Shape(ranks=4, root=4)), "root of broadcast must be a rank from 0 to 3, got 4"),
        (("all-reduce", "hierarchical", Shape(ranks=7, group=2)), "7 ranks are not a multiple of 2"),
        (("all-reduce", "double-binary-tree", Shape(ranks=4, pieces=0)), "1 to 64 pieces"),
    ],
)
def test_schedule_refusals_list_the_alternatives(arguments, message):
    with pytest.raises(UsageError, match=message):
        build(*arguments)


def test_exchange_in_place_is_refused():
    with pytest.raises(UsageError, match="cannot run in place"):
        programs(build("all-to-all", "full-mesh", Shape(ranks=4)), Layout(elements=8), in_place=True)


def test_all_to_all_with_indivisible_size_is_rejected():
    with pytest.raises(UsageError, match="10 elements cannot be divided among 4 ranks; use 12 elements"):
        programs(build("all-to-all", "full-mesh", Shape(ranks=4)), Layout(elements=10))


def test_results_cover_the_whole_output():
    made = build("all-to-all", "full-mesh", Shape(ranks=5))
    assert results(made, 2)[:, 0].tolist() == list(range(5))
