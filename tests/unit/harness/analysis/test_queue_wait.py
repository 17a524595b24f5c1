"""`longest_wait` warns of a queue at a slow link that takes longer than the ACK timeout of a flow."""

from __future__ import annotations

import pytest

from faultbed.harness.analysis.links.queue_wait import describe_wait, longest_wait
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventory_named
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows.flow_run import FlowSpec

ZONES, SOFT = (lab_inventory.load(inventory_named(name)) for name in ("soft-zones", "soft"))
RATE_BPS = 6_250_000
"""Rate of an RNIC in the preset soft-zones: 400 Gb/s divided by its scale of 64,000."""


def flow(src="host1:rxe0", dst="host3:rxe0", **change):
    return FlowSpec(**{"src": src, "dst": dst, "message_bytes": 65536, **change})


def test_longest_wait_of_one_flow_is_that_of_its_window_of_64_packets():
    """262,144 bytes take 336 ms at 6.25 Mb/s. The default ACK timeout is 67 ms; exponent 17 means 537 ms."""
    wait = longest_wait(ZONES, [flow()])
    assert (wait.rnic, wait.rate_bps, wait.queued_bytes) == ("host3:rxe0", RATE_BPS, 64 * 4096)
    assert wait.wait_ns == pytest.approx(64 * 4096 * 8e9 / RATE_BPS)
    assert (wait.timeout, wait.sufficient_timeout) == (14, 17)
    text = describe_wait(wait)
    assert "256 KiB wait for the 6.25 Mb/s of host3:rxe0" in text
    assert "--qp timeout=17 or a smaller --depth" in text


def test_longest_wait_adds_up_all_flows_to_an_rnic():
    specs = [flow(src, qps=2, depth=1) for src in ("host1:rxe0", "host2:rxe0")]
    assert longest_wait(ZONES, specs).queued_bytes == 4 * 65536


@pytest.mark.parametrize(
    ("inventory", "change"),
    [
        (SOFT, {"qps": 16}),
        (ZONES, {"qp": QpParams(timeout=17)}),
        (ZONES, {"depth": 1, "message_bytes": 32768}),
        (ZONES, {"transport": "uc"}),
    ],
    ids=["lab without rates", "longer timeout", "small window", "no ACKs"],
)
def test_longest_wait_is_none_if_no_flow_can_time_out(inventory, change):
    assert longest_wait(inventory, [flow(**change)]) is None


def test_longest_wait_of_a_read_is_at_the_reader():
    assert longest_wait(ZONES, [flow(verb="read")]).rnic == "host1:rxe0"
