"""Where a rack fault's proof lies: at its target. Other people's jobs move the counters of all other parts."""

from __future__ import annotations

import pytest
from rack_actuator_cases import CASES, HOPS, LINUX, RACK

from faultbed.inject.evidence.receipt import _doubts_of_witnesses
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.fault_spec import FaultSpec

FAULTS = [(RACK, *case) for case in CASES if case[0] in CATALOGUE] + [(LINUX, *case[:3]) for case in HOPS]


def near(planned, topology):
    """Return whether a counter is at a target: its node, its link, or for a switch the machines cabled to it."""
    link, node = planned.target.link, planned.target.node
    nodes = {node, planned.place.node}
    if link is not None:
        nodes |= {link.a.node, link.b.node}
    switch = link.a.node if link is not None else node
    if switch in topology.switch_by_name and (link is None or link.is_uplink):
        nodes |= {other.other(switch).node for other in topology.links_of(switch)}
    others = set()
    if link is not None and link.rnic is not None:
        others = {f"{link.b.node}/{rnic.name}." for rnic in topology.host_by_name[link.b.node].rnics}
        others.remove(f"{link.b.node}/{link.rnic}.")
    return lambda key: key.partition("/")[0] in nodes and not key.startswith(tuple(others))


@pytest.mark.parametrize(("topology", "kind", "target", "params"), FAULTS)
def test_counters_elsewhere_never_prove_a_rack_fault(topology, kind, target, params):
    """Before, any of up to 160 counters of the rack proved a slow link, a small MTU or a removed RNIC."""
    planned = plan(FaultSpec(kind=kind, target=target, for_s=5.0, params=params), topology, lab_kind="rack")
    is_near = near(planned, topology)
    keys = [key for witness in planned.mechanism.must_move for key in witness.any_of]
    elsewhere = {key: 10**9 for key in keys if not is_near(key)}
    if planned.mechanism.must_move:
        assert [*_doubts_of_witnesses(planned, elsewhere, {}, was_read=True)], elsewhere
    else:
        assert planned.mechanism.while_on or planned.mechanism.shows, "a state at the target itself"


def test_all_rack_kinds_have_their_witness_compared():
    assert len({kind for _, kind, _, _ in FAULTS}) == 43


def test_slow_link_of_a_lossless_fabric_is_witnessed_by_marks_pauses_and_cnps():
    """With PFC and DCQCN nothing is lost, so that no counter of retransmission ever moves."""
    planned = plan(
        FaultSpec(kind="link.rate", target="host1:mlx5_0", for_s=5.0, params={"rate": 50}), RACK, lab_kind="rack"
    )
    (witness,) = planned.mechanism.must_move
    assert witness.any_of[:4] == (
        "rtsw1/Ethernet0.asic_ecn_marked",
        "rtsw1/Ethernet0.asic_tx_dropped",
        "host1/mlx5_0.np_ecn_marked_roce_packets",
        "host1/mlx5_0.np_cnp_sent",
    )
    assert {key.rpartition(".")[2] for key in witness.any_of[4:]} == {"asic_tx_pause"}
    assert "rtsw1/Ethernet0.asic_tx_pause" not in witness.any_of, "that one pauses the host, which sends"
