"""BGP sessions of switches in network namespaces, by FRR itself: unnumbered, numbered, and what SONiC's addresses do.

The configuration is that of the roles. FRR's daemons and the rights for network namespaces are needed.

What is a stand-in: the switches, which are two network namespaces of this machine, joined by a veth pair.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from faultbed.testbed.shipped import playbooks

DAEMONS = Path("/usr/lib/frr")
DEADLINE_S = 30.0


def can_run():
    if os.geteuid() != 0 or not (DAEMONS / "bgpd").exists():
        return False
    tried = subprocess.run(
        ["unshare", "-n", "ip", "link", "add", "swp0", "type", "veth"], capture_output=True, check=False
    )
    return tried.returncode == 0


pytestmark = [pytest.mark.process, pytest.mark.skipif(not can_run(), reason="needs FRR, root and veth interfaces")]


@pytest.fixture
def pair(load):
    """Start two switches with the role's configuration, whose ports have the given addresses; return a reader."""
    bgpd_config = load(playbooks() / "module_utils" / "faultbed_fabric_bgp.py").fabric_bgpd_config
    names = [f"fbt{os.getpid()}{letter}" for letter in "ab"]
    home = Path(tempfile.mkdtemp())  # FRR's own user must reach it, unlike pytest's folders
    home.chmod(0o755)
    folders = [home / name for name in names]
    processes = []

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def start(addresses, *, described):
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "swp1", "netns", names[0], "type", "veth", "peer", "name", "swp1", "netns", names[1])
        for index, (name, folder) in enumerate(zip(names, folders, strict=True)):
            folder.mkdir()
            shutil.chown(folder, "frr", "frr")
            loopback = f"10.78.0.{index + 1}/32"
            ip("-n", name, "address", "add", loopback, "dev", "lo")
            if addresses[index]:
                ip("-n", name, "address", "add", addresses[index], "dev", "swp1")
            ip("-n", name, "link", "set", "swp1", "up")
            port = {"netdev": "swp1", "peer": "x"} | ({"address": addresses[index]} if described else {})
            text = bgpd_config({"name": name, "asn": 65101 + index, "loopback": loopback, "ports": [port]})
            (folder / "bgpd.conf").write_text(text)
            (folder / "zebra.conf").write_text("")
            for daemon in ("zebra", "bgpd"):
                # Not -N: that FRR names a folder below /run/frr. The sockets are in the test's own folder.
                words = [DAEMONS / daemon, "-f", folder / f"{daemon}.conf", "-i", folder / f"{daemon}.pid", "-P", "0"]
                words += ["-z", folder / "zserv", "--vty_socket", folder, "--limit-fds", "256"]
                words += ["-p", "179"] if daemon == "bgpd" else []
                processes.append(subprocess.Popen(["ip", "netns", "exec", name, *words], stderr=subprocess.DEVNULL))
                waits_for(lambda folder=folder, daemon=daemon: (folder / f"{daemon}.vty").exists())

    def sessions():
        command = ["vtysh", "--vty_socket", folders[0], "-d", "bgpd", "-c", "show bgp ipv4 unicast summary json"]
        done = subprocess.run(["ip", "netns", "exec", names[0], *command], capture_output=True, text=True, check=False)
        try:
            peers = json.loads(done.stdout)["peers"]
        except (ValueError, KeyError):
            return {}
        return {peer: entry["state"] for peer, entry in peers.items()}

    start.sessions = sessions
    yield start
    for process in reversed(processes):
        process.terminate()
        process.wait(timeout=10)
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    shutil.rmtree(home)


def waits_for(condition, deadline_s=DEADLINE_S):
    deadline = time.monotonic() + deadline_s
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return result


def test_frr_unnumbered_session_without_addresses_is_established(pair):
    pair((None, None), described=False)
    assert waits_for(lambda: pair.sessions() == {"swp1": "Established"}), pair.sessions()


def test_frr_numbered_session_of_described_addresses_is_established(pair):
    pair(("10.0.0.0/31", "10.0.0.1/31"), described=True)
    assert waits_for(lambda: pair.sessions() == {"10.0.0.1": "Established"}), pair.sessions()


def test_frr_factory_address_stops_an_unnumbered_session(pair):
    """SONiC's factory addresses of two ends are not in one subnet. FRR then connects to an address that nobody has.

    The role refuses such a port by name (test_sonic_conflicting_entry_is_reported_before_any_write).
    """
    pair(("10.0.0.0/31", "10.0.0.8/31"), described=False)
    assert waits_for(lambda: pair.sessions().get("swp1") in {"Connect", "Active"}), pair.sessions()
    assert not waits_for(lambda: pair.sessions() == {"swp1": "Established"}, deadline_s=6.0)
