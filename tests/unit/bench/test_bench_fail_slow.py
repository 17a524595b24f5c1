"""The bench of fail-slow detection decides its goals by the whole interval."""

from __future__ import annotations

import pytest

from bench import fail_slow
from bench.rows import MISSED, OPEN, REACHED


@pytest.mark.parametrize(("count", "outcome"), [(0, REACHED), (10, OPEN), (60, MISSED)])
def test_bench_fail_slow_goal_within_the_interval_of_false_alarms_is_undecided(count, outcome):
    """0.50 false alarms in 1,000 iterations, with an interval to 1.07, counted as reached (at most 1)."""
    row = fail_slow.false_alarms(count, 20_000, "2 % noise")
    assert row[-1] == outcome
    assert row[0] == "false alarms in 1,000 iterations of the job; 2 % noise"
