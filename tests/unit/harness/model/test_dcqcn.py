"""DCQCN and PFC at one bottleneck, with short simulations; `python -m bench model` has the published cases."""

import math
from dataclasses import replace

import pytest

from faultbed.harness.model.dcqcn import Settings, fixed_point_bytes, simulate
from faultbed.testbed.errors import UsageError

TWO = Settings(flows=2)


@pytest.fixture(scope="module")
def outcomes():
    settings = [
        TWO,
        replace(TWO, flows=8),
        replace(TWO, flows=8, xoff_bytes=50e3, xon_bytes=30e3, kmin_bytes=300e3, kmax_bytes=400e3),
    ]
    return simulate(settings, duration_s=0.02, slot_s=2e-6)


def test_simulate_flows_share_the_whole_bottleneck(outcomes):
    for outcome in outcomes:
        assert outcome.utilisation == pytest.approx(1, abs=0.02)
        assert outcome.least_share <= 1 <= outcome.most_share * 1.02
        assert outcome.jain > 0.9


def test_simulate_more_flows_stand_in_a_longer_queue(outcomes):
    assert outcomes[1].queue_mean_bytes > 2 * outcomes[0].queue_mean_bytes


def test_simulate_without_pfc_nothing_pauses(outcomes):
    assert (outcomes[0].paused, outcomes[0].pauses_per_s, outcomes[0].victim_share) == (0, 0, 1)


def test_simulate_marks_above_the_pause_leave_all_to_pfc_and_block_the_victim(outcomes):
    """Eight senders at line rate and no mark before the pause: the port stands still for 7/8 of the time."""
    paused = outcomes[2]
    assert paused.paused == pytest.approx(7 / 8, abs=0.03)
    assert paused.victim_share == pytest.approx(1 / 8, abs=0.03)
    assert paused.pauses_per_s > 100


def test_simulate_setting_alone_or_in_a_batch_behaves_alike(outcomes):
    (alone,) = simulate([TWO], duration_s=0.02, slot_s=2e-6)
    assert alone.queue_mean_bytes == pytest.approx(outcomes[0].queue_mean_bytes, rel=0.35)


def test_simulate_is_the_same_for_the_same_seed():
    first, second = (simulate([TWO], duration_s=0.002, seed=3) for _ in range(2))
    assert first == second


def test_fixed_point_of_the_paper_grows_with_the_flows():
    """Solved from the fluid model's equations for 40 Gb/s: 20, 42 and 94 kB for 2, 4 and 8 flows."""
    queues = [fixed_point_bytes(Settings(flows=flows)) for flows in (2, 4, 8)]
    assert queues == pytest.approx([20.15e3, 41.81e3, 93.77e3], rel=1e-3)
    assert fixed_point_bytes(Settings(flows=64)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flows": 0}, "flows must be above 0"),
        ({"gbps": math.nan}, "gbps must be above 0"),
        ({"pmax": math.inf}, "pmax must be above 0"),
        ({"flows": 5000}, "at most 1024"),
        ({"kmin_bytes": 300e3}, "must be below kmax"),
        ({"pmax": 1.5}, "at most 1"),
        ({"xoff_bytes": 10e3, "xon_bytes": 20e3}, "must not be above xoff"),
    ],
)
def test_simulate_impossible_settings_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        simulate([replace(TWO, **change)], duration_s=0.001)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.nan, 1e9])
def test_simulate_impossible_duration_is_refused(duration_s):
    with pytest.raises(UsageError, match="slots"):
        simulate([TWO], duration_s=duration_s)
