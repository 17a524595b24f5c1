"""The netlink code of nodes decodes messages of pyroute2, and reads the same state of this machine."""

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2 import IPRoute
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from faultbed.testbed.node import counts, state
from faultbed.testbed.node.netlink import attributes, messages

NAMES = {2: "be0", 3: "be1"}
IP4 = st.ip_addresses(v=4).map(str)
PORTS = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=15)
U64 = st.integers(0, 2**64 - 1)
STATS = ("rx_packets", "tx_packets", "rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
MAIN, UNICAST, BGP, ZEBRA = 254, 1, 186, 11


def body_of(message):
    """Decode a message as the kernel would send it, without its header."""
    message.encode()
    ((_kind, _seq, body),) = messages(bytes(message.data))
    return body


@given(
    name=PORTS,
    mtu=st.integers(68, 65535),
    up=st.booleans(),
    carrier=st.integers(0, 1),
    downs=st.integers(0, 2**32 - 1),
    stats=st.fixed_dictionaries(dict.fromkeys(STATS, U64)),
)
def test_netlink_link_is_decoded_as_pyroute2_encodes_it(name, mtu, up, carrier, downs, stats):
    link = ifinfmsg()
    link["index"], link["flags"] = 2, int(up) | 1 << 16
    link["attrs"] = [
        ("IFLA_IFNAME", name),
        ("IFLA_MTU", mtu),
        ("IFLA_QDISC", "pfifo"),
        ("IFLA_CARRIER", carrier),
        ("IFLA_CARRIER_DOWN_COUNT", downs),
        ("IFLA_STATS64", stats),
    ]
    body = body_of(link)

    assert state.link_change(body, NAMES) == (2, f"link {name}", f"LOWER_UP{' UP' * up} mtu {mtu} qdisc pfifo")
    actual = dict(counts.link_counts(name, link["flags"], attributes(body[16:])))
    assert actual[f"{name}.mtu"] == mtu
    assert actual[f"{name}.carrier_down_count"] == downs
    assert actual.get(f"{name}.carrier") == (carrier if up else None)
    kept = {counter for counter in STATS if not counter.endswith("errors")}
    assert {counter: actual[f"{name}.{counter}"] for counter in kept} == {counter: stats[counter] for counter in kept}


@given(prio=st.integers(1, 0xFFFF), hook=st.sampled_from([(0xFFFFFFF2, "ingress"), (0xFFFFFFF3, "egress")]))
def test_netlink_filter_is_decoded_as_pyroute2_encodes_it(prio, hook):
    one = tcmsg()
    one["index"], one["parent"], one["info"] = 3, hook[0], prio << 16 | 0x0008
    one["attrs"] = [("TCA_KIND", "u32")]

    assert state.filter_fact(body_of(one), NAMES) == (f"filter be1 {hook[1]} {prio}", "u32")


def route_of(destination, length, **attrs):
    route = rtmsg()
    route["family"], route["dst_len"], route["table"] = socket.AF_INET, length, MAIN
    route["proto"], route["type"] = attrs.pop("proto"), UNICAST
    route["attrs"] = [("RTA_DST", destination), *attrs.items()]
    return route


@given(destination=IP4, length=st.integers(0, 32), gateway=IP4, metric=st.integers(0, 2**32 - 1))
def test_netlink_route_is_decoded_as_pyroute2_encodes_it(destination, length, gateway, metric):
    route = route_of(destination, length, proto=BGP, RTA_GATEWAY=gateway, RTA_OIF=2, RTA_PRIORITY=metric)

    assert list(state.route_facts(body_of(route), NAMES)) == [
        (f"route main unicast {destination}/{length} metric {metric} bgp", f"via {gateway} dev be0")
    ]


@given(destination=IP4, hops=st.lists(st.tuples(IP4, st.sampled_from([2, 3])), min_size=2, max_size=8))
def test_netlink_multipath_route_is_decoded_as_pyroute2_encodes_it(destination, hops):
    ways = [{"oif": index, "hops": 0, "attrs": [("RTA_GATEWAY", gateway)]} for gateway, index in hops]
    route = route_of(destination, 24, proto=ZEBRA, RTA_MULTIPATH=ways)
    ((subject, text),) = state.route_facts(body_of(route), NAMES)

    assert subject == f"route main unicast {destination}/24 metric 0 zebra"
    assert text.split(", ") == sorted(f"via {gateway} dev {NAMES[index]}" for gateway, index in hops)


@given(hops=st.lists(st.tuples(st.sampled_from([2, 3, 4]), st.sampled_from([0, 1, 4, 16, 20])), min_size=2, max_size=8))
def test_next_hops_of_multipath_route_are_its_usable_interfaces(hops):
    """Flags 1 and 16 are RTNH_F_DEAD and RTNH_F_LINKDOWN; 4 is RTNH_F_ONLINK."""
    ways = [{"oif": index, "hops": 0, "flags": flags, "attrs": []} for index, flags in hops]
    route = route_of("10.0.0.0", 24, proto=ZEBRA, RTA_MULTIPATH=ways)

    assert counts.next_hops_of(body_of(route)) == [index for index, flags in hops if not flags & 17]


def test_next_hops_of_single_path_route_are_none():
    assert counts.next_hops_of(body_of(route_of("10.0.0.0", 24, proto=BGP, RTA_GATEWAY="10.0.0.1", RTA_OIF=2))) == []


def test_netlink_links_of_this_machine_match_pyroute2():
    with IPRoute() as route:
        by_name = {
            link.get("IFLA_IFNAME"): (link.get("IFLA_MTU"), link["flags"] & 1, link.get("IFLA_CARRIER_CHANGES"))
            for link in route.get_links()
        }
    place = counts.Place(None)
    try:
        result = place.read()
    finally:
        place.close()

    assert by_name
    for name, expected in by_name.items():
        assert tuple(result[f"{name}.{field}"] for field in ("mtu", "up", "carrier_changes")) == expected


@pytest.mark.parametrize("cut", [3, 4, 7])
def test_netlink_truncated_attribute_ends_decoding(cut):
    whole = struct.pack("=HH", 8, 4) + struct.pack("=I", 1500)

    assert attributes(whole) == {4: whole[4:]}
    assert attributes(whole[:cut]).get(4, b"") in (b"", whole[4:cut])
