"""Bytes of each link, each way; MMR and Jain's index, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from finished_run import finished
from synthetic_run import changed, soft_topology, synthetic_run

from faultbed.harness.analysis.links.link_load import Fan, Layer, fans, jain, layers, link_loads
from faultbed.harness.report import run_page as report
from faultbed.testbed.routing.offered_load import max_over_mean


def counted(sizes, *, before=1000):
    """Return a run whose port counters grew by these values, by (node, `netdev.tx_bytes`)."""
    start, end = {}, {}
    for (node, name), size in sizes.items():
        start.setdefault(node, {})[name] = before
        end.setdefault(node, {})[name] = before + size
    return changed(synthetic_run(), counters_before=start, counters_after=end)


UPLINKS = {
    ("rtsw1", "ctsw1.tx_bytes"): 3000,
    ("rtsw1", "ctsw2.tx_bytes"): 1000,
    ("rtsw2", "ctsw1.tx_bytes"): 2000,
    ("rtsw2", "ctsw2.tx_bytes"): 2000,
    ("ctsw1", "rtsw1.tx_bytes"): 500,
    ("ctsw2", "rtsw1.tx_bytes"): 0,
    ("ctsw1", "rtsw2.tx_bytes"): 500,
    ("ctsw2", "rtsw2.tx_bytes"): 500,
}


@pytest.mark.parametrize(
    ("sizes", "mmr", "jfi"),
    [
        ([5, 5, 5, 5], 1, 1),
        ([8, 0, 0, 0], 4, 0.25),
        # mean 2: 3 / 2; sum 4 squared is 16, 2 * (9 + 1) is 20.
        ([3, 1], 1.5, 0.8),
        # mean 2; 36 / (3 * 14).
        ([1, 2, 3], 1.5, 6 / 7),
        ([7], None, None),
        ([0, 0], None, None),
        ([], None, None),
    ],
)
def test_link_load_mmr_and_jain_of_known_loads(sizes, mmr, jfi):
    assert max_over_mean(sizes) == (mmr if mmr is None else pytest.approx(mmr))
    assert jain(sizes) == (jfi if jfi is None else pytest.approx(jfi))


def test_link_load_direction_is_what_its_sender_sent():
    loads = {load.name: load for load in link_loads(counted(UPLINKS))}

    one = loads["rtsw1:ctsw1"]
    assert (one.up.src, one.up.dst, one.up.size_bytes, one.up.share) == ("rtsw1", "ctsw1", 3000, 0.75)
    assert (one.down.src, one.down.dst, one.down.size_bytes, one.down.share) == ("ctsw1", "rtsw1", 500, 1.0)
    assert loads["rtsw2:ctsw1"].down.share == 0.5


def test_link_load_layers_and_fans():
    """The mean load is 2 thousand bytes up and 375 down; rtsw1 is uneven, rtsw2 is even.

    Up: 3, 1, 2, 2 thousand. Down: 500, 0, 500, 500. The JFI of rtsw1 is 16 / (2 * 10).
    """
    run = counted(UPLINKS)
    loads = link_loads(run)

    assert layers(loads, run.lab.topology) == (
        Layer(src="rtsw", dst="ctsw", count=4, mmr=1.5),
        Layer(src="ctsw", dst="rtsw", count=4, mmr=500 / 375),
    )
    assert fans(loads, run.lab.topology) == (
        Fan(switch="rtsw1", count=2, mmr=1.5, jfi=0.8),
        Fan(switch="rtsw2", count=2, mmr=1.0, jfi=1.0),
    )


def test_link_load_host_link_up_is_from_the_host():
    loads = {
        load.name: load
        for load in link_loads(counted({("host1", "be0.tx_bytes"): 70, ("rtsw1", "host1-rxe0.tx_bytes"): 90}))
    }

    one = loads["rtsw1:host1:rxe0"]
    assert (one.up.src, one.up.size_bytes, one.up.share) == ("host1", 70, None)
    assert (one.down.src, one.down.size_bytes) == ("rtsw1", 90)
    assert list(loads).index("rtsw2:ctsw2") < list(loads).index("rtsw1:host1:rxe0")


def test_link_load_far_end_counts_if_it_has_more():
    """A hardware RNIC's netdev does not see RDMA; the switch port that receives it does."""
    loads = {
        load.name: load
        for load in link_loads(counted({("host1", "be0.tx_bytes"): 7, ("rtsw1", "host1-rxe0.rx_bytes"): 900}))
    }

    assert loads["rtsw1:host1:rxe0"].up.size_bytes == 900


def test_link_load_of_an_unread_port_is_none():
    run = counted({})
    loads = link_loads(run)

    assert all(way.size_bytes is None and way.share is None for load in loads for way in (load.up, load.down))
    assert layers(loads, run.lab.topology) == () == fans(loads, run.lab.topology)


def test_link_load_after_a_counter_reset_is_a_lower_bound():
    run = counted(UPLINKS)
    after = {**run.telemetry.counters_after, "rtsw1": {**run.telemetry.counters_after["rtsw1"], "ctsw1.tx_bytes": 40}}
    loads = {load.name: load for load in link_loads(changed(run, counters_after=after))}

    assert loads["rtsw1:ctsw1"].up.size_bytes == 40
    assert loads["rtsw1:ctsw1"].up.at_least
    assert not loads["rtsw1:ctsw2"].up.at_least


@pytest.mark.parametrize("now", [None, 40], ids=["unread", "reset"])
def test_link_shares_and_evenness_need_all_links(now):
    """If one uplink is unread, the other one would look like all that rtsw1 sent, and the fabric like an even one."""
    run = counted(UPLINKS)
    port = {} if now is None else {"ctsw1.tx_bytes": now}
    left = {name: value for name, value in run.telemetry.counters_after["rtsw1"].items() if name != "ctsw1.tx_bytes"}
    run = changed(run, counters_after={**run.telemetry.counters_after, "rtsw1": left | port})
    loads = {one.name: one for one in link_loads(run)}
    assert loads["rtsw1:ctsw2"].up.share is None
    assert loads["rtsw2:ctsw1"].up.share == 0.5
    assert [(one.src, one.dst) for one in layers(loads.values(), run.lab.topology)] == [("ctsw", "rtsw")]
    assert [one.switch for one in fans(loads.values(), run.lab.topology)] == ["rtsw2"]


def test_link_load_of_a_switch_that_booted_is_a_lower_bound():
    """The ports count more than before by now, so only counters that nothing but a boot resets reveal the boot."""
    run = counted(UPLINKS)
    start = {
        **run.telemetry.counters_before,
        "rtsw1": run.telemetry.counters_before["rtsw1"] | {"ip.InReceives": 9, "tcp.InSegs": 9},
    }
    end = {
        **run.telemetry.counters_after,
        "rtsw1": run.telemetry.counters_after["rtsw1"] | {"ip.InReceives": 1, "tcp.InSegs": 1},
    }
    run = changed(run, counters_before=start, counters_after=end)
    loads = {load.name: load for load in link_loads(run)}
    assert loads["rtsw1:ctsw1"].up.at_least
    assert not loads["rtsw2:ctsw1"].up.at_least


def test_report_lists_each_link_with_its_load(tmp_path):
    page = report.render(finished(tmp_path, counted(UPLINKS)).path).read_text(encoding="utf-8")
    text = " ".join(page.split())

    for link in soft_topology().uplinks:
        assert f"<code>{link.name}</code>" in page
    assert "rtsw → ctsw: MMR 1.50 over 4 links" in text
    assert "rtsw1: JFI 0.80, MMR 1.50 over 2 uplinks" in text


def test_report_without_link_counters_reports_their_absence(tmp_path):
    page = report.render(finished(tmp_path, synthetic_run()).path).read_text(encoding="utf-8")

    assert "No byte counter of a port was read" in page
