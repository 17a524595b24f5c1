"""The time of an iteration: equal to the alpha-beta model without shared links, and longer where links are shared."""

import numpy as np
import pytest

from faultbed.harness.model.step_times import Features, StepParameters, iteration_cost
from faultbed.testbed.errors import UsageError
from faultbed.traffic import schedules
from faultbed.traffic.schedules import cost
from faultbed.traffic.schedules.program import Layout

ALPHA, OVERHEAD, NS_PER_BYTE = 13e6, 6e6, 130.0
PARAMETERS = StepParameters(alpha_ns=ALPHA, overhead_ns=OVERHEAD)
SIZE = 1 << 20


def programs_of(collective, algorithm, ranks, elements=SIZE // 4):
    schedule = schedules.build(collective, algorithm, cost.shape_for(ranks, SIZE))
    return schedule, schedules.programs(schedule, Layout(elements=elements))


def own_links(pairs, ranks, qps=1):
    """Each rank has a link up (its number) and a link down (its number + ranks); nothing else is shared."""
    return {(src, dst): (((src, 1.0), (ranks + dst, 1.0)),) * qps for src, dst in pairs}


@pytest.mark.parametrize(
    ("collective", "algorithm", "overhead_ns"),
    [
        ("all-reduce", "ring", OVERHEAD),
        ("all-to-all", "full-mesh", OVERHEAD),
        # Blocks that wrap at the end of the buffer are two messages, which the alpha-beta model counts as one.
        ("all-reduce", "recursive-halving", 0.0),
        ("all-gather", "recursive-doubling", 0.0),
    ],
)
def test_iteration_with_links_only_at_ranks_equals_alpha_beta(collective, algorithm, overhead_ns):
    ranks = 8
    schedule, programs = programs_of(collective, algorithm, ranks)
    paths = own_links(schedules.peers_of(programs), ranks)
    link = cost.Link(alpha_ns=ALPHA, overhead_ns=overhead_ns, ns_per_byte=NS_PER_BYTE)
    parameters = StepParameters(alpha_ns=ALPHA, overhead_ns=overhead_ns)
    modelled = iteration_cost(programs, paths, np.full(2 * ranks, 1e9 / NS_PER_BYTE), parameters, item_bytes=4)
    expected = cost.predict_ns(schedule, SIZE, cost.Network(near=link, far=link)) / 1e9
    assert modelled.features.seconds(parameters) == pytest.approx(expected, rel=1e-3)


def test_iteration_ring_on_one_shared_link_takes_as_long_as_all_its_bytes():
    _, programs = programs_of("all-reduce", "ring", 4)
    paths = dict.fromkeys(schedules.peers_of(programs), (((0, 1.0),),))
    modelled = iteration_cost(programs, paths, np.array([1e6]), PARAMETERS, item_bytes=4)
    assert modelled.features.transfer_s == pytest.approx(2 * 3 * SIZE / 1e6)
    assert modelled.link_bytes.tolist() == [2 * 3 * SIZE]


def test_iteration_odd_and_even_targets_on_one_uplink_take_twice_as_long():
    """Four servers in two racks with two uplinks each: by parity, two targets share an uplink after a replacement."""
    times = []
    for job in ((1, 2, 3, 4), (1, 2, 3, 5)):
        rack, paths = [(server - 1) // 2 for server in job], {}
        _, programs = programs_of("all-to-all", "full-mesh", 4)
        for src, dst in schedules.peers_of(programs):
            up = job[dst] % 2
            links = () if rack[src] == rack[dst] else ((2 * rack[src] + up, 1.0), (6 + 2 * rack[dst] + up, 1.0))
            paths[src, dst] = (links,)
        times.append(iteration_cost(programs, paths, np.ones(12), PARAMETERS, item_bytes=4).features.transfer_s)
    assert times[1] == pytest.approx(2 * times[0])


def test_iteration_queue_pairs_of_a_lane_wait_for_the_slow_one_unless_they_balance():
    programs = [{"rank": 0, "sends": [(0, 1, 0, 1000)]}, {"rank": 1, "sends": []}]
    paths = {(0, 1): (((0, 1.0),), ((1, 1.0),))}
    capacity = np.array([3e3, 1e3])
    split, balanced = (
        iteration_cost(programs, paths, capacity, PARAMETERS, item_bytes=4, balances=balances).features.transfer_s
        for balances in (False, True)
    )
    assert (split, balanced) == (2.0, 1.0)


def test_iteration_counts_each_write_of_a_rank_as_a_message():
    programs = [{"rank": 0, "sends": [(0, 1, 0, 10)]}, {"rank": 1, "sends": []}]
    paths = {(0, 1): (((0, 1.0),),) * 4}
    features = iteration_cost(programs, paths, np.ones(1), PARAMETERS, item_bytes=4, compute_units=8).features
    assert (features.steps, features.messages, features.compute_units) == (1, 3, 8)


def test_iteration_on_a_link_without_capacity_is_refused():
    programs = [{"rank": 0, "sends": [(0, 1, 0, 10)]}, {"rank": 1, "sends": []}]
    with pytest.raises(UsageError, match="without capacity"):
        iteration_cost(programs, {(0, 1): (((0, 1.0),),)}, np.zeros(1), PARAMETERS, item_bytes=4)


def test_features_time_is_linear_and_unknown_compute_takes_none():
    features = Features(steps=2, messages=3, transfer_s=4.0, compute_units=5)
    assert features.seconds(StepParameters(alpha_ns=1e9, overhead_ns=1e9, rate=0.5)) == 13.0
    assert features.seconds(StepParameters(alpha_ns=0, overhead_ns=0, compute_ns=1e9)) == 9.0
