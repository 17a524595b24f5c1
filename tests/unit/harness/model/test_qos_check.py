"""Queues of a QoS profile: headroom of a pause, and marks before pauses."""

from dataclasses import replace

import msgspec
import pytest
from house import HOUSE

from faultbed.harness.model.qos_check import findings, headroom_bytes, pause_threshold_bytes
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.inventory.schema import BufferVars, EcnVars

RACK = lab_inventory.load(HOUSE / "inventory" / "rack-h100.example.yml")


def places(*, xoff_kib=1000, max_kib=1000, pool_bytes=32 << 20, busy_ports=8, cable_m=40.0):
    profile = msgspec.structs.replace(
        RACK.qos,
        buffer=BufferVars(xon_kib=10, xoff_kib=xoff_kib),
        ecn=EcnVars(min_kib=100, max_kib=max_kib, max_percent=1),
    )
    found = findings(replace(RACK, qos=profile), cable_m=cable_m, pool_bytes=pool_bytes, busy_ports=busy_ports)
    return [finding.place for finding in found]


def test_findings_of_a_sound_profile_are_none():
    assert places() == []


def test_findings_name_too_little_headroom():
    assert places(xoff_kib=20) == ["all.qos.buffer.xoff_kib"]
    assert places(xoff_kib=60, cable_m=1.0) == []
    assert places(xoff_kib=60, cable_m=2000.0) == ["all.qos.buffer.xoff_kib"]


def test_findings_name_kmax_above_the_pause():
    assert places(max_kib=8000) == ["all.qos.ecn.max_kib"]
    assert places(max_kib=8000, busy_ports=1) == []
    assert places(max_kib=8000, pool_bytes=None) == []


def test_headroom_of_a_400g_port_is_what_the_standard_adds_up():
    assert headroom_bytes(gbps=400, mtu=4096, cable_m=40) == 2 * 40 / 2e8 * 50e9 + 3840 + 8192
    with pytest.raises(UsageError, match="no port"):
        headroom_bytes(gbps=float("nan"), mtu=4096, cable_m=40)


def test_pause_threshold_shares_the_pool_among_busy_ports():
    assert pause_threshold_bytes(pool_bytes=900, alpha=0, busy_ports=8) == 100
    assert pause_threshold_bytes(pool_bytes=900, alpha=3, busy_ports=1) == 800


def test_findings_of_a_lab_without_a_profile_are_refused():
    with pytest.raises(UsageError, match="no QoS profile"):
        findings(replace(RACK, qos=None), cable_m=1, pool_bytes=None, busy_ports=1)
