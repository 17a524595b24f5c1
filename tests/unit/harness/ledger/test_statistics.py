"""Decisions about numbers: what each estimand needs, and what leaves it undecided."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from error_limits import most_errors
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.ledger.statistics.contrasts import Member, decide_contrast
from faultbed.harness.ledger.statistics.decision import Decision, Look, Outcome, Rule, Tolerance, describe, tail_for
from faultbed.harness.ledger.statistics.event_times import decide_event_time
from faultbed.harness.ledger.statistics.level_tolerance import (
    DECLARED,
    decide_from_one_run,
    declared_tolerance,
    measured_tolerance,
)
from faultbed.harness.ledger.statistics.paired_runs import decide_pairs, factor_range
from faultbed.harness.ledger.statistics.run_facts import decide_fact
from faultbed.harness.ledger.statistics.sequential_looks import fewest_runs, looks
from faultbed.harness.ledger.statistics.shares import decide_share
from faultbed.harness.ledger.statistics.unpaired_runs import decide_runs, independent_runs, median_range

HOLDS, BROKEN, UNDECIDED = Outcome.HOLDS, Outcome.BROKEN, Outcome.UNDECIDED
RACK = DECLARED["rack"]


def once(runs, tail=0.005):
    return (Look(runs=runs, tail=tail),)


@pytest.mark.parametrize(
    ("sign", "bound", "value", "options", "outcome"),
    [
        ("max", 2, 2, {}, HOLDS),
        ("max", 2, 3, {}, BROKEN),
        ("min", 2, 1, {}, BROKEN),
        ("equals", 0, 0, {}, HOLDS),
        ("equals", 0, 3, {"censored": True}, BROKEN),
        ("equals", 3, 3, {"censored": True}, UNDECIDED),
        ("max", 2, 1, {"censored": True}, UNDECIDED),
        ("min", 2, 3, {"censored": True}, HOLDS),
        ("max", 2, 2.1, {"between": (1.9, 2.3)}, UNDECIDED),
        ("max", 2, float("nan"), {}, UNDECIDED),
        ("max", 2, float("inf"), {}, UNDECIDED),
        ("max", 2, None, {}, UNDECIDED),
        ("equals", "host2", "host2", {}, HOLDS),
        ("equals", "host2", "host3", {}, BROKEN),
    ],
)
def test_fact_is_decided_by_value_and_error_of_measurement(sign, bound, value, options, outcome):
    decision = decide_fact(sign, bound, value, **options)
    assert decision.outcome is outcome
    assert (decision.why is None) == (outcome is not UNDECIDED)


def test_event_whose_end_was_not_seen_breaks_a_maximum_and_never_keeps_it():
    assert decide_event_time("max", 4.0, 5.0, between=(4.5, 5.5), censored=True).outcome is BROKEN
    assert decide_event_time("max", 4.7, 5.0, between=(4.5, 5.5), censored=True).outcome is UNDECIDED
    assert decide_event_time("max", 9.0, 5.0, between=(4.5, 5.5), censored=True).why == "censored"
    assert decide_event_time("max", 9.0, 5.0, between=(4.5, 5.5)).outcome is HOLDS


def member(name, value, spread=0.02, after=None):
    return Member(
        name=name,
        value=value,
        before=(value - spread, value + spread),
        after=(after - spread, after + spread) if after is not None else (value - spread, value + spread),
    )


def test_contrast_holds_only_if_every_member_holds():
    """A short fault at 0.75 used to hide behind a long one at 0.88, whose interval alone was known."""
    long, short = member("long", 0.95), Member(name="short", value=0.96, before=(0.5, 1.4), after=(0.5, 1.4))
    assert decide_contrast("min", 0.8, [long], tolerance=RACK, tail=0.005).outcome is HOLDS
    both = decide_contrast("min", 0.8, [long, short], tolerance=RACK, tail=0.005)
    assert (both.outcome, both.subject, both.rule.members) == (UNDECIDED, "short", 2)
    assert decide_contrast("min", 0.8, [long, member("deep", 0.5)], tolerance=RACK, tail=0.005).outcome is BROKEN


def test_contrast_needs_both_controls_and_their_agreement():
    one = Member(name="f", value=0.95, before=(0.94, 0.96), after=None)
    assert decide_contrast("min", 0.8, [one], tolerance=RACK, tail=0.005).why == "no-control"
    moved = member("f", 0.95, after=0.7)
    assert decide_contrast("min", 0.8, [moved], tolerance=RACK, tail=0.005).why == "controls-disagree"
    assert decide_contrast("min", 0.8, [], tolerance=RACK, tail=0.005).why == "no-value"


@pytest.mark.parametrize(("bound", "outcome"), [(1.6, HOLDS), (1.4, UNDECIDED), (1.0, UNDECIDED), (0.7, BROKEN)])
def test_setting_from_one_run_is_decided_only_beyond_the_tolerance(bound, outcome):
    tolerance = Tolerance(factor=1.25, source="measured", level=0.05)
    result = decide_from_one_run("max", bound, 1.1, interval=(1.0, 1.2), tolerance=tolerance, tail=0.005)
    assert result.outcome is outcome


def test_missing_tolerance_is_never_one():
    for factor in (1.0, 0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="no factor above 1"):
            Tolerance(factor=factor, source="measured")
    assert declared_tolerance("soft", None).factor == declared_tolerance("soft", "tcg").factor == 1.75
    assert (declared_tolerance("soft", "kvm").factor, declared_tolerance("rack", None).factor) == (1.2, 1.1)
    assert measured_tolerance([], RACK) is RACK
    assert measured_tolerance([1.0] * 40, RACK) is RACK
    assert measured_tolerance([0.5], RACK).factor == 2.0


def test_sign_flips_equal_their_enumeration():
    """All signs of eight differences: the range ends where so many of 256 patterns are at least as extreme."""
    logs = np.log(np.array([1.01, 1.05, 0.99, 1.1, 1.02, 1.07, 1.03, 1.04]))
    tail = 0.02
    low, high = factor_range(np.exp(logs), 0, tail)

    def p_value(bound):
        deviations = logs - math.log(bound)
        ranks = np.argsort(np.argsort(np.abs(deviations))) + 1
        against = ranks[deviations <= 0].sum()
        sums = [
            sum(rank for rank, head in zip(ranks, heads, strict=True) if head)
            for heads in itertools.product((0, 1), repeat=8)
        ]
        return np.mean(np.array(sums) <= against)

    assert p_value(low * 0.9999) <= tail < p_value(low * 1.0001)
    assert high > 1.05


def test_pairs_of_fewer_than_eight_decide_nothing_and_missing_ones_count_against_both():
    assert decide_pairs("max", 1.0, [2.0] * 7, looks=once(7)).why == "too-few-runs"
    assert decide_pairs("max", 1.0, [2.0 + 0.01 * n for n in range(8)], looks=once(8)).outcome is BROKEN
    some = [*[2.0 + 0.01 * n for n in range(8)], None]
    assert decide_pairs("max", 1.0, some, looks=once(9)).why == "missing-runs"
    assert decide_pairs("max", 9.0, some, looks=once(9)).why == "missing-runs"


def test_pairs_at_their_bound_rarely_decide_whatever_the_machine_does():
    """The order of a pair is a coin, so that a drift of the machine is as often in the run as in its twin."""
    rng, count = np.random.default_rng(1), 600
    outcomes = []
    for _ in range(count):
        level = np.exp(np.cumsum(0.05 * rng.normal(size=24))).reshape(12, 2)
        swap = rng.random(12) < 0.5
        run, twin = np.where(swap, level[:, 0], level[:, 1]), np.where(swap, level[:, 1], level[:, 0])
        outcomes.append(decide_pairs("max", 1.2, list(1.2 * run / twin), looks=looks(12, 0.005)).outcome)
    assert max(outcomes.count(BROKEN), outcomes.count(HOLDS)) <= most_errors(count, 0.005)


def test_runs_are_decided_by_their_median_and_rare_slow_ones_do_not_move_it():
    values = [1.0 + 0.001 * (7 * n % 11) for n in range(40)]
    values[5] = values[25] = 9.0
    assert decide_runs("max", 1.1, values, looks=once(40)).outcome is HOLDS
    assert decide_runs("max", 1.1, values, looks=once(40)).rule.runs == 40
    assert decide_runs("max", 0.9, values, looks=once(40)).outcome is BROKEN
    assert decide_runs("max", 1.1, values[:12], looks=once(12), are_drawn=True).outcome is HOLDS


def test_correlated_runs_at_their_median_rarely_decide():
    rng, count, wrong = np.random.default_rng(2), 400, 0
    for _ in range(count):
        level = [rng.normal()]
        for _ in range(15):
            level.append(0.8 * level[-1] + 0.6 * rng.normal())
        wrong += decide_runs("max", 1.0, list(np.exp(0.03 * np.array(level))), looks=once(16)).outcome is BROKEN
    assert wrong <= most_errors(count, 0.005)
    assert independent_runs([1.0, 1.0, 1.0]) == 1.0
    assert median_range([1.0, 2.0], 0, 2.0, 0.005) == (-math.inf, math.inf)


def test_looks_are_fixed_and_their_risks_add_up_to_the_tail():
    assert [(look.runs, round(look.tail, 6)) for look in looks(12, 0.005)] == [(9, 0.002), (12, 0.003)]
    assert looks(8, 0.005) == once(8)
    assert looks(7, 0.005) == ()
    assert fewest_runs(0.005) == 8
    for most in range(8, 101):
        planned = looks(most, 0.005)
        assert sum(look.tail for look in planned) == pytest.approx(0.005)
        assert planned[-1].runs == most
    with pytest.raises(ValueError, match="at most 100"):
        looks(101, 0.005)


def test_share_needs_enough_trials_to_hold():
    """15 probes without a loss do not show that a link loses less than a tenth."""
    assert decide_share("max", 0.1, 0, 15, tail=0.005).why == "not-significant"
    assert decide_share("max", 0.1, 0, 100, tail=0.005).outcome is HOLDS
    assert decide_share("max", 0.1, 40, 100, tail=0.005).outcome is BROKEN
    assert decide_share("max", 0.1, 0, 0, tail=0.005).why == "no-value"


def test_bounds_of_an_experiment_divide_its_risk():
    assert (tail_for(1), tail_for(2), tail_for(4)) == (0.005, 0.005, 0.0025)


def test_only_undecided_decisions_have_a_reason():
    with pytest.raises(AssertionError):
        Decision(outcome=HOLDS, observed=1, rule=Rule(kind="value"), why="no-value")
    assert "level tolerance 1.1 (rack)" in describe(Rule(kind="tolerance", tail=0.005, tolerance=RACK))
    assert describe(Rule(kind="value")) == ""


@given(
    st.lists(st.floats(0.01, 100), min_size=0, max_size=30),
    st.integers(0, 5),
    st.floats(0.5, 2),
    st.sampled_from(["min", "max"]),
)
def test_missing_runs_never_decide_what_the_known_ones_leave_open(known, missing, bound, sign):
    whole = decide_pairs(sign, bound, known, looks=once(len(known)))
    less = decide_pairs(sign, bound, [*known, *([None] * missing)], looks=once(len(known) + missing))
    if less.outcome is not UNDECIDED and whole.outcome is not UNDECIDED:
        assert less.outcome is whole.outcome
