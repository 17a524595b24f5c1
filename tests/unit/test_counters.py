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
