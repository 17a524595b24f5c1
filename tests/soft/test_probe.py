"""Probes on every way through a real lab: nothing found where nothing is, and the place where something is."""

from __future__ import annotations

import pytest

from traffic import probe
from traffic.plan import QpParams
from traffic.probe import ProbeSpec

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts >= 4", "uplinks >= 2")]

SPEC = ProbeSpec(duration_s=6.0)


def test_probes_name_the_link_that_loses_and_nothing_else(lab, inject, traffic):
    """First a healthy fabric; then one direction of one RNIC's link loses a fifth of all packets.

    A datagram that is lost is missed by nobody but who counts: a flow is what the receipt's witness sees it by.
    """
    healthy = probe.run(lab, SPEC)
    assert healthy.suspects == (), healthy.suspects
    assert healthy.uncovered == ()
    fault = inject("packet.drop", "host3:rxe1", share=0.2)
    fault.arm()
    hurt = probe.run(lab, SPEC)
    flow = traffic.flow("host1:rxe1", "host3:rxe1", message_bytes=1024, messages=100, qp=QpParams(timeout=16))
    assert flow.wait(60.0).outcome == "completed"
    (found,) = hurt.suspects
    assert "rtsw2 -> host3:rxe1" in found.names
    assert 0.1 < found.lost / found.sent < 0.3
    assert fault.clear().proved
