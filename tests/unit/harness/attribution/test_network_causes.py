"""Network causes are located by carriers, routes, dead queue pairs, gaps and marks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from ipaddress import ip_interface

import msgspec
import pytest
from labelled_run import HOSTS, Network, connections
from synthetic_run import MS, changed

from faultbed.harness.attribution.attribute import attribute
from faultbed.harness.attribution.signatures import Signs
from faultbed.harness.findings import NOTHING
from faultbed.harness.record.evidence.telemetry_evidence import counter_deltas
from faultbed.testbed.observe.telemetry import Change
from faultbed.traffic.engine.run_results import QpError, Standstill


def test_attribution_ecn_marks_are_located_like_losses():
    network = Network(4).run(("rtsw2", "host3"), 0.05, "mark")
    best = attribute(network.measured("packet.mark", "rtsw2:host3:rxe0"))[0]
    assert (best.cause, best.name) == ("congestion", "rtsw2:host3:rxe0")


def test_attribution_switch_with_all_links_down_is_one_finding():
    network = Network(5).run()
    for link in network.topology.links_of("ctsw1"):
        network.carrier(link)
    (finding,) = attribute(network.measured("link.down", "ctsw1"))
    assert (finding.cause, finding.place, finding.name) == ("link-down", "ctsw", "ctsw1")


def test_attribution_effects_of_a_link_down_are_no_second_finding():
    network = Network(6).run()
    link = network.topology.uplinks[0]
    network.carrier(link)
    network.counts["host1", "rxe0.completer_retry_err"] += 40
    assert [finding.cause for finding in attribute(network.measured("link.down", link.name))] == ["link-down"]


def without_routes(run, *lost):
    """Return a run in which switches lost routes, as (switch, prefix)."""
    changes = [
        Change(
            at_ns=run.workload.t0_ns + 10**9, node=node, subject=f"route main unicast {prefix} metric 20 bgp", text=None
        )
        for node, prefix in lost
    ]
    return changed(run, changes=tuple(changes))


def test_attribution_withdrawn_prefixes_name_their_switch():
    quiet = Network(3).run().measured(None, "")
    link = quiet.lab.topology.rnic_link("host3", "rxe0")
    prefixes = [str(ip_interface(rnic.address).network) for rnic in quiet.lab.topology.host_by_name["host3"].rnics]
    others = [switch.name for switch in quiet.lab.topology.switches if switch.name != link.a.node][:3]
    (finding,) = attribute(without_routes(quiet, *[(node, prefix) for node in others for prefix in prefixes]))
    assert (finding.cause, finding.name, finding.is_network) == ("control-plane", link.a.node, True)
    assert attribute(without_routes(quiet, (others[0], prefixes[0]))) == (NOTHING,), "one alone may have forgotten"
    elsewhere = str(ip_interface(quiet.lab.topology.host_by_name["host1"].rnics[0].address).network)
    both = [(node, prefix) for node in others for prefix in (*prefixes, elsewhere)]
    assert attribute(without_routes(quiet, *both)) == (NOTHING,), "of several switches: no single one withdrew"


def with_dead(run, pairs):
    """Return a run in which queue pairs ran out of retries, as (source, destination)."""
    lost = tuple(
        QpError(
            time_ns=run.workload.t0_ns + 10**9, connection=number, endpoint=f"{src}:rxe0", peer=f"{dst}:rxe0",
            qpn=17 + number,
            status="RETRY_EXC_ERR", generation=0,
        )
        for number, (src, dst) in enumerate(pairs)
    )  # fmt: skip
    return changed(run, qps_lost=lost)


TO_HOST1 = [(connection.src[:5], connection.dst[:5]) for connection in connections() if connection.dst == "host1:rxe0"]
OF_HOST1 = [
    (connection.src[:5], connection.dst[:5])
    for connection in connections()
    if "host1:rxe0" in (connection.src, connection.dst)
]


def test_attribution_black_hole_link_is_where_dead_queue_pairs_cross():
    """A black hole causes no gap, and its timers alone are not unusual, so the dead queue pairs must locate it."""
    (finding,) = attribute(with_dead(Network(3).run().measured(None, ""), OF_HOST1))
    assert (finding.cause, finding.name) == ("loss", "rtsw1:host1:rxe0")
    assert "ran out of retries from host1:rxe0 to host2:rxe0" in finding.evidence[-1]


def test_attribution_silent_host_kills_the_queue_pairs_towards_it():
    (finding,) = attribute(with_dead(Network(3).run().measured(None, ""), TO_HOST1))
    assert (finding.cause, finding.place, finding.name) == ("silent-host", "rank", "host1")


@pytest.mark.parametrize("host", HOSTS)
def test_attribution_queue_pair_dead_on_a_lossy_link_names_that_link(host):
    """A shallow queue once lost eight packets and one of five queue pairs, and attribution reported nothing."""
    network = Network(12)
    link = network.topology.rnic_link(host, "rxe0")
    crossing = [connection for connection in connections() if connection.dst == f"{host}:rxe0"]
    run = network.run((link.a.node, host), 0.0006).measured("congestion.shallow-queue", link.name)

    for one in crossing:
        findings = attribute(with_dead(run, [(one.src[:5], one.dst[:5])]))
        assert (findings[0].cause, findings[0].name) == ("loss", link.name)


def test_attribution_mtu_mismatch_hits_all_data_over_the_link():
    network = Network(3).run()
    network.counts["rtsw1", "ip.FragFails"] += 1648
    (finding,) = attribute(with_dead(network.measured(None, ""), TO_HOST1))
    assert (finding.cause, finding.name, finding.confidence) == ("mtu", "rtsw1:host1:rxe0", 0.9)
    network.counts["rtsw1", "ip.FragFails"] += 1
    (finding,) = attribute(network.measured(None, ""))
    assert (finding.cause, finding.name, finding.confidence) == ("mtu", "rtsw1", 0.5), "no other machine noticed"


def test_attribution_retries_exhausted_while_routes_are_gone_are_no_second_finding():
    network = Network(7).run().sessions("rtsw1")
    network.counts["rtsw2", f"{network.ports['rtsw2', 'host3']}.rx_packets"] += 3897
    across = [(a, b) for a, b in itertools.permutations(HOSTS, 2) if ("host1" in (a, b)) != ("host2" in (a, b))]
    findings = attribute(with_dead(network.measured(None, ""), across))
    assert [(finding.cause, finding.name) for finding in findings] == [("control-plane", "rtsw1")]


def test_attribution_host_standstill_explains_its_dead_queue_pairs():
    run = Network(8).run().measured(None, "")
    still = Standstill(host="host1", start_ns=0, end_ns=1100 * MS)
    findings = attribute(changed(with_dead(run, TO_HOST1[:1]), standstills=(still,)))
    assert [(finding.cause, finding.name) for finding in findings] == [("hung-rank", "host1")]
    elsewhere = attribute(changed(with_dead(run, [("host3", "host4")]), standstills=(still,)))
    assert len(elsewhere) == 2, "what died far from it has another reason"


def test_attribution_switch_control_traffic_is_no_loss():
    """BGP packets enter a switch and never leave it. Thirty of them once led to a link next to the switch."""
    network = Network(4).run()
    network.counts["rtsw1", "host2-rxe0.rx_packets"] += 2000
    lossy = Signs.of(network.measured(None, ""), counter_deltas(network.measured(None, "").telemetry)).lost_in
    assert lossy == {"rtsw1": 2000}
    network.counts["rtsw1", "ip.InDelivers"] += 2040
    network.counts["rtsw1", "ip.OutRequests"] += 40
    assert Signs.of(network.measured(None, ""), counter_deltas(network.measured(None, "").telemetry)).lost_in == {}


def test_attribution_queue_pairs_dead_on_a_downed_link_are_no_second_finding():
    """A switch next to the link dropped undeliverable packets; queue pairs that died elsewhere have another cause."""
    network = Network(9).run()
    link = network.topology.rnic_link("host1", "rxe0")
    network.counts["rtsw2", "host3-rxe0.rx_packets"] += 300
    run = network.carrier(link).measured(None, "")
    assert [finding.cause for finding in attribute(with_dead(run, TO_HOST1))] == ["link-down"]
    elsewhere = [
        pair for pair in ((connection.src[:5], connection.dst[:5]) for connection in connections()) if "host3" in pair
    ]
    assert len(attribute(with_dead(run, elsewhere))) == 2


def test_attribution_queue_pairs_dying_at_once_between_all_hosts_name_no_place():
    """The machine below stood still for a moment; queue pairs towards one host that die later have another cause."""
    everywhere = list(itertools.permutations(HOSTS, 2))
    run = with_dead(Network(7).run().measured(None, ""), everywhere)
    assert attribute(run) == (NOTHING,)
    later = with_dead(run, TO_HOST1).workload.qps_lost
    both = (*run.workload.qps_lost, *(replace(one, time_ns=one.time_ns + 6 * 10**9) for one in later))
    assert attribute(changed(run, qps_lost=both)) == attribute(with_dead(run, TO_HOST1))
    stray = replace(with_dead(run, [("host3", "host4")]).workload.qps_lost[0], time_ns=run.workload.end_ns)
    several = with_dead(run, OF_HOST1)
    with_stray = changed(several, qps_lost=(*several.workload.qps_lost, stray))
    assert attribute(with_stray) == attribute(several), "one that died alone, at another time"


def test_attribution_packets_missing_at_a_distant_switch_do_not_clear_a_silent_host():
    network = Network(7).run()
    network.counts["rtsw2", "host3-rxe0.rx_packets"] += 170
    findings = attribute(with_dead(network.measured(None, ""), TO_HOST1))
    assert [(finding.cause, finding.name) for finding in findings] == [("silent-host", "host1")]


def test_attribution_packets_kept_by_a_switch_are_a_loss_in_it_without_other_signs():
    """A short queue loses twenty packets, all of them ends of messages: no gap, and the usual timers."""
    network = Network(4).run()
    network.counts["rtsw2", "host3-rxe0.rx_packets"] += 200
    assert attribute(network.measured(None, "")) == (NOTHING,), "its own packets may be as many: nobody counted them"
    (finding,) = attribute(balanced(network).measured(None, ""))
    assert (finding.cause, finding.name, finding.confidence < 0.5) == ("loss", "rtsw2", True)


def balanced(network):
    """Add balanced counts of the switches' own packets to each other, and return the network."""
    for number, switch in enumerate(network.topology.switches):
        for name in ("ip6.InDelivers", "ip6.OutRequests"):
            network.counts[switch.name, name] += 40 + number
    return network


def test_attribution_one_gap_locates_a_switchs_loss_on_one_uplink():
    """A queue loses five packets. Only one is followed by another packet, and its queue pair gives the path."""
    network = balanced(Network(4).run())
    (one,) = (each for each in connections() if (each.src, each.dst) == ("host1:rxe0", "host3:rxe0"))
    network.counts["rtsw1", f"{network.ports['rtsw1', 'host1']}.rx_packets"] += 5
    network.counts["host3", "rxe0.out_of_seq_request"] += 1
    network.counts["host1", "rxe0.rcvd_seq_err"] += 1
    (finding,) = attribute(network.measured(None, ""))
    assert (finding.cause, finding.name) == ("loss", f"rtsw1:{one.path[2]}")


def test_attribution_dead_queue_pairs_locate_a_loss_in_either_direction():
    """A slow uplink lost data of some queue pairs and ACKs of others; too few died to suggest a dead link."""
    network = balanced(Network(4).run())
    network.counts["rtsw1", f"{network.ports['rtsw1', 'host1']}.rx_packets"] += 198
    across = [
        connection for connection in connections() if "rtsw1" in connection.path[:2] and len(connection.path) == 5
    ]
    link = f"rtsw1:{across[0].path[2]}"
    mine = [one for one in across if one.path[2] == across[0].path[2]][:2]
    dead = [(one.src[:5], one.dst[:5]) for one in mine]
    (finding,) = attribute(with_dead(network.measured(None, ""), dead))
    assert (finding.cause, finding.name) == ("loss", link)


def test_attribution_one_or_two_missing_packets_are_no_loss():
    network = balanced(Network(4).run())
    network.counts["rtsw1", f"{network.ports['rtsw1', 'host1']}.rx_packets"] += 2
    assert attribute(network.measured(None, "")) == (NOTHING,)


def test_attribution_ecn_marks_are_located_before_the_first_node_that_sees_them():
    """All marked packets cross two links. The switch between the links already received them marked."""
    network = Network(4).run()
    network.counts["host3", "ip.InCEPkts"] += 60
    for switch in network.topology.switches:
        network.counts[switch.name, "ip.InCEPkts"] += 0
    for host in ("host1", "host2", "host4"):
        network.counts[host, "ip.InCEPkts"] += 0
    on_the_host_link = attribute(network.measured(None, ""))[0]
    assert (on_the_host_link.cause, on_the_host_link.name) == ("congestion", "rtsw2:host3:rxe0")
    network.counts["rtsw2", "ip.InCEPkts"] += 60
    network.counts["ctsw1", "ip.InCEPkts"] += 60
    earlier = attribute(network.measured(None, ""))[0]
    assert (earlier.cause, earlier.name) == ("congestion", "rtsw1:ctsw1")


def test_attribution_indistinguishable_links_are_all_named():
    """Loss towards a spine and from it looks alike to the RNICs if no switch misses a packet."""
    network = Network(11)
    for one in connections():
        if "ctsw2" in one.path and one.path[1] == "rtsw1":
            network.counts[one.dst[:5], "rxe0.out_of_seq_request"] += 20
            network.counts[one.src[:5], "rxe0.rcvd_seq_err"] += 18
    (finding,) = attribute(network.run().measured(None, ""))
    named = {finding.name, *finding.evidence[-1].removesuffix(" would leave the same traces").split(", ")}
    assert named == {"rtsw1:ctsw2", "rtsw2:ctsw2"}


def test_attribution_pairing_of_gaps_and_naks_distinguishes_spines():
    """Counters recorded on VMs: both hosts send over each spine to both other hosts, and one pair lost 9 packets."""
    network = Network(12).run()
    for host, name, count in (
        ("host1", "out_of_seq_request", 9), ("host2", "out_of_seq_request", 3),
        ("host3", "rcvd_seq_err", 2), ("host4", "rcvd_seq_err", 9),
    ):  # fmt: skip
        network.counts[host, f"rxe0.{name}"] += count
    over_ctsw1 = {("host1", "host3"), ("host2", "host3"), ("host3", "host1"), ("host4", "host2")}
    rack = {"host1": "rtsw1", "host2": "rtsw1", "host3": "rtsw2", "host4": "rtsw2"}
    crossing = tuple(
        msgspec.structs.replace(
            connections()[0],
            src=f"{src}:rxe0",
            dst=f"{dst}:rxe0",
            path=(src, rack[src], dst)
            if rack[src] == rack[dst]
            else (src, rack[src], "ctsw1" if (src, dst) in over_ctsw1 else "ctsw2", rack[dst], dst),
        )
        for src, dst in itertools.permutations(HOSTS, 2)
    )
    (finding,) = attribute(changed(network.measured(None, ""), connections=crossing))
    assert {finding.name, finding.evidence[-1].split()[0]} == {"rtsw1:ctsw2", "rtsw2:ctsw2"}


def test_attribution_queue_pair_lost_in_a_flap_is_no_sign_of_loss_elsewhere():
    """The demo's case: an uplink flap costs one queue pair, later a host's link loses packets."""
    network = Network(13)
    network.carrier(next(link for link in network.topology.uplinks if link.name == "rtsw1:ctsw1"))
    network.counts["host3", "rxe0.out_of_seq_request"] += 34
    network.counts["host2", "rxe0.rcvd_seq_err"] += 30
    network.counts["host2", "rxe0.completer_retry_err"] += 28
    network.counts["rtsw2", "host3-rxe0.rx_packets"] += 198
    ring = (
        ("host1", "rtsw1", "host2"), ("host2", "rtsw1", "ctsw2", "rtsw2", "host3"),
        ("host3", "rtsw2", "host4"), ("host4", "rtsw2", "ctsw1", "rtsw1", "host1"),
    )  # fmt: skip
    around = tuple(
        msgspec.structs.replace(connections()[0], src=f"{path[0]}:rxe0", dst=f"{path[-1]}:rxe0", path=path)
        for path in ring
    )
    run = changed(network.measured(None, ""), connections=around)
    findings = attribute(with_dead(run, [("host4", "host1")]))
    assert [(finding.cause, finding.name) for finding in findings] == [
        ("link-down", "rtsw1:ctsw1"),
        ("loss", "rtsw2:host3:rxe0"),
    ]


ACK_LINKS = sorted(
    {
        pair
        for connection in connections()
        for pair in itertools.pairwise(connection.path[::-1])
        if "host" not in pair[0]
    }
)


@pytest.mark.parametrize(("u", "v"), ACK_LINKS)
def test_loss_of_acks_alone_is_blamed_on_its_link_and_direction(u, v):
    """Senders have timers, receivers duplicates, and there is no gap: the switch lost only ACKs."""
    network = Network(21).run((u, v), 0.2, "ack")
    (findings, *others) = attribute(network.measured(None, ""))
    assert findings.cause == "loss"
    assert {u, v} <= set(findings.name.split(":"))
    assert f"only ACKs were lost, from {u} to {v}" in findings.evidence[0]
    assert others == []


def test_loss_of_acks_follows_their_recorded_path():
    """ECMP may send the ACKs over the other spine than the data."""
    other = {"ctsw1": "ctsw2", "ctsw2": "ctsw1"}
    run = Network(22).run(("rtsw2", "ctsw1"), 0.2, "ack").measured(None, "")
    turned = tuple(
        msgspec.structs.replace(
            connection,
            path=tuple(other.get(node, node) for node in connection.path),
            ack_path=connection.path[::-1],
        )
        for connection in run.workload.connections
    )
    result = attribute(changed(run, connections=turned))[0]
    assert (result.cause, result.name) == ("loss", "rtsw2:ctsw1")


def test_attribution_timers_and_duplicates_without_lost_packets_are_no_ack_loss():
    """A host that answers late causes the same symptoms, but every packet that entered a switch also left it."""
    network = Network(23).run()
    network.counts["host1", "rxe0.completer_retry_err"] += 80
    for host in ("host2", "host3"):
        network.counts[host, "rxe0.duplicate_request"] += 80
    assert all(
        "only ACKs" not in line for finding in attribute(network.measured(None, "")) for line in finding.evidence
    )
