"""The rank that a fault slowed is named whatever else loads the machine; random differences name no rank."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.analysis.ranks.straggler import LEVEL, chance, slowdowns, slowest
from faultbed.harness.record.evidence.workload_evidence import Iteration, RankSeries

STEP_NS = 3_000_000_000


def series(rows):
    """Return one rank for each column of compute times in ms; iterations are three seconds apart."""
    return tuple(
        RankSeries(
            rank=rank,
            iterations=tuple(
                Iteration(index=at, start_ns=at * STEP_NS, compute_ns=int(row[rank] * 1e6), comm_ns=1, wait_ns=0)
                for at, row in enumerate(rows)
            ),
        )
        for rank in range(len(rows[0]))
    )


def under(first, last):
    return {"slow-gpu": (first * STEP_NS, (last + 1) * STEP_NS)}


# Compute times of four ranks, as a machine measured them whose other work ended shortly before the fault.
BUSY = [
    (696, 770, 737, 676), (641, 1090, 827, 1148), (752, 918, 953, 772), (1163, 1466, 1541, 1218),
    (919, 684, 870, 1026), (740, 731, 651, 521), (664, 652, 381, 632), (721, 683, 740, 704), (887, 668, 794, 444),
]  # fmt: skip
HALVED = [(601, 1000, 441, 481), (445, 875, 474, 382), (452, 962, 619, 589), (587, 946, 500, 568)]


def test_straggler_of_a_slow_gpu_is_named_although_all_ranks_got_faster():
    """The slow rank's times grew by a fifth only, while those of the others fell by a third."""
    slow = slowdowns(series(BUSY + HALVED), under(len(BUSY), len(BUSY) + 3))
    top, is_sure = slowest(slow)

    assert top is not None
    assert (top.rank, is_sure) == (1, True)
    assert top.during_ns / top.before_ns < 1.35
    assert top.ratio > 1.6


def test_straggler_on_a_uniformly_slower_machine_is_none():
    rows = BUSY + [tuple(2.5 * time for time in row) for row in BUSY[5:]]

    assert slowest(slowdowns(series(rows), under(len(BUSY), len(BUSY) + 3)))[0] is None


def test_straggler_of_two_iterations_is_not_significant():
    rows = [*BUSY[:3], *HALVED[:2]]
    top, is_sure = slowest(slowdowns(series(rows), under(3, 4)))

    assert top is not None
    assert (top.rank, is_sure) == (1, False)


def test_straggler_of_two_ranks_is_the_slower_one():
    rows = [(700 + 10 * at, 705 + 9 * at) for at in range(12)] + [(1500, 700 + at) for at in range(6)]
    top, is_sure = slowest(slowdowns(series(rows), under(12, 17)))

    assert top is not None
    assert (top.rank, is_sure) == (0, True)


def test_straggler_ignores_phases_partly_under_the_fault():
    """The fault began at the end of one phase. If that phase counted, the four slow iterations would not be the
    slowest."""
    rows = [(700, 700, 700)] * 12 + [(700, 1600, 700)] + [(700, 1500, 700)] * 4
    fault = {"slow-gpu": (12 * STEP_NS + 1_200_000_000, len(rows) * STEP_NS)}

    (slow,) = [slowdown for slowdown in slowdowns(series(rows), fault) if slowdown.rank == 1]
    assert slow.iterations == (12, 4)
    assert slow.ratio == pytest.approx(1500 / 700)
    assert slowest([slow])[1]


def test_straggler_with_too_few_iterations_is_unknown():
    assert slowdowns((), under(0, 1)) == ()
    assert slowdowns(series(BUSY), under(3, 3)) == ()
    assert slowdowns(series([(0, 0)] * 9), under(3, 6)) == ()


def test_straggler_from_noise_alone_is_rare():
    """Not above the share of runs that the level allows, by more than this many runs would show by chance."""
    rng, runs = np.random.default_rng(5), 400
    named = 0
    for _ in range(runs):
        rows = 700 * np.exp(0.3 * rng.standard_normal((30, 4)))
        named += slowest(slowdowns(series(rows.tolist()), under(20, 24)))[1]
    assert named <= runs * LEVEL + 4 * math.sqrt(runs * LEVEL)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_chance_equals_the_enumeration_of_all_splits(before, during):
    """All splits are counted by their rank sums; equal values count against the slow rank."""
    values = during + before
    order = sorted(range(len(values)), key=lambda at: (values[at], at))
    rank = {at: place + 1 for place, at in enumerate(order)}
    rank_sum = sum(rank[at] for at in range(len(during)))
    ways = list(itertools.combinations(range(1, len(values) + 1), len(during)))

    assert chance(before, during) == pytest.approx(sum(sum(way) >= rank_sum for way in ways) / len(ways))


def test_chance_approximation_agrees_with_the_exact_value(monkeypatch):
    """Above the size up to which all splits are enumerated, the normal approximation is as good."""
    rng = np.random.default_rng(1)
    before = rng.standard_normal(100).tolist()
    for shift in (0.0, 0.4, 0.8):
        during = (rng.standard_normal(19) + shift).tolist()
        exact = chance(before, during)
        with monkeypatch.context() as patched:
            patched.setattr("faultbed.harness.analysis.ranks.straggler._EXACT", 0)
            assert chance(before, during) == pytest.approx(exact, rel=0.25)
