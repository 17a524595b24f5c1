"""Mechanisms of congestion, switch, data and link faults on a soft lab: requests to actuators, and witnesses."""

from __future__ import annotations

from pathlib import Path

import pytest

from faultbed.inject.fault_plan import plan, plan_all
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.node.machine.limit import RANKS_CGROUP
from faultbed.inject.node.network.frr import FrrActuator
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventories

SOFT = lab_inventory.load(inventories() / "soft.yml").topology
MINI = lab_inventory.load(inventories() / "soft-mini.yml").topology


def soft(kind, target, *, for_s=1.0, topology=SOFT, **params):
    return plan(FaultSpec(kind=kind, target=target, for_s=for_s, params=params), topology, lab_kind="soft")


def test_background_elephants_come_from_another_rack():
    """The flows cross uplinks if the lab has any. A tenth of their packets, marked with ECT(1), must arrive."""
    planned = soft("congestion.background", "host1:rxe1", for_s=4.0, rate=16)
    sender = SOFT.host_by_name[planned.place.node]
    assert sender.rack != SOFT.host_by_name["host1"].rack
    ((namespace, source),) = planned.request["args"]["sources"]
    assert namespace is None
    assert source in {rnic.ip for rnic in sender.rnics}
    assert planned.request["args"]["destination"] == SOFT.host_by_name["host1"].rnics[1].ip
    assert planned.mechanism.must_move[0].any_of == ("host1/ip.InECT1Pkts",)
    assert planned.mechanism.must_move[0].at_least == 16e6 * 4 / 8 / 4000 / 10


def test_incast_comes_from_all_other_switches_in_bursts():
    """At least a tenth of the bursts' bytes must arrive. A lab with one switch has no host to send them."""
    planned = soft("congestion.incast", "host1:rxe1", for_s=4.0, rate=40, period=100, duty=0.2)
    args = planned.request["args"]
    assert args["sources"] == [["rtsw2", "10.78.0.2"], ["ctsw1", "10.78.0.101"], ["ctsw2", "10.78.0.102"]]
    assert (args["burst_s"], args["period_s"]) == (pytest.approx(0.02), 0.1)
    assert planned.place.node == "fabric"
    assert planned.mechanism.must_move[0].at_least == round(40e6 * 0.2 * 4 / 8 / 4000 / 10)
    with pytest.raises(UsageError, match="two other switches"):
        soft("congestion.incast", "host1:rxe0", topology=MINI)


def test_hash_collision_covers_only_the_prefixes_of_other_racks():
    """The readback must name the target uplink and no other uplink."""
    planned = soft("congestion.hash-collision", "rtsw1:ctsw2")
    assert planned.request["args"]["prefixes"] == ["10.77.2.0/31", "10.77.2.2/31", "10.77.2.4/31", "10.77.2.6/31"]
    assert planned.mechanism.shows == {"netns": "rtsw1", "uplinks": "ctsw2"}
    assert planned.mechanism.must_move[0].any_of == ("rtsw1/ctsw2.tx_packets",)


def test_hash_collisions_of_one_switch_at_the_same_time_are_rejected():
    specs = [FaultSpec(kind="congestion.hash-collision", target=f"rtsw1:{to}", for_s=1.0) for to in ("ctsw1", "ctsw2")]
    with pytest.raises(UsageError, match="overlaps"):
        plan_all(specs, SOFT, lab_kind="soft")


def test_shallow_queue_counts_drops_and_declares_its_drain_time():
    """The queue of 8 packets drains at 20 Mbit/s."""
    args = soft("congestion.shallow-queue", "host1:rxe0").request["args"]
    assert args["queue"] == "netem limit 8 rate 20000000bit"
    assert args["count"] == "drops"
    assert args["drain_s"] == pytest.approx(8 * 4200 * 8 / 20e6)


def test_slow_receiver_limits_the_cpu_share_of_the_host():
    """The period is 20 ms. It is longer if the quota would be less than 1 ms, which the kernel refuses."""
    for percent, value in ((10, "2000 20000"), (50, "10000 20000"), (1, "1000 100000")):
        planned = soft("congestion.slow-receiver", "host1", percent=percent)
        assert planned.request["args"]["value"] == value
        assert planned.mechanism.while_on == (("host1/ranks.quota_us", int(value.split()[0])),)
        assert planned.mechanism.restored == (("host1/ranks.quota_us", None),)
    # `faultbed.testbed.observe.counters` derives the counter name `ranks` from this folder and this suffix.
    assert Path(RANKS_CGROUP).parent.name == "faultbed.slice"
    assert Path(RANKS_CGROUP).name == "faultbed-ranks.service"


def test_drain_moves_traffic_to_other_uplinks_without_a_black_hole():
    planned = soft("switch.drain", "ctsw1")
    assert planned.mechanism.must_move[0].any_of == ("rtsw1/ctsw2.tx_packets", "rtsw2/ctsw2.tx_packets")
    assert planned.mechanism.while_on == (("rtsw1/ctsw1.multipath", 0), ("rtsw2/ctsw1.multipath", 0))
    assert {f"{switch.name}/ip.InNoRoutes" for switch in SOFT.switches} < set(planned.mechanism.must_not_move)
    drain_revert = FrrActuator(**planned.request["args"]).revert_script()
    assert "'no bgp graceful-shutdown'" in drain_revert
    withdraw_revert = FrrActuator(**soft("switch.withdraw", "rtsw1").request["args"]).revert_script()
    assert "'redistribute connected'" in withdraw_revert


def test_switch_reboot_takes_every_port_down():
    planned = soft("switch.reboot", "rtsw1")
    assert sorted(planned.request["args"]["ports"]) == sorted(
        link.end("rtsw1").netdev for link in SOFT.links_of("rtsw1")
    )
    assert {key for key, value in planned.mechanism.restored if value == 1} == {
        f"rtsw1/{link.end('rtsw1').netdev}.up" for link in SOFT.links_of("rtsw1")
    }


def test_data_corruption_changes_each_packet_only_once():
    """The rule forwards only data packets that do not yet have the fault's mark to the fault's device."""
    rules = soft("data.corrupt", "host1:rxe0", every=50).request["args"]["ruleset"]
    match = 'ip ecn != ect1 udp dport 4791 @th,64,8 { 0x00-0x0b, 0x16-0x17 } counter name "passed" numgen inc mod 50 49'
    assert match in rules
    assert 'fwd to "fbvia' in rules
    binding = soft("data.corrupt", "host1:rxe0", psn="+100", qp="any").mechanism.late_binding
    assert (binding.host, binding.rnic, binding.psn_ahead) == ("host1", "rxe0", 100)


def test_hash_collision_needs_more_than_one_uplink():
    with pytest.raises(UsageError, match="one uplink"):
        soft("congestion.hash-collision", "rtsw1:ctsw1", topology=MINI)


@pytest.mark.parametrize("kind", ["link.down", "link.flap"])
def test_link_fault_of_an_rnic_may_move_only_its_own_send_errors(kind):
    """A packet that is sent while the carrier drops has no route. Two of eight such faults used to be unproven."""
    send_errors = {f"{host.name}/{rnic.name}.send_err" for host in SOFT.hosts for rnic in host.rnics}
    assert set(soft(kind, "host1:rxe0").mechanism.must_not_move) == send_errors - {"host1/rxe0.send_err"}
    assert set(soft(kind, "rtsw1:host1:rxe0").mechanism.must_not_move) == send_errors


def test_address_fault_claims_its_interface_and_is_shown_by_the_kernel_alone():
    planned = soft("rnic.address", "host1:rxe0")
    assert planned.request["args"] == {"rnic": "rxe0", "netdev": "be0", "address": "10.77.1.1/31"}
    assert planned.mechanism.while_on == (("host1/be0.addresses", 0),)
    assert ("host1/be0.addresses", 1) in planned.mechanism.restored
    assert planned.mechanism.must_not_move == ("host1/be0.carrier_changes",), "the link must stay up"
    assert planned.mechanism.must_move == ()


@pytest.mark.parametrize(("code", "syndrome"), [("invalid-request", 0x61), ("remote-access", 0x62)])
def test_queue_pair_error_needs_the_arrival_and_a_lost_connection_of_its_own_rnic(code, syndrome):
    planned = soft("rnic.qp-error", "host1:rxe0", qp=17, code=code)
    args = planned.request["args"]
    assert (args["netns"], args["device"], args["qp"], args["syndrome"]) == ("rtsw1", "host1-rxe0", 17, syndrome)
    assert [witness.any_of for witness in planned.mechanism.must_move] == [
        ("host1/rxe0.qps_ended",),
        ("host1/ip.InECT1Pkts",),
    ]
    assert planned.mechanism.must_not_move == ("host1/rxe1.qps_ended",)
    with pytest.raises(UsageError, match=r"to a QP number, or to any; not any\[1\]"):
        soft("rnic.qp-error", "host1:rxe0", qp="any[1]")
