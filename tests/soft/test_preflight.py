"""Preflight on a real lab finds everything that is planted there; `tests/common` has a healthy one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.run.prepare.preflight import BURNIN, RESERVATIONS, preflight, suspects
from testbed.backends.soft import lifecycle
from testbed.tenancy.lab_lease import store_of
from testbed.tenancy.reservation import Entry

pytestmark = pytest.mark.soft

ON_HOST1 = """
ip route replace default via {gateway1} dev {netdev1} table 100
echo "50000 100000" >/sys/fs/cgroup/faultbed.slice/faultbed-gpu0.service/cpu.max
rdma link delete {rnic1}
"""
ON_HOST2 = """
ip address del {address} dev {netdev}
date -s '+600 seconds'
"""
ON_CARRIER = """
ip -n rtsw1 link set host1-{rnic1} mtu 1500
tc -n rtsw1 qdisc replace dev host2-{rnic0} root tbf rate 2mbit burst 16kb limit 1mb
ip netns exec rtsw1 sysctl -qw net.ipv4.fib_multipath_hash_policy=0
ip netns exec rtsw1 nft add table netdev stray
ip -n ctsw1 link set rtsw1 down
mkdir -p /run/faultbed/faults && touch /run/faultbed/faults/stray
"""


@pytest.fixture
def put_back(lab):
    """What these tests plant, nobody wrote down: the snapshot is the revert."""
    yield
    lifecycle.reset(lab.inventory_model, lambda _: None)
    lab.forget_connections()


def test_everything_planted_is_found(lab, put_back):
    host1, host2 = lab.topology.host_by_name["host1"], lab.topology.host_by_name["host2"]
    gateway1 = lab.topology.rnic_link("host1", host1.rnics[1].name).a.address.partition("/")[0]
    rnic0, rnic1 = host1.rnics[0].name, host1.rnics[1].name
    planted = {
        "host1": ON_HOST1.format(gateway1=gateway1, netdev1=host1.rnics[1].netdev, rnic1=rnic1),
        "host2": ON_HOST2.format(address=host2.rnics[1].address, netdev=host2.rnics[1].netdev),
        lab.carrier("rtsw1").name: ON_CARRIER.format(rnic0=rnic0, rnic1=rnic1),
    }
    for name, script in planted.items():
        lab.node(name).run(["sh", "-ec", script])
    found = preflight(lab, lambda _: None, with_burnin=False)
    told = {(wrong.check, wrong.where) for wrong in found.wrong}
    expected = {
        ("mtu", f"rtsw1:host1-{rnic1}"),
        ("gid", f"host2:{host2.rnics[1].name}"),
        ("address", f"host2:{host2.rnics[1].netdev}"),
        ("queue", f"rtsw1:host2-{rnic0}"),
        ("hash", "rtsw1"),
        ("route", f"host1:{rnic0} ({host1.rnics[0].ip})"),
        ("clock", "host2"),
        ("link", "ctsw1:rtsw1"),
        ("bgp", "rtsw1:ctsw1"),
        ("rdma", f"host1:{rnic1}"),
        ("leftovers", "rtsw1"),
        ("leftovers", lab.carrier("rtsw1").name),
        ("soft-gpu", "host1:gpu0"),
    }
    assert expected <= told, expected - told
    # What the same plants bring about elsewhere; anything beyond is a false alarm.
    follows = {
        ("gid", f"host1:{rnic1}"),  # its device is gone
        ("route", f"host2:{host2.rnics[1].name} ({host2.rnics[1].ip})"),  # its address is gone
        ("link", "rtsw1:ctsw1"),  # the far end of what is down
        ("bgp", "ctsw1:rtsw1"),
    }
    # Any switch may have lost a next hop with that uplink.
    beyond = {(check, where) for check, where in told - expected - follows if check != "ecmp"}
    assert beyond == set()


def test_a_stale_reservation_is_found_and_blocks_nobody(lab):
    """A user of the same session's lab, killed: what he held is told as stale."""
    store = store_of(lab.inventory_model)
    dead = subprocess.run(
        [sys.executable, "-c", "from testbed.tenancy.lab_lease import this_process; print(this_process())"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    stale = Entry(
        token="stale", owner="bob", mode="shared", covers=("rtsw1:ctsw1",), who="bob@there",
        why="a run that was killed", since_s=0.0, until_s=1e12, process=dead,
    )  # fmt: skip
    store.change(lambda now: (*now.book, stale))
    try:
        found = preflight(lab, lambda _: None, with_burnin=False)
        assert [(wrong.check, wrong.found) for wrong in found.wrong] == [
            (RESERVATIONS, "a stale reservation of bob@there (a run that was killed)")
        ]
    finally:
        store.change(lambda now: tuple(entry for entry in now.book if entry.token != "stale"))


@pytest.mark.slow
def test_the_burn_in_names_the_slow_link(lab, put_back):
    """A port that is shaped to a hundredth: every pair towards it falls out, and it is what they have in common."""
    rnic = lab.topology.host_by_name["host2"].rnics[0].name
    shaper = ["tbf", "rate", "4mbit", "burst", "16kb", "limit", "4mb"]
    lab.node("rtsw1").run(["tc", "qdisc", "replace", "dev", f"host2-{rnic}", "root", *shaper])
    found = preflight(lab, lambda _: None)
    assert {wrong.check for wrong in found.wrong} == {"queue", BURNIN}
    assert suspects(found.burnin.outliers)[0] == f"host2:{rnic}"
    assert all(f"host2:{rnic}" in (one.pair.src, one.pair.dst) for one in found.burnin.outliers)


def test_what_only_hardware_can_tell_is_not_looked_at_here(lab):
    found = preflight(lab, lambda _: None, with_burnin=False)
    whole = {one.check for one in found.not_looked if one.where == lab.name}
    assert {"pcie", "fec", "golden", "affinity", "gpu", BURNIN} <= whole
    assert not whole & set(found.checked)
    assert (found.leave_out, found.rest) == ((), ())


def test_a_host_that_is_sick_is_left_out_and_one_that_is_not_takes_part(lab, put_back):
    """One RNIC without its address: its host goes, the fabric is right without it."""
    rnic = lab.topology.host_by_name["host2"].rnics[1]
    lab.node("host2").run(["ip", "address", "del", rnic.address, "dev", rnic.netdev])
    found = preflight(lab, lambda _: None, with_burnin=False, leave_out=True)
    assert [one.host for one in found.leave_out] == ["host2"]
    assert found.rest == ()
