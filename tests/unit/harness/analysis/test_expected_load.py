"""Expected bytes of links, from schedule, placement and paths: compared with numbers worked out by hand."""

from __future__ import annotations

import msgspec
import pytest
from finished_run import finished
from synthetic_run import changed, synthetic_run

from faultbed.harness.analysis.links.expected_load import expected_loads, with_expected, worst_difference
from faultbed.harness.analysis.links.link_load import link_loads
from faultbed.harness.analysis.observe import observe
from faultbed.harness.analysis.timeline import finished_iterations
from faultbed.harness.report import run_page as report

BACK = {"host2": ("host3", "rtsw2", "ctsw2", "rtsw1", "host2"), "host4": ("host1", "rtsw1", "ctsw1", "rtsw2", "host4")}


def ring(**changes):
    """A ring all-reduce of 1 MiB over four hosts in two racks, whose ACKs came back over another spine."""
    run = synthetic_run()
    connections = tuple(
        msgspec.structs.replace(
            connection, ack_path=BACK.get(connection.src.partition(":")[0], tuple(reversed(connection.path)))
        )
        for connection in run.workload.connections
    )
    return changed(run, **({"connections": connections, "qp_errors": 0, "rebuilds": 0} | changes))


def by_hand(run):
    """Each host sends six messages of 256 KiB per operation to the next one: 64 packets each, and one ACK."""
    operations = finished_iterations(run.workload.series)
    data, ack = 6 * (262144 + 64 * 58 + 20), 6 * 62
    return {
        ("rtsw1", "ctsw1"): operations * (data + ack),
        ("ctsw1", "rtsw2"): operations * (data + ack),
        ("rtsw2", "ctsw2"): operations * (data + ack),
        ("ctsw2", "rtsw1"): operations * (data + ack),
    }


def measured(run, sizes):
    """The run, with so many bytes sent by each switch to another one."""
    before, after = {}, {}
    for (src, dst), size in sizes.items():
        before.setdefault(src, {})[f"{dst}.tx_bytes"] = 7
        after.setdefault(src, {})[f"{dst}.tx_bytes"] = 7 + round(size)
    return changed(run, counters_before=before, counters_after=after)


def test_expected_bytes_per_direction_follow_from_schedule_and_paths():
    run = ring()
    result = expected_loads(run)
    assert result.why == ""
    assert result.bytes_by_direction == pytest.approx(by_hand(run))


@pytest.mark.parametrize(("spread", "writes"), [("split", 6), ("round-robin", 3)])
def test_expected_bytes_of_several_queue_pairs_follow_from_the_path_of_each(spread, writes):
    """Four queue pairs share each message, and one of host2's takes another spine than the rest."""
    run = ring()
    workload = dict(run.workload.planned) | {"qps_per_peer": 4, "spread": spread}
    other = {"host2:rxe0": ("host2", "rtsw1", "ctsw2", "rtsw2", "host3")}
    connections = tuple(
        msgspec.structs.replace(
            connection, path=other.get(connection.src, connection.path) if number == 3 else connection.path
        )
        for connection in run.workload.connections
        for number in range(4)
    )
    result = expected_loads(ring(workload=workload, connections=connections))
    operations = finished_iterations(run.workload.series)
    quarter, ack = operations * (6 * (65536 + 16 * 58) + writes * 20), operations * writes * 62
    assert result.bytes_by_direction["rtsw1", "ctsw2"] == pytest.approx(quarter)
    assert result.bytes_by_direction["rtsw1", "ctsw1"] == pytest.approx(3 * quarter + 4 * ack)
    assert "some of the 4 queue pairs" in expected_loads(ring(workload=workload)).why


def test_expected_bytes_of_an_rnic_sum_over_its_ranks():
    """With two ranks per RNIC, the ring passes every RNIC twice, and each message has an eighth of the data."""
    run = ring()
    ranks = tuple(
        msgspec.structs.replace(rank, rank=rank.rank + 4 * turn) for turn in (0, 1) for rank in run.workload.ranks
    )
    connections = tuple(connection for connection in run.workload.connections for _ in (0, 1))
    result = expected_loads(
        ring(workload=dict(run.workload.planned) | {"ranks_per_rnic": 2}, ranks=ranks, connections=connections)
    )
    operations = finished_iterations(run.workload.series)
    data, ack = 2 * 14 * (131072 + 32 * 58 + 20), 2 * 14 * 62
    assert result.bytes_by_direction["rtsw1", "ctsw1"] == pytest.approx(operations * (data + ack))


def test_link_bytes_error_is_the_share_that_was_not_expected():
    run = measured(ring(), by_hand(ring()))
    assert observe(run).metrics["link_bytes.error"].value == pytest.approx(0, abs=1e-6)
    more = by_hand(ring()) | {("rtsw1", "ctsw2"): 0.25 * by_hand(ring())["rtsw1", "ctsw1"]}
    observation = observe(measured(ring(), more)).metrics["link_bytes.error"]
    assert observation.value == pytest.approx(0.25, rel=1e-4)
    assert "rtsw1 to ctsw2" in observation.detail


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rebuilds": 1}, "queue pairs failed or were rebuilt"),
        ({"workload": {"flow": "write"}}, "only a collective's bytes"),
        ({"series": ()}, "no operation was finished"),
        ({"connections": ()}, "queue pairs from host1:rxe0 to host2:rxe0 is unknown"),
    ],
)
def test_expected_loads_that_cannot_be_computed_have_a_reason(changes, why):
    run = measured(ring(**changes), by_hand(ring()))
    assert why in expected_loads(run).why
    observation = observe(run).metrics["link_bytes.error"]
    assert observation.value is None
    assert why in observation.detail
    assert worst_difference(expected_loads(run), {("rtsw1", "ctsw1"): 5}) is None


def test_report_shows_expected_beside_measured_loads(tmp_path):
    run = measured(ring(), by_hand(ring()))
    (one, *_) = with_expected(link_loads(run), expected_loads(run))
    assert one.up.expected_bytes == pytest.approx(one.up.size_bytes, rel=1e-6)
    text = " ".join(report.render(finished(tmp_path, run).path).read_text(encoding="utf-8").split())
    assert "Expected: bytes computed from the collective's schedule" in text
