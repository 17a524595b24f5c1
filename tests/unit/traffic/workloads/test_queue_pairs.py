"""Several queue pairs per peer, with real engines on this machine and in the plan of a run."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from local_traffic import LocalLab
from memory_fabric import modules

from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventories
from faultbed.traffic import schedules
from faultbed.traffic.workloads import collective, ranks
from faultbed.traffic.workloads.collective import CollectiveSpec
from faultbed.traffic.workloads.ranks import writes_of

HOSTS = ("host1", "host2", "host3", "host5")
SPEC = CollectiveSpec(
    collective="all-to-all", algorithm="full-mesh", size_bytes=1 << 18, ranks=HOSTS, iterations=3, qps_per_peer=4
)


@pytest.fixture
def lab(tmp_path):
    made = LocalLab(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("spread", schedules.SPREADS)
def test_engines_run_a_collective_over_four_queue_pairs_per_peer_with_correct_results(lab, spread):
    spec = CollectiveSpec(**{name: getattr(SPEC, name) for name in SPEC.__dataclass_fields__} | {"spread": spread})
    with collective.start(lab, spec) as running:
        result = running.wait(60)
    assert (result.outcome, result.where, result.wrong_elements) == ("completed", None, 0)
    assert result.checked_elements == 4 * 3 * (1 << 16)
    pairs = Counter((connection.src, connection.dst) for connection in result.connections)
    assert len(pairs) == 12
    assert set(pairs.values()) == {4}
    assert len({(connection.src, connection.lqpn) for connection in result.connections}) == 48


def test_queue_pairs_with_entropy_share_flow_labels_in_turn(lab):
    spec = CollectiveSpec(**{name: getattr(SPEC, name) for name in SPEC.__dataclass_fields__} | {"entropy": 1})
    with collective.start(lab, spec) as running:
        assert {connection.flow_label for connection in running.connections} == {1}
        running.wait(60)


@pytest.mark.parametrize(
    ("collective_name", "size_bytes", "spread", "sizes"),
    [
        ("all-to-all", 1 << 18, "split", [[16384]] * 4),
        ("all-to-all", 1 << 18, "round-robin", [[16384]] * 4),
        ("all-to-all", 1 << 18, "dqplb", [[4096] * 4] * 4),
        ("all-to-all", 32, "split", [[4], [4]]),
        ("all-reduce", 4 * 1_000, "split", [[248] * 6, [252] * 6, [248] * 6, [252] * 6]),
        ("all-reduce", 1 << 20, "round-robin", [[131072] * 3] * 4),
    ],
)
def test_writes_of_each_queue_pair_are_planned_by_its_spread(lab, collective_name, size_bytes, spread, sizes):
    """If a message has fewer elements than queue pairs, unused queue pairs are not created."""
    algorithm = "ring" if collective_name == "all-reduce" else "full-mesh"
    spec = CollectiveSpec(
        collective=collective_name, algorithm=algorithm, size_bytes=size_bytes, ranks=HOSTS, iterations=1,
        qps_per_peer=4, spread=spread,
    )  # fmt: skip
    _, _, programs = collective.fit(lab, spec)
    writes = writes_of(spec, programs)
    assert [list(each) for each in next(iter(writes.values()))] == sizes
    assert all(len(each) == len(sizes) for each in writes.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qps_per_peer": 0}, "qps_per_peer must be 1 to 128, got 0"),
        ({"qps_per_peer": 129}, "qps_per_peer must be 1 to 128, got 129"),
        (
            {"spread": "each"},
            'no spread "each" of messages over queue pairs; choose one of split, round-robin, spray, dqplb',
        ),
        ({"entropy": 4097}, "QPs can share 1 to 4096 source ports"),
    ],
)
def test_queue_pairs_out_of_range_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        collective.check(CollectiveSpec(iterations=1, **change))


def test_queue_pairs_that_overrun_a_completion_queue_are_refused_before_the_run():
    inventory = load(inventories() / "soft.yml")
    spec = {"collective": "all-reduce", "algorithm": "ring", "size_bytes": 64 << 20, "iterations": 3, "spread": "dqplb"}
    collective.fit(inventory, CollectiveSpec(**spec, qps_per_peer=16))
    with pytest.raises(UsageError, match=r"host1:rxe0 would have 64 queue pairs .* holds 32767; use fewer queue pairs"):
        collective.fit(inventory, CollectiveSpec(**spec, qps_per_peer=32))


def test_work_requests_of_the_plan_match_the_engine(monkeypatch):
    node = modules(monkeypatch)
    assert ranks.CREDITS == node.rank.CREDITS_IN_FLIGHT
    for window, slots in ((2, 2), (4, 16), (64, 64)):
        sends, receives = node.rank.RankTask.capacity(SimpleNamespace(window=window, slots=slots), None)
        assert sends + receives == ranks.work_requests(window, slots)
