"""Roles of rack labs, their Linux part, for real on soft hosts: converge, converge again, verify, return as found."""

from __future__ import annotations

import pytest

from testbed import fingerprint, provision

pytestmark = pytest.mark.soft

WANTED = {
    "base_host_hugepages": 4,
    "base_host_sysctls": {"net/core/rmem_max": 16777216, "vm/zone_reclaim_mode": 0, "vm/min_free_kbytes": 8192},
}
LOOK = """\
cat /proc/sys/net/core/rmem_max /proc/sys/vm/min_free_kbytes /proc/sys/vm/nr_hugepages
ls /etc/sysctl.d /etc/security/limits.d /etc/systemd/system.conf.d /var/lib/faultbed/found 2>/dev/null
true"""


@pytest.mark.slow
def test_a_host_is_converged_and_returned_as_found(lab):
    site = provision.site_of(lab)
    hosts = [host.name for host in lab.topology.hosts]

    def looks():
        return {name: lab.node(name).run(["sh", "-c", LOOK]).stdout for name in hosts}

    found, before = looks(), fingerprint.capture(lab)
    would = provision.play(site, "rack", extra=WANTED, check=True)
    assert set(would.changes) == set(hosts)
    assert looks() == found, "a check changes nothing"
    done = provision.play(site, "rack", extra=WANTED)
    assert done.changes == would.changes, "a check tells what is then done"
    assert provision.play(site, "rack", extra=WANTED).changes == {}
    for said in looks().values():
        assert said.splitlines()[:3] == ["16777216", "8192", "4"]
        assert "90-faultbed.conf" in said
    assert set(provision.play(site, "rack-teardown").changes) == set(hosts)
    assert looks() == found
    assert fingerprint.diff(before, fingerprint.capture(lab)) == []
    assert provision.play(site, "rack-teardown").changes == {}
