"""Packets that a seed selects, in the plan and in the nftables rule. How the kernel applies it is tested on a lab."""

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_faults import SOFT, soft

from faultbed.harness.experiment import experiment_file
from faultbed.harness.experiment.run_plan import plan as plan_experiment
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.selection import MOST_POSITIONS, MOST_SEED, by_share, netem_seed

SHARES = st.floats(1e-6, 1 - 1e-6)
SEEDS = st.integers(0, MOST_SEED)


@given(SHARES, SEEDS)
def test_share_of_a_period_is_the_requested_share(share, seed):
    """The share is exact within 0.1 % of the packets taken or spared; every position lies inside the period."""
    chosen = by_share(share, seed)
    smaller = min(share, 1 - share)
    assert chosen.share == pytest.approx(share, abs=smaller / 1000)
    assert 0 < len(chosen.positions) <= MOST_POSITIONS
    assert list(chosen.positions) == sorted(set(chosen.positions))
    assert 0 <= chosen.positions[0] <= chosen.positions[-1] < chosen.period < 2**31


@pytest.mark.parametrize("share", [0.5, 0.3, 0.25, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003, 0.001, 0.0001, 0.00001, 0.9])
def test_common_shares_are_exact(share):
    chosen = by_share(share, 7)
    taken = chosen.selected_among(chosen.period)
    assert taken / chosen.period == pytest.approx(share, rel=1e-12)


@given(SHARES, SEEDS, st.integers(0, 1000))
def test_count_of_the_first_packets_is_the_sum_of_the_single_ones(share, seed, packets):
    """The count is also exact across the end of a period."""
    chosen = by_share(share, seed)
    begin, listed = chosen.period - 100, set(chosen.positions)
    expected = sum((number % chosen.period in listed) is not chosen.spared for number in range(begin, begin + packets))
    assert chosen.selected_among(begin + packets) - chosen.selected_among(begin) == expected
    assert sum(chosen.takes(number) for number in range(50)) == chosen.selected_among(50)


@given(SHARES, SEEDS)
def test_selection_is_reproducible_per_seed_and_differs_between_seeds(share, seed):
    assert by_share(share, seed) == by_share(share, seed)
    assert by_share(share, seed).positions != by_share(share, seed + 1).positions


def test_selection_draw_is_unchanged_across_versions():
    """A seed in an old report must select the same packets. These were drawn by the first version."""
    chosen = by_share(0.1, 1)
    assert (chosen.period, chosen.positions[:6]) == (10240, FIRST_DRAWN)
    assert netem_seed(1) == FIRST_NETEM_SEED


def test_selection_gaps_are_random():
    """A random share of p leaves gaps that are geometric: a gap of at most g has the chance 1 - (1 - p)^g.

    Kolmogorov and Smirnov: over 20 seeds with 1023 gaps each, no point is farther off than 0.02 (1 % would be 0.0114).
    """
    share, gaps = 0.02, []
    for seed in range(20):
        positions = by_share(share, seed).positions
        gaps += [after - before for before, after in itertools.pairwise(positions)]
    for gap in range(1, 400):
        observed_share = sum(one <= gap for one in gaps) / len(gaps)
        assert observed_share == pytest.approx(1 - (1 - share) ** gap, abs=0.02)


def test_positions_are_equally_likely():
    """Over 400 seeds each tenth of the period gets a tenth of the positions, within five standard deviations."""
    period = by_share(0.1, 0).period
    tenths = [0] * 10
    for seed in range(400):
        for position in by_share(0.1, seed).positions:
            tenths[position * 10 // period] += 1
    total = sum(tenths)
    assert max(abs(count - total / 10) for count in tenths) < 5 * (total * 0.09) ** 0.5


@pytest.mark.parametrize("kind", ["packet.drop", "packet.mark", "packet.corrupt", "packet.reorder", "packet.duplicate"])
def test_rule_of_a_share_lists_the_packets_of_the_seed(kind):
    planned = plan(
        FaultSpec(kind=kind, target="host1:rxe0", for_s=1.0, params={"share": 0.02}, seed=5), SOFT, lab_kind="soft"
    )
    match = re.search(r"numgen inc mod (\d+) \{ ([\d, ]+) \}", planned.request["args"]["ruleset"])
    assert int(match[1]) == planned.mechanism.selection.period
    assert tuple(map(int, match[2].split(", "))) == by_share(0.02, 5).positions
    assert str(planned.mechanism.selection) == "selected by seed 5, period 51200"


def test_rule_of_a_large_share_lists_the_packets_that_are_spared():
    planned = soft("packet.drop", "host1:rxe0", share=0.99)
    assert "numgen inc mod 102400 != { " in planned.request["args"]["ruleset"]
    assert planned.mechanism.selection.spared


@pytest.mark.parametrize(
    ("kind", "params"), [("packet.drop", {"share": 0.1, "burst": 5}), ("packet.delay", {"delay": 10, "jitter": 5})]
)
def test_queue_with_random_draws_gets_the_seed_and_must_show_it(kind, params):
    planned, other = (
        plan(FaultSpec(kind=kind, target="host1:rxe0", for_s=1.0, params=params, seed=seed), SOFT, lab_kind="soft")
        for seed in (5, 6)
    )
    assert planned.request["args"]["queue"].endswith(f" seed {netem_seed(5)}")
    assert planned.mechanism.shows["queue_seed"] == netem_seed(5) != other.mechanism.shows["queue_seed"]
    assert str(planned.mechanism.selection) == "drawn by netem with seed 5"


@pytest.mark.parametrize(
    ("kind", "params"),
    [("packet.drop", {"every": 10}), ("packet.drop", {"share": 1}), ("packet.delay", {"delay": 10}), ("link.down", {})],
)
def test_fault_without_random_draws_has_no_seed(kind, params):
    planned = soft(kind, "host1:rxe0", **params)
    assert planned.mechanism.selection is None
    assert "seed" not in json.dumps(dict(planned.request))


def test_seed_of_the_experiment_reaches_the_rule(tmp_path):
    """Nothing used to read the seed of a fault in `plan.json`, so two runs with one seed dropped different packets."""
    from faultbed.harness.run.prepare import resolve
    from faultbed.testbed import shipped
    from faultbed.testbed.inventory import lab_inventory

    path = tmp_path / "x.toml"
    path.write_text(EXPERIMENT)
    experiment, lab = experiment_file.load(path), lab_inventory.load(shipped.inventories() / "soft.yml")
    rules = {}
    for seed in (1, 1, 2):
        planned = plan_experiment(experiment, seed=seed, inventory_digest="", version="")
        (fault,) = resolve._planned(experiment, planned, lab)
        assert fault.mechanism.selection.seed == planned.faults[0].seed
        rules.setdefault(seed, set()).add(fault.request["args"]["ruleset"])
    assert [len(each) for each in rules.values()] == [1, 1]
    assert rules[1] != rules[2]


def test_plan_steps_abbreviate_the_list_of_positions():
    """A list of a thousand positions would hide the command. The request still has the whole rule."""
    planned = soft("packet.drop", "host1:rxe0", share=0.1)
    (step,) = planned.mechanism.steps
    assert re.search(r"numgen inc mod 10240 \{ (\d+, ){8}\.\.\. \}", step.do)


EXPERIMENT = """
name = "seeds"

[workload]
collective = "all-reduce"
size = "128KiB"
duration = "8s"

[[faults]]
kind = "packet.drop"
target = "host2:rxe0"
at = "2s"
for = "2s"
set = { share = 0.02 }
"""
FIRST_DRAWN = (20, 30, 53, 71, 74, 108)
FIRST_NETEM_SEED = 7963446980203944156
