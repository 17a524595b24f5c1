"""Preflight on a real lab of either kind: nothing is wrong with a healthy one. Not yet run on hardware."""

from __future__ import annotations

import pytest

from faultbed.harness.run.prepare.preflight import preflight

pytestmark = pytest.mark.needs("rdma", "hosts >= 2")


def test_preflight_healthy_lab_reports_nothing_wrong(lab):
    result = preflight(lab, lambda _: None, with_burnin=False)
    assert (result.findings, result.leave_out, result.remaining) == ((), (), ())


@pytest.mark.slow
def test_preflight_healthy_lab_burns_in_every_pair(lab):
    result = preflight(lab, lambda _: None)
    assert result.findings == ()
    measured = result.burnin.pairs
    rnics = [(host.name, rnic.name) for host in lab.topology.hosts for rnic in host.rnics]
    assert len(measured) == sum(1 for rnic in rnics for two in rnics if rnic[0] != two[0])
    assert all(pair.latency_us > 0 and pair.goodput_bps > 0 for pair in measured)
