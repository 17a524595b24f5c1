"""Counters and fingerprints as they are read from what the shell printed, and compared."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed import counters, fingerprint
from testbed.errors import LabError
from testbed.fingerprint import Fingerprint

PRINTED = """\
@@node host1
/sys/class/net/be0/carrier:1
/sys/class/net/be0/carrier_changes:2
/sys/class/net/be0/flags:0x1003
/sys/class/net/be0/statistics/tx_bytes:824
/sys/class/infiniband/rxe0/ports/1/hw_counters/out_of_seq_request:7
/sys/class/infiniband/rxe0/ports/1/hw_counters/lifespan:10
faultbed-gpu0.service/cpu.stat:nr_throttled 4
faultbed-gpu0.service/cpu.max:max 100000
@@node rtsw1
/sys/class/net/ctsw1/carrier_down_count:3
/sys/class/net/ctsw1/flags:0x1002
"""


def test_counters_are_named_by_device():
    """Interfaces, RNICs and GPUs by name; flags become `up`, no limit becomes -1, what is no counter is left out."""
    assert counters.parse(PRINTED) == {
        "host1": {
            "be0.carrier": 1,
            "be0.carrier_changes": 2,
            "be0.up": 1,
            "be0.tx_bytes": 824,
            "rxe0.out_of_seq_request": 7,
            "gpu0.nr_throttled": 4,
            "gpu0.quota_us": -1,
        },
        "rtsw1": {"ctsw1.carrier_down_count": 3, "ctsw1.up": 0},
    }


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_an_increment_is_never_negative(before, after):
    """A counter that stands lower than before was reset: what it shows now is what came since."""
    assert counters.delta(before, after) == (after - before if after >= before else after)


def test_increments_are_flat_and_without_states():
    """`node/name`, states left out, a counter that has appeared since counted from 0."""
    before = {"host1": {"be0.carrier": 1, "rxe0.send_err": 2}}
    after = {"host1": {"be0.carrier": 0, "rxe0.send_err": 5, "rxe1.send_err": 1}}
    assert counters.flat_deltas(before, after) == {"host1/rxe0.send_err": 3, "host1/rxe1.send_err": 1}


def printed(*, flags, nhid, ifindex):
    link = {
        "ifindex": ifindex, "ifname": "be0", "flags": flags, "mtu": 4200, "qdisc": "fq_codel",
        "address": "02:fb:00:00:00:01", "addr_info": [{"local": "10.77.1.1", "prefixlen": 31, "scope": "global"}],
    }  # fmt: skip
    hops = [{"via": {"host": f"fe80::{n}"}, "dev": f"ctsw{n}", "flags": []} for n in (1, 2)]
    route = {
        "dst": "10.77.2.0/31",
        "nhid": nhid,
        "protocol": "bgp",
        "metric": 20,
        "nexthops": hops[:: 1 if nhid % 2 else -1],
    }
    return "\n".join([
        "@@node host1", "@@ip", json.dumps([link]), json.dumps([{"priority": 0, "src": "all", "table": "local"}]),
        json.dumps([route]), "@@sysctl", "net.ipv4.ip_forward = 1", "@@cpu.max",
        "/sys/fs/cgroup/faultbed.slice/faultbed-gpu0.service/cpu.max:max 100000", "@@end",
    ])  # fmt: skip


def taken(**facts):
    return Fingerprint(nodes=fingerprint.parse(printed(**facts)))


@given(st.integers(1, 99), st.integers(1, 99), st.integers(1, 999), st.integers(1, 999))
def test_what_the_kernel_numbers_as_it_likes_makes_no_difference(one, two, three, four):
    """Interface indexes, next-hop ids and the order of equal next hops come and go."""
    up = ["LOWER_UP", "UP"]
    assert fingerprint.diff(taken(flags=up, nhid=three, ifindex=one), taken(flags=up, nhid=four, ifindex=two)) == []


def test_a_lost_carrier_is_one_readable_line():
    """The difference says which node, which link, what it was and what it is."""
    before = taken(flags=["UP", "LOWER_UP"], nhid=1, ifindex=2)
    lines = fingerprint.diff(before, taken(flags=["UP"], nhid=1, ifindex=2))
    assert len(lines) == 1
    assert lines[0].startswith("host1: link be0 was LOWER_UP UP mtu 4200")


def test_what_is_gone_or_new_is_said_so():
    """Subjects on one side only."""
    one, none = Fingerprint(nodes={"host1": {"nft table netdev faultbed_x": "there"}}), Fingerprint(nodes={})
    assert fingerprint.diff(none, one) == ["host1: nft table netdev faultbed_x is new (there)"]
    assert fingerprint.diff(one, none) == ["host1: nft table netdev faultbed_x is gone (was there)"]


def test_a_fingerprint_that_is_cut_off_is_no_fingerprint():
    """Half an answer must not pass for a lab with less in it."""
    with pytest.raises(LabError, match="ends in its section"):
        fingerprint.parse("@@node host1\n@@sysctl\nnet.ipv4.ip_forward = 1\n")
