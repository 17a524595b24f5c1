"""Schedules are proven right by the checker, for every rank count and size, before any packet is sent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import UsageError
from traffic import check, schedule
from traffic.node.plan import make_plan


@given(ranks=st.integers(2, 12), elements=st.integers(1, 200), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_every_rank_ends_with_the_sum(ranks, elements, seed):
    generator = np.random.default_rng(seed)
    inputs = [generator.integers(-1000, 1000, elements) for _ in range(ranks)]
    for result in check.simulate(schedule.ring_all_reduce(ranks), inputs):
        assert (result == sum(inputs)).all()


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16])
def test_ring_counts_every_input_once(ranks):
    assert check.faults(schedule.ring_all_reduce(ranks)) == []


def test_the_checker_bites():
    good = schedule.ring_all_reduce(3)
    broken = schedule.Schedule(
        collective="all-reduce", algorithm="ring", ranks=3, chunks=3, steps=(*good.steps[:-1], good.steps[0])
    )
    assert any("times, not once" in fault for fault in check.faults(broken))


@given(elements=st.integers(0, 10_000), chunks=st.integers(1, 64))
def test_chunks_cover_the_buffer_once_and_evenly(elements, chunks):
    ranges = [schedule.chunk_range(elements, chunks, index) for index in range(chunks)]
    assert [offset for offset, _ in ranges] == [sum(n for _, n in ranges[:i]) for i in range(chunks)]
    assert sum(count for _, count in ranges) == elements
    assert max(c for _, c in ranges) - min(c for _, c in ranges) <= 1


def test_ring_sends_what_is_optimal():
    made = schedule.build("all-reduce", "ring", 4)
    sends = schedule.program(made, rank=2, elements=1000)["sends"]
    assert sum(count for *_, count in sends) == 2 * 3 * 1000 // 4


@pytest.mark.parametrize(
    ("arguments", "what"),
    [(("all-reduce", "ring", 1), "at least 2 ranks"), (("all-reduce", "tree", 4), "all-reduce by ring")],
)
def test_refusals_say_what_there_is(arguments, what):
    with pytest.raises(UsageError, match=what):
        schedule.build(*arguments)


class Lanes:
    """Executes the plans of all ranks on arrays, delivering segments in an order that a test chooses."""

    def __init__(self, ranks, elements, segment):
        made = schedule.ring_all_reduce(ranks)
        self.plans = [make_plan(schedule.program(made, rank=r, elements=elements), segment) for r in range(ranks)]
        self.data = [np.arange(elements) * (r + 1) + r for r in range(ranks)]
        self.want = sum(self.data)
        self.wire = {(src, dst): [] for src, dst in schedule.peers_of(made)}
        self.sent = dict.fromkeys(self.wire, 0)
        self.applied = dict.fromkeys(self.wire, 0)

    def met(self, rank, segment):
        return all(self.applied[p, rank] >= n for p, n in segment.received) and all(
            self.sent[rank, p] >= n for p, n in segment.acked
        )

    def moves(self):
        for src, dst in self.wire:
            lane = self.plans[src].sends.get(dst, [])
            if self.sent[src, dst] < len(lane) and self.met(src, lane[self.sent[src, dst]]):
                yield "send", src, dst
            lane = self.plans[dst].recvs.get(src, [])
            if self.wire[src, dst] and self.met(dst, lane[self.applied[src, dst]]):
                yield "apply", src, dst

    def do(self, what, src, dst):
        if what == "send":
            segment = self.plans[src].sends[dst][self.sent[src, dst]]
            self.wire[src, dst].append(self.data[src][segment.offset : segment.offset + segment.size].copy())
            self.sent[src, dst] += 1
        else:
            segment = self.plans[dst].recvs[src][self.applied[src, dst]]
            target = self.data[dst][segment.offset : segment.offset + segment.size]
            piece = self.wire[src, dst].pop(0)
            target[:] = target + piece if segment.reduce else piece
            self.applied[src, dst] += 1


@given(
    ranks=st.integers(2, 6),
    elements=st.integers(1, 60),
    segment=st.integers(1, 20),
    choice=st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_pipelined_segments_give_the_sum_in_any_order_of_events(ranks, elements, segment, choice):
    lanes = Lanes(ranks, elements, segment)
    while ready := list(lanes.moves()):
        lanes.do(*choice.choice(ready))
    for data in lanes.data:
        assert (data == lanes.want).all()
