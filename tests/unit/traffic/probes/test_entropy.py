"""UDP source ports of RoCEv2, and paths."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventories
from faultbed.traffic.engine.run_results import Connection
from faultbed.traffic.probes.ecmp_entropy import data_and_ack_paths, data_paths, datagram_sport, sport_of, udp_sport
from faultbed.traffic.probes.paths import _reversed

MADE = {"src": "host1:rxe0", "dst": "host3:rxe0", "src_ip": "10.77.1.1", "dst_ip": "10.77.2.1", "lqpn": 65, "rqpn": 65,
        "sq_psn": 1, "rq_psn": 1, "generation": 0}  # fmt: skip
QPN = st.integers(min_value=1, max_value=(1 << 24) - 1)


def test_udp_sport_equals_the_port_captured_on_the_wire():
    """QP 65 to QP 65 used 0xd081 (captured on Linux 6.12)."""
    assert udp_sport(65, 65) == 0xD081


@given(QPN, QPN)
def test_udp_sport_is_dynamic_and_symmetric(one, two):
    assert 0xC000 <= udp_sport(one, two) <= 0xFFFF
    assert udp_sport(one, two) == udp_sport(two, one)


@given(QPN, QPN, QPN, st.integers(1, (1 << 20) - 1))
def test_udp_sport_with_a_flow_label_ignores_the_qpns(one, two, other, label):
    """All flows with one label use one port, and so one path between two RNICs, whatever their queue pairs."""
    assert udp_sport(one, two, label) == udp_sport(other, one, label)
    assert 0xC000 <= udp_sport(one, two, label) <= 0xFFFF


@pytest.mark.parametrize(("label", "sport"), [(1, 0xC001), (0x3FFF, 0xFFFF), (0x4000, 0xC001), (0xFFFFF, 0xFFC0)])
def test_udp_sport_of_flow_labels(label, sport):
    """The port has the low 14 bits of the label, with the high 6 bits folded in."""
    assert udp_sport(65, 66, label) == sport


@pytest.mark.parametrize(("qpn", "sport"), [(1, 0xD872), (2, 0xF0E4), (3, 0xC956), (65, 0xF4FA)])
def test_datagram_sport_of_queue_pairs(qpn, sport):
    """The port is 0xc000 plus the upper 14 of 32 bits of QPN x 0x61c88647, computed by hand."""
    assert datagram_sport(qpn) == sport


@given(QPN)
def test_datagram_sport_is_in_the_dynamic_range(qpn):
    assert 0xC000 <= datagram_sport(qpn) <= 0xFFFF


def test_sport_of_a_datagram_and_its_answer_follow_their_own_queue_pairs():
    probe = Connection(index=0, **MADE | {"lqpn": 17, "rqpn": 18}, transport="ud")
    answer = _reversed(probe)
    assert (sport_of(probe), sport_of(answer)) == (datagram_sport(17), datagram_sport(18))
    assert sport_of(Connection(index=0, **MADE, transport="ud", flow_label=2)) == 0xC002, "on a rack"
    assert sport_of(Connection(index=0, **MADE, transport="uc")) == udp_sport(65, 65)


def test_data_paths_of_a_labelled_flow_use_the_port_of_its_label():
    """The switches used to be queried for another source port than that of the packets."""
    requests = []

    def request(machine, question, *, timeout_s):
        requests.extend(five[3] for _, fives in question["flows"].values() for five in fives)
        return {"ports": {node: [None] * len(fives) for node, (_, fives) in question["flows"].items()}}

    topology = lab_inventory.load(inventories() / "soft.yml").topology
    lab = SimpleNamespace(
        topology=topology, carried=lambda nodes: {"fabric": dict.fromkeys(nodes)}, request=request, scheme=None
    )
    datagrams = Connection(index=2, **MADE, transport="ud")
    data_paths(lab, [Connection(index=0, **MADE), Connection(index=1, **MADE, flow_label=2), datagrams])
    assert requests == [0xD081, 0xC002, 0xF4FA]


def test_data_and_ack_paths_use_one_port_and_swapped_addresses():
    """Switches also hash the addresses, so ACKs may use another spine."""
    topology = lab_inventory.load(inventories() / "soft.yml").topology
    one = Connection(index=4, **MADE)

    def request(machine, question, *, timeout_s):
        def port(node, src, sport):
            over = "ctsw1" if src == one.src_ip else "ctsw2"
            links = {link.other(node).node: link.end(node).netdev for link in topology.links_of(node)}
            assert sport == 0xD081
            return links.get(over)

        flows = question["flows"].items()
        return {"ports": {node: [port(node, five[0], five[3]) for five in fives] for node, (_, fives) in flows}}

    lab = SimpleNamespace(
        topology=topology, carried=lambda nodes: {"fabric": dict.fromkeys(nodes)}, request=request, scheme=None
    )
    data, acks = data_and_ack_paths(lab, [one])[4]
    assert (data[0], data[2], acks[2]) == (one.src.partition(":")[0], "ctsw1", "ctsw2")
    assert acks[0] == one.dst.partition(":")[0]
