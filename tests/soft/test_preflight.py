"""Preflight on a real lab finds every planted misconfiguration. `tests/common` checks a healthy lab."""

from __future__ import annotations

import subprocess
import sys

import pytest

from faultbed.harness.run.prepare.preflight import BURNIN, RESERVATIONS, preflight, suspects
from faultbed.testbed.backends.soft import lifecycle
from faultbed.testbed.tenancy.lab_lease import store_of
from faultbed.testbed.tenancy.reservation import Entry

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
    """Reset the lab after the test, because no journal records what these tests plant."""
    yield
    lifecycle.reset(lab.inventory_model, lambda _: None, lab=lab)


def test_preflight_finds_everything_planted(lab, put_back):
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
    result = preflight(lab, lambda _: None, with_burnin=False)
    actual = {(finding.check, finding.where) for finding in result.findings}
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
    assert expected <= actual, expected - actual
    # Consequences of the planted faults at other places; any further finding is a false alarm.
    follows = {
        ("gid", f"host1:{rnic1}"),  # its device is gone
        ("route", f"host2:{host2.rnics[1].name} ({host2.rnics[1].ip})"),  # its address is gone
        ("link", "rtsw1:ctsw1"),  # the far end of the link that is down
        ("bgp", "ctsw1:rtsw1"),
    }
    # Any switch may have lost a next hop with that uplink.
    beyond = {(check, where) for check, where in actual - expected - follows if check != "ecmp"}
    assert beyond == set()


def test_preflight_reports_a_stale_reservation_and_lists_hardware_checks_as_not_checked(lab):
    """A killed user of the same lab leaves a reservation, which blocks no user. No soft lab has the hardware."""
    store = store_of(lab.inventory_model)
    dead = subprocess.run(
        [sys.executable, "-c", "from faultbed.testbed.tenancy.lab_lease import this_process; print(this_process())"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    stale = Entry(
        token="stale", owner="bob", mode="shared", covers=("rtsw1:ctsw1",), who="bob@there",
        why="a run that was killed", since_s=0.0, until_s=1e12, process=dead,
    )  # fmt: skip
    store.change(lambda now: (*now.book, stale))
    try:
        result = preflight(lab, lambda _: None, with_burnin=False)
        assert [(finding.check, finding.observed) for finding in result.findings] == [
            (RESERVATIONS, "a stale reservation of bob@there (a run that was killed)")
        ]
        whole = {unchecked.check for unchecked in result.unchecked if unchecked.where == lab.name}
        assert {"pcie", "fec", "golden", "affinity", "gpu", BURNIN} <= whole
        assert not whole & set(result.checked)
    finally:
        store.change(lambda now: tuple(entry for entry in now.book if entry.token != "stale"))


@pytest.mark.slow
def test_burnin_names_the_slow_link(lab, put_back):
    """A port is shaped to a hundredth. Every pair towards it is an outlier, and preflight names the common end."""
    rnic = lab.topology.host_by_name["host2"].rnics[0].name
    shaper = ["tbf", "rate", "4mbit", "burst", "16kb", "limit", "4mb"]
    lab.node("rtsw1").run(["tc", "qdisc", "replace", "dev", f"host2-{rnic}", "root", *shaper])
    result = preflight(lab, lambda _: None)
    assert {finding.check for finding in result.findings} == {"queue", BURNIN}
    assert suspects(result.burnin.outliers)[0] == f"host2:{rnic}"
    assert all(f"host2:{rnic}" in (outlier.pair.src, outlier.pair.dst) for outlier in result.burnin.outliers)


def test_preflight_leaves_out_a_sick_host_only(lab, put_back):
    """One RNIC lacks its address: its host is excluded, and the fabric is correct without it."""
    rnic = lab.topology.host_by_name["host2"].rnics[1]
    lab.node("host2").run(["ip", "address", "del", rnic.address, "dev", rnic.netdev])
    result = preflight(lab, lambda _: None, with_burnin=False, leave_out=True)
    assert [exclusion.host for exclusion in result.leave_out] == ["host2"]
    assert result.remaining == ()
