"""Metrics of links: MMR of tiers and switches, Jain's index, use of links and of the bisection, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from experiment_text import COLLECTIVE, read
from synthetic_run import changed, synthetic_run

from faultbed.harness.analysis.links.link_metrics import capacity_bytes, link_metrics, names
from faultbed.harness.analysis.observe import observe
from faultbed.harness.experiment.metrics import lookup
from faultbed.harness.run.bisection_run import uplink_utilisation
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.testbed.errors import ConfigError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventories

ZONES = load(inventories() / "soft-zones.yml")
SECONDS = 8


def counted(sizes, *, scale=ZONES.rate_scale, before=1000):
    """Return a run of 8 s on soft-zones whose ports sent these bytes, by (switch, peer)."""
    start, end = {}, {}
    for (node, peer), size in sizes.items():
        start.setdefault(node, {})[f"{peer}.tx_bytes"] = before
        end.setdefault(node, {})[f"{peer}.tx_bytes"] = before + size
    run = synthetic_run()
    return changed(
        run,
        topology=ZONES.topology,
        rate_scale=scale,
        end_ns=run.workload.t0_ns + SECONDS * 10**9,
        counters_before=start,
        counters_after=end,
    )


def every_uplink(size=0, **sizes):
    """Bytes of all uplinks, each way; `rtsw1_ctsw1=5` is what rtsw1 sent to ctsw1."""
    actual = {}
    for link in ZONES.topology.uplinks:
        actual |= {(link.a.node, link.b.node): size, (link.b.node, link.a.node): size}
    return actual | {tuple(name.split("_")): size for name, size in sizes.items()}


def test_link_metrics_mmr_and_jfi_of_tiers_and_switches():
    metrics = link_metrics(counted(every_uplink(100, rtsw1_ctsw1=300, ctsw1_atsw1=0, ctsw1_atsw2=0)))
    # Of rack switches 7 x 100 and 300: mean 125. rtsw1: 300 / 200.
    assert metrics["mmr.rtsw"].value == pytest.approx(300 / 125)
    assert metrics["mmr.rtsw1"].value == pytest.approx(1.5)
    assert metrics["mmr.rtsw2"].value == pytest.approx(1)
    # Of spines 6 x 100 and 2 x 0: mean 75. ctsw1 sent nothing.
    assert metrics["mmr.ctsw"].value == pytest.approx(100 / 75)
    assert metrics["mmr.ctsw1"].value is None
    assert metrics["jfi"].value == pytest.approx(1000**2 / (8 * (7 * 100**2 + 300**2)))
    assert "rtsw1:ctsw1" in metrics["mmr.rtsw"].detail


def test_link_utilisation_is_relative_to_the_shaped_rate():
    by_name = {link.name: link for link in ZONES.topology.uplinks}
    most = {name: link.a.speed_gbps * 1e9 / ZONES.rate_scale / 8 * SECONDS for name, link in by_name.items()}
    half = round(most["ctsw1:atsw1"] / 2)
    metrics = link_metrics(counted(every_uplink(0, atsw1_ctsw1=half, ctsw1_atsw1=half // 5)))
    assert metrics["link_utilisation.max"].value == pytest.approx(0.5, rel=1e-3)
    assert "ctsw1:atsw1" in metrics["link_utilisation.max"].detail
    assert metrics["link_utilisation.ctsw1:atsw1"].value == pytest.approx(0.5, rel=1e-3)
    assert metrics["link_utilisation.mean"].value == pytest.approx(0.5 / len(by_name), rel=1e-3)
    # Up over the highest tier: a tenth of one of eight equal links.
    assert metrics["bisection"].value == pytest.approx(0.1 / 8, rel=1e-2)


def test_link_utilisation_is_over_the_time_of_the_warm_up_too():
    """Ports also count the bytes of the warm-up. Two seconds of it and eight of work make a link half busy, not 5/8."""
    link = next(one for one in ZONES.topology.uplinks if one.name == "ctsw1:atsw1")
    half = round(link.a.speed_gbps * 1e9 / ZONES.rate_scale / 8 * (2 + SECONDS) / 2)
    run = counted(every_uplink(0, ctsw1_atsw1=half))
    run = changed(run, began_ns=run.workload.t0_ns - 2 * 10**9)
    assert link_metrics(run)["link_utilisation.max"].value == pytest.approx(0.5, rel=1e-3)


def test_link_metrics_without_rates_have_no_utilisation_but_a_reason():
    metrics = link_metrics(counted(every_uplink(5), scale=None))
    for name in ("bisection", "link_utilisation.max", "link_utilisation.rtsw1:ctsw1"):
        assert metrics[name].value is None
        assert "gives the links between switches no rate" in metrics[name].detail
    assert metrics["mmr.rtsw"].value == 1
    assert capacity_bytes(synthetic_run()) == {}


def test_link_without_a_known_speed_leaves_no_maximum_and_no_mean():
    """The fullest link was left out without a word, so that the fullest of the others was the maximum."""
    run = changed(counted(every_uplink(5, ctsw1_atsw1=10**12), scale=None), lab_kind="rack")
    links = tuple(
        replace(link, a=replace(link.a, speed_gbps=None)) if link.name == "ctsw1:atsw1" else link
        for link in ZONES.topology.links
    )
    metrics = link_metrics(changed(run, topology=replace(ZONES.topology, links=links)))
    for name in ("link_utilisation.max", "link_utilisation.mean", "bisection"):
        assert metrics[name].value is None
        assert "the speed of ctsw1:atsw1 is not known" in metrics[name].detail
    assert metrics["link_utilisation.rtsw1:ctsw1"].value is not None


def test_link_metrics_after_a_counter_reset_have_no_ratio():
    run = counted(every_uplink(100))
    after = {**run.telemetry.counters_after, "rtsw1": {**run.telemetry.counters_after["rtsw1"], "ctsw1.tx_bytes": 1}}
    metrics = link_metrics(changed(run, counters_after=after))
    assert (metrics["mmr.rtsw"].value, metrics["mmr.rtsw1"].value) == (None, None)
    assert "rtsw1:ctsw1 was reset" in metrics["mmr.rtsw"].detail
    assert metrics["mmr.rtsw2"].value == 1


def test_link_metrics_can_all_be_bounded_and_are_observed():
    run = counted(every_uplink(100))
    observed = observe(run).metrics
    known = ("jfi", "bisection", *names(ZONES.topology))
    assert {"mmr.rtsw", "mmr.ctsw", "mmr.ctsw3", "link_utilisation.ctsw4:atsw2"} <= set(known)
    for name in known:
        assert lookup(name, ()).name == name
        assert observed[name].detail


@pytest.mark.parametrize(
    ("metric", "near"), [("mmr.rtsw9", "did you mean mmr.rtsw"), ("link_utilisation.rtsw1", "link_utilisation.")]
)
def test_link_metric_of_something_the_lab_lacks_is_rejected(metric, near):
    text = COLLECTIVE.format("all-reduce", "") + f'[[expect]]\nmetric = "{metric}"\nmax = 2\n'
    with pytest.raises(ConfigError, match=f'expect.*no metric "{metric}".*{near}'):
        fit(read(text), ZONES.topology, "soft")


def test_link_capacity_on_a_rack_is_the_ports_speed():
    run = changed(counted(every_uplink(0), scale=None), lab_kind="rack")
    link = ZONES.topology.uplinks[0]
    assert capacity_bytes(run)[link.name] == pytest.approx(link.a.speed_gbps * 1e9 / 8 * SECONDS)


def unread(counted_run, node, peer):
    """The run without the counters of one port, before and after."""
    readings = {
        name: {
            host: {k: v for k, v in values.items() if (host, k) != (node, f"{peer}.tx_bytes")}
            for host, values in of.items()
        }
        for name, of in (
            ("counters_before", counted_run.telemetry.counters_before),
            ("counters_after", counted_run.telemetry.counters_after),
        )
    }
    return changed(counted_run, **readings)


@pytest.mark.parametrize("name", ["mmr.rtsw", "mmr.rtsw1", "jfi", "link_utilisation.max", "link_utilisation.mean"])
def test_link_metrics_with_one_uplink_unread_give_no_value(name):
    """The unread uplink may be the busiest one. The rest used to be judged alone, and bounds held for lack of data."""
    whole = counted(every_uplink(100, rtsw1_ctsw1=9000))
    assert link_metrics(whole)[name].value is not None
    result = link_metrics(unread(whole, "rtsw1", "ctsw1"))[name]
    assert result.value is None
    assert "rtsw1 to ctsw1 were not read" in result.detail


def test_bisection_with_one_uplink_unread_gives_no_value():
    whole = counted(every_uplink(100))
    assert link_metrics(unread(whole, "ctsw1", "atsw1"))["bisection"].value is None


def test_link_utilisation_after_a_counter_reset_gives_no_value():
    """Bytes that the busiest link carried before its switch restarted were not counted."""
    run = counted(every_uplink(100), before=1000)
    run.telemetry.counters_after["rtsw1"]["ctsw1.tx_bytes"] = 5
    assert link_metrics(run)["link_utilisation.max"].value is None


@pytest.mark.parametrize(("tier", "used"), [("rack", None), ("zone", 0.5), ("fabric", 0.0)])
def test_bisection_reports_the_use_of_the_uplinks_that_the_flows_cross(tier, used):
    """Flows within a zone use the uplinks of its racks. The table used to say 0.00 of those above the zones."""
    most = {link.name: link.a.speed_gbps * 1e9 / ZONES.rate_scale / 8 * SECONDS for link in ZONES.topology.uplinks}
    halves = {
        (link.a.node, link.b.node): round(most[link.name] / 2)
        for link in ZONES.topology.uplinks
        if link.a.node.startswith("rtsw")
    }
    share = uplink_utilisation(counted(every_uplink(0) | halves), tier)
    assert share == (used if used is None else pytest.approx(used, rel=1e-3))
