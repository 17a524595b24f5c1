"""A guardian does not revert the fault of a holder that waits for a slow command. Holders and guardians are real."""

from __future__ import annotations

import os

import pytest
from held import send_request

from faultbed.inject.leases.channels import LocalChannel

WATCHDOG_S = 1.5
"""Time without a heartbeat after which the guardian reverts. The commands in these tests take longer."""

VTYSH = """#!/bin/sh
state=$(dirname "$0")/state
dropped=$(cat "$state" 2>/dev/null || echo 0)
case "$*" in
*"clear bgp"*) sleep 2.5; echo 1 >"$state" ;;
*"no network "*) sleep 2.5; echo gone >"$state" ;;
*"network "*) rm -f "$state" ;;
*running-config*) [ -e "$state" ] || echo " network 10.0.0.0/24" ;;
*) echo '{"peers": {"10.0.0.1": {"state": "Established", "connectionsDropped": '$dropped'}}}' ;;
esac
"""
READ_STATE = ["sh", "-c", "cat $0 2>/dev/null || echo up", "STATE"]


@pytest.fixture
def holder(tmp_path, monkeypatch):
    """Return the channel of a holder on a machine whose `vtysh` is slow."""
    tool = tmp_path / "vtysh"
    tool.write_text(VTYSH)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    channel = LocalChannel("slow", tmp_path / "slow.revert", watchdog_s=WATCHDOG_S)
    assert channel.receive(timeout_s=30)["event"] == "ready"
    yield channel
    channel.close()


def commands(tmp_path):
    """Return arguments with commands that together, but not alone, take longer than `WATCHDOG_S`."""
    state = str(tmp_path / "state")
    return {
        "on": [["sleep", "0.8"]] * 4 + [["sh", "-c", f"echo down > {state}"]],
        "off": [["rm", "-f", state]],
        "look": [*READ_STATE[:-1], state],
        "applied": "^down$", "normal": "^up$", "needs": [], "able": [], "remember": {}, "guard": None, "count": None,
        "settle_s": 0.0, "shows": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("actuator", "args"),
    [
        ("bgp_reset", {"netns": None}),
        ("frr", {"netns": None, "path": ["router bgp 1"], "line": "network 10.0.0.0/24"}),
        ("commands", commands),
    ],
    ids=["bgp-reset", "frr", "commands"],
)
def test_guardian_does_not_revert_while_a_holder_waits_for_a_slow_command(holder, tmp_path, actuator, args):
    args = args(tmp_path) if callable(args) else args
    prepared = send_request(
        holder, "prepare", id="slow", actuator=actuator, args=args, edges=[[0.0, True]], window_s=60.0, ttl_s=30.0,
        revert_dir=str(tmp_path),
    )  # fmt: skip
    assert prepared["event"] == "prepared", prepared
    armed = send_request(holder, "arm")
    assert armed["event"] == "armed", armed
    assert armed["readback"]["applied"]
    cleared = send_request(holder, "clear")
    assert cleared["observed"]["count"] == 1
