"""The Linux part of the rack roles on soft hosts: apply, apply again, verify, restore."""

from __future__ import annotations

import pytest

from faultbed.testbed import provision
from faultbed.testbed.observe import fingerprint

pytestmark = pytest.mark.soft

WANTED = {
    # The image has no mstflint, because no soft host has a ConnectX.
    "rdma_stack_packages": ["rdma-core", "ibverbs-providers", "ibverbs-utils", "python3-pyverbs", "ethtool"],
    "base_host_hugepages": 4,
    "base_host_sysctls": {"net/core/rmem_max": 16777216, "vm/zone_reclaim_mode": 0, "vm/min_free_kbytes": 8192},
    # PTP on the front end with software time stamps: only the files, because the image lacks the daemons.
    "time_host_ptp_netdev": "fe0",
    "time_host_ptp_hardware": False,
    "time_host_start": False,
    "faultbed_qos": {"profile": "dcqcn", "roce_dscp": 26, "cnp_dscp": 48, "pfc_priorities": [3], "dcqcn": True},
    "faultbed_dscp_map": [{"dscp": 26, "priority": 3}, {"dscp": 48, "priority": 6}],
    # The role of Linux switches is tested on hosts, because a soft switch gets its FRR from the role fabric_switch.
    "rack_linux_switches": "hosts",
    "faultbed_nos": "frr",
    "faultbed_asn": 65001,
    "faultbed_loopback": "10.78.0.250/32",
    "faultbed_ports": [{"netdev": "be0", "mac": "02:00:00:00:00:01", "peer": "nobody"}],
}
LOOK = """\
cat /proc/sys/net/core/rmem_max /proc/sys/vm/min_free_kbytes /proc/sys/vm/nr_hugepages
ls /etc/sysctl.d /etc/security/limits.d /etc/systemd/system.conf.d /var/lib/faultbed/found 2>/dev/null
ls -ln --time-style=+ /etc/frr /etc/systemd/network /etc/systemd/system /etc/linuxptp 2>/dev/null | grep -v ^total
cat /etc/frr/frr.conf /etc/frr/daemons 2>/dev/null | sha256sum
cat /proc/sys/net/ipv4/fib_multipath_hash_policy /proc/sys/net/ipv4/conf/be0/accept_redirects
cat /sys/kernel/config/rdma_cm/*/ports/1/default_roce_tos 2>/dev/null
true"""


@pytest.mark.slow
def test_rack_roles_converge_a_host_and_restore_it(lab):
    site = provision.site_of(lab)
    hosts = [host.name for host in lab.topology.hosts]

    def looks():
        return {name: lab.node(name).run(["sh", "-c", LOOK]).stdout for name in hosts}

    result, before = looks(), fingerprint.capture(lab)
    would = provision.play(site, "rack", extra=WANTED, check=True)
    assert set(would.changes) == set(hosts)
    assert looks() == result, "a check changes nothing"
    done = provision.play(site, "rack", extra=WANTED)
    assert done.changes == would.changes, "a check tells what is then done"
    assert provision.play(site, "rack", extra=WANTED).changes == {}
    for state in looks().values():
        assert state.splitlines()[:3] == ["16777216", "8192", "4"]
        assert all(
            name in state
            for name in ("90-faultbed.conf", "90-faultbed-be0.network", "faultbed-ptp4l.service", "faultbed.conf")
        )
        records = ("base_host.json", "split_host.json", "time_host.json", "frr_switch.json")
        assert all(name in state for name in records)
    assert set(provision.play(site, "rack-teardown").changes) == set(hosts)
    assert looks() == result
    assert fingerprint.diff(before, fingerprint.capture(lab)) == []
    assert provision.play(site, "rack-teardown").changes == {}
