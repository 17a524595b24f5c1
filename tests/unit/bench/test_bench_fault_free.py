"""The bench of fault-free runs: run and twin are far enough apart, and a job that became slower is counted."""

from __future__ import annotations

import numpy as np
import pytest

from bench.fault_free import APART_S, BLOCK, pairs_of, rows_of
from bench.rows import MISSED, REACHED


def iterations(blocks, *, slower=1.0):
    """Return times of 50 ms that differ by a tenth; in every tenth block the middle takes `slower` times as long."""
    noise = np.random.default_rng(1).normal(1, 0.1, size=(blocks, BLOCK))
    noise[::10, BLOCK // 3 : 2 * BLOCK // 3] *= slower
    return (50e6 * noise).ravel()


def test_twin_ended_long_enough_before_the_run():
    """With blocks of 3.1 s, the seventh (at 18.6 s) is the first one after a block that ended at least 15 s before."""
    assert APART_S == 15
    assert len(pairs_of(1.03 * iterations(30))) == 30 - 6
    assert pairs_of(iterations(3)) == []


def test_steady_job_has_no_wrong_fail():
    rows = list(rows_of(pairs_of(iterations(60))))
    assert [row[1] for row in rows[:2]] == ["0", "0"]
    assert {row[-1] for row in rows[:2]} == {REACHED}


def test_run_that_becomes_slower_is_counted():
    """Two of the blocks with a twin are slow (numbers 10 and 20), and their twins are not."""
    rows = list(rows_of(pairs_of(iterations(30, slower=1.6))))
    assert rows[0][1] == rows[1][1] == "2"
    assert rows[0][-1] == MISSED


def test_pairs_without_any_interval_do_not_reach_the_goal():
    still = pairs_of(np.full(30 * BLOCK, 50e6))
    if all(pair.interval is None for pair in still):
        assert {row[-1] for row in list(rows_of(still))[:2]} == {MISSED}
    else:
        assert still[0].ratio == pytest.approx(1)
