"""Counters as they are read from what the shell printed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from testbed import counters

PRINTED = """\
@@node host1
/sys/class/net/be0/carrier:1
/sys/class/net/be0/carrier_changes:2
/sys/class/net/be0/flags:0x1003
/sys/class/net/be0/statistics/tx_bytes:824
/sys/class/infiniband/rxe0/ports/1/hw_counters/out_of_seq_request:7
/sys/class/infiniband/rxe0/ports/1/hw_counters/lifespan:10
/proc/sys/net/ipv4/fib_multipath_hash_policy:1
/proc/net/snmp:Ip: Forwarding DefaultTTL FragFails
/proc/net/snmp:Ip: 1 64 5
/proc/net/snmp:Tcp: RtoAlgorithm ActiveOpens
/proc/net/snmp:Tcp: 1 3
/proc/net/netstat:IpExt: InNoRoutes InCEPkts
/proc/net/netstat:IpExt: 0 9
/proc/schedstat:cpu0 0 0 0 0 0 0 5000 42000 3
faultbed-gpu0.service/schedstat:8000 6000 2
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
            "ip.hash_policy": 1,
            "ip.FragFails": 5,
            "tcp.ActiveOpens": 3,
            "ip.InNoRoutes": 0,
            "ip.InCEPkts": 9,
            "cpu0.wait_us": 42,
            "gpu0.wait_us": 6,
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
