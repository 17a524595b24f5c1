"""Counters of an interface's driver, by the kernel itself; only ports of mlx5 are read for a lab."""

from __future__ import annotations

import socket

import pytest
from own_namespace import answer_of

from faultbed.testbed.node import phy_counters
from faultbed.testbed.node.phy_counters import driver_counters, phy_counts

VETH = """
import json, socket, subprocess
from faultbed.testbed.node.phy_counters import driver_counters
subprocess.run("ip link add up1 type veth peer name up2", shell=True, check=True)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
    print(json.dumps([driver_counters(channel, "up1"), socket.if_nametoindex("up2")]))
"""


def test_driver_counters_are_those_of_the_driver():
    """A veth counts its peer's interface index (drivers/net/veth.c, ethtool_stats_keys)."""
    counts, peer = answer_of(VETH)
    assert counts["peer_ifindex"] == peer


def test_driver_counters_of_an_interface_without_any_are_an_error():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel, pytest.raises(OSError, match="not supported"):
        driver_counters(channel, "lo")


def test_phy_counts_are_those_of_mlx5_ports(tmp_path, monkeypatch):
    for device, driver in (("be0", "mlx5_core"), ("eth0", "virtio_net"), ("be1", "mlx5_core")):
        (tmp_path / device / "device").mkdir(parents=True)
        (tmp_path / device / "device/driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
    (tmp_path / "lo").mkdir()
    counts = {"rx_corrected_bits_phy": 7, "rx_pcs_symbol_err_phy": 0, "rx_prio3_pause": 2, "rx_prio3_bytes": 9}

    def read(_, device):
        if device == "be1":
            raise OSError("gone")
        return counts

    monkeypatch.setattr(phy_counters, "driver_counters", read)
    assert dict(phy_counts(str(tmp_path))) == {
        "be0.rx_corrected_bits_phy": 7,
        "be0.rx_pcs_symbol_err_phy": 0,
        "be0.rx_prio3_pause": 2,
    }
    assert list(phy_counts(str(tmp_path / "nowhere"))) == []
