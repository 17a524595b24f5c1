"""The fullest link under te and e-ecmp as uplinks fail: from how many failures on a hash is better."""

import pytest
from click.testing import CliRunner

from faultbed.harness.cli.main import cli
from faultbed.harness.model.failure_prediction import FailurePrediction, better_from, predict_failures
from faultbed.harness.model.routing_prediction import ALL_RANKS, job_traffic
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.routing.schemes import Routing
from faultbed.testbed.shipped import inventory_named
from faultbed.traffic.workloads.job import JobPhase

SCHEMES = {"te": Routing(), "e-ecmp": Routing()}


@pytest.fixture(scope="module")
def topology():
    return lab_inventory.load(inventory_named("soft-3rack")).topology


def predicted(topology, ranks, *, most, qps_per_peer=1, schemes=SCHEMES):
    phase = JobPhase(along=ALL_RANKS, collective="all-to-all", size_bytes=1 << 20, algorithm="full-mesh")
    traffic = job_traffic([phase], rnics=len(ranks), lab_kind="soft", qps_per_peer=qps_per_peer)
    return predict_failures(topology, ranks, traffic, schemes, most=most, draws=20)


def test_placed_keys_are_even_on_a_healthy_fabric_and_one_queue_pair_each_is_not(topology):
    (healthy,) = predicted(topology, [f"host{number}:rxe0" for number in range(1, 7)], most=1)[:1]
    assert healthy.failed == 0
    assert healthy.orders == 20
    assert healthy.fullest["te"] == pytest.approx(1.0)
    assert healthy.fullest["e-ecmp"] > 1.1


def test_hash_of_many_queue_pairs_beats_whole_keys_that_cannot_be_even(topology):
    """One key cannot use both uplinks of its rack, and 64 queue pairs can."""
    (healthy,) = predicted(topology, ["host1:rxe0", "host3:rxe0"], most=1, qps_per_peer=64)[:1]
    assert healthy.fullest["te"] == pytest.approx(2.0)
    assert healthy.fullest["e-ecmp"] < 1.25
    assert better_from([healthy], "e-ecmp", "te") == 0


def test_failures_that_leave_a_flow_no_path_are_not_counted(topology):
    predictions = predicted(topology, [f"host{number}:rxe0" for number in range(1, 7)], most=6)
    counts = [one.orders for one in predictions]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 20
    assert len(predictions) < 7, "with all six uplinks failed no rack reaches another one"


def test_job_inside_one_rack_is_refused(topology):
    with pytest.raises(UsageError, match="stay inside racks"):
        predicted(topology, ["host1:rxe0", "host2:rxe0"], most=1)


@pytest.mark.parametrize(
    ("te", "hashed", "first"),
    [
        ([1.0, 1.0, 1.0], [1.3, 1.2, 1.1], None),
        ([1.0, 2.0, 2.0], [1.3, 1.2, 1.1], 1),
        ([2.0, 1.0, 2.0], [1.3, 1.2, 1.1], 2),
        ([1.0, 1.2], [1.3, 1.2], None),
    ],
)
def test_better_from_needs_every_later_number_of_failures(te, hashed, first):
    rows = [
        FailurePrediction(failed=count, orders=1, fullest={"te": a, "e-ecmp": b})
        for count, (a, b) in enumerate(zip(te, hashed, strict=True))
    ]
    assert better_from(rows, "e-ecmp", "te") == first


def test_predict_failures_command_says_from_how_many_failures_e_ecmp_is_better():
    words = ["--lab", "soft-3rack", "routing", "predict", "--scheme", "te", "--scheme", "e-ecmp", "--draws", "5"]
    answer = CliRunner().invoke(cli, [*words, "--failures", "2", "--qps-per-peer", "16"], standalone_mode=False)
    assert answer.exception is None, answer.exception
    assert "e-ecmp is better than te " in answer.output
    both = CliRunner().invoke(cli, [*words, "--failures", "2", "--failed", "rtsw1:ctsw1"], standalone_mode=False)
    assert "give one of the two" in str(both.exception)
