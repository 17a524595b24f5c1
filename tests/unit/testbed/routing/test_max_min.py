"""Max-min fair rates: hand solutions, and scalar progressive filling on random graphs."""

import numpy as np
import pytest

from faultbed.testbed.routing.max_min import completion_times, link_rates, loads_of_paths, max_min_rates, merged

NONE = -1


def rates(paths, capacity):
    return max_min_rates(loads_of_paths(np.array(paths, dtype=np.int32)), np.array(capacity, dtype=float))


def scalar_filling(paths, capacity):
    """Progressive filling, one saturated link at a time."""
    left, live = dict(enumerate(capacity)), set(range(len(paths)))
    links = [{link for link in path if link != NONE} for path in paths]
    rate = [0.0] * len(paths)
    while live:
        shares = {link: left[link] / count for link in left if (count := sum(link in links[f] for f in live))}
        tightest = min(shares, key=shares.__getitem__)
        for flow in [flow for flow in live if tightest in links[flow]]:
            rate[flow] = shares[tightest]
            live.discard(flow)
            for link in links[flow]:
                left[link] -= shares[tightest]
    return rate


def test_rates_parking_lot_long_flow_gets_the_smallest_share():
    assert rates([[0, 1, 2], [0, NONE, NONE], [1, NONE, NONE], [2, NONE, NONE]], [1, 2, 3]).tolist() == [
        0.5,
        0.5,
        1.5,
        2.5,
    ]


def test_rates_three_bottlenecks_match_the_hand_solution():
    paths = [[0, NONE], [0, 1], [0, 2], [1, NONE], [2, NONE], [2, NONE]]
    assert rates(paths, [10, 6, 4]) == pytest.approx([17 / 3, 3, 4 / 3, 3, 4 / 3, 4 / 3])


def test_rates_incast_eight_to_one_share_one_port():
    paths = [[sender, 10] for sender in range(8)] + [[8, 11]]
    assert rates(paths, [400.0] * 11 + [100.0]).tolist() == [50.0] * 8 + [100.0]


def test_rates_taper_of_seven_leaves_a_seventh():
    paths = [[sender, 14 + sender, 28] for sender in range(14)]
    assert rates(paths, [1.0] * 28 + [2.0]) == pytest.approx([1 / 7] * 14)


def test_completion_times_released_capacity_goes_to_the_others():
    loads = loads_of_paths(np.zeros((3, 1), dtype=np.int32))
    assert completion_times(loads, np.ones(1), [1, 2, 3], grid=0).tolist() == [3, 5, 6]


def test_completion_times_grid_stays_within_its_tolerance():
    rng = np.random.default_rng(5)
    paths = np.array([rng.choice(12, size=3, replace=False) for _ in range(200)], dtype=np.int32)
    loads, capacity, size = loads_of_paths(paths), rng.uniform(1, 4, 12), rng.uniform(1, 20, 200)
    exact, coarse = (completion_times(loads, capacity, size, grid=grid) for grid in (0.0, 0.02))
    assert np.abs(coarse / exact - 1).max() < 0.03
    assert coarse.max() == pytest.approx(exact.max(), rel=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_rates_random_graphs_equal_scalar_progressive_filling(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        links, flows, hops = int(rng.integers(2, 9)), int(rng.integers(1, 25)), int(rng.integers(1, 4))
        width = min(hops, links)
        paths = [[int(link) for link in rng.choice(links, size=width, replace=False)] for _ in range(flows)]
        capacity = rng.uniform(0.5, 5, links)
        assert rates(paths, capacity) == pytest.approx(scalar_filling(paths, capacity), rel=1e-9)


def test_rates_unit_with_weights_is_limited_by_its_heaviest_link():
    loads = merged([0, 0, 0, 1], [0, 1, 0, 0], [1.0, 1.0, 2.0, 1.0], units=2)
    assert loads.weight.tolist() == [3.0, 1.0, 1.0]
    assert max_min_rates(loads, np.array([4.0, 9.0])).tolist() == [1.0, 1.0]


def test_rates_every_unit_has_a_saturated_link_and_no_link_is_overloaded():
    rng = np.random.default_rng(9)
    unit, link = rng.integers(0, 40, 400), rng.integers(0, 25, 400)
    loads = merged(unit, link, rng.uniform(0.1, 3, 400), units=40)
    capacity = rng.uniform(1, 9, 25)
    fair = max_min_rates(loads, capacity)
    used = link_rates(loads, fair, 25)
    assert (used <= capacity * (1 + 1e-9)).all()
    saturated = used >= capacity * (1 - 1e-9)
    assert {int(number) for number in loads.unit[saturated[loads.link]]} == set(range(40))


def test_rates_without_a_limit_are_infinite():
    assert rates([[0], [1]], [np.inf, 2.0]).tolist() == [np.inf, 2.0]
    assert rates([[NONE]], [1.0]).tolist() == [np.inf]
    assert max_min_rates(merged([], [], [], units=2), np.ones(3)).tolist() == [np.inf] * 2


def test_rates_link_without_capacity_stops_only_its_own_flows():
    assert rates([[0], [1]], [0.0, 2.0]).tolist() == [0.0, 2.0]
    with pytest.raises(ValueError, match="never ends"):
        completion_times(loads_of_paths(np.zeros((1, 1), dtype=np.int32)), np.zeros(1), [1.0])


@pytest.mark.parametrize("wrong", [np.nan, -1.0])
def test_rates_invalid_capacity_weight_or_size_is_refused(wrong):
    loads = loads_of_paths(np.zeros((1, 1), dtype=np.int32))
    with pytest.raises(ValueError, match="capacity"):
        max_min_rates(loads, np.array([wrong]))
    with pytest.raises(ValueError, match="weight"):
        merged([0], [0], [wrong], units=1)
    with pytest.raises(ValueError, match="size"):
        completion_times(loads, np.ones(1), [wrong])


def test_merged_number_out_of_range_is_refused():
    with pytest.raises(ValueError, match="out of range"):
        merged([2], [0], [1.0], units=2)
