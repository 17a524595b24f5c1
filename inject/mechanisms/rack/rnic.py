"""RNICs of hosts: the port by `mlxlink`, the device by PCIe. Not yet run on hardware.

`mlxlink --port_state DN|UP` is of NVIDIA's firmware tools (MFT, "mlxlink Utility"; `mstlink` of mstflint is the same
program); `remove` and `rescan` are the kernel's (Documentation/ABI/testing/sysfs-bus-pci). A device that is removed
loses its configuration: preflight, or the roles, have the last word after it is back.

A port that its firmware keeps up (KEEP_ETH_LINK_UP_Px, the default of every recorded ConnectX) does not go down:
mlxlink looks after 2 s and fails (mstflint, mlxlink_commander.cpp, sendPaosDown). Whether it may is asked first.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from inject.mechanisms.mechanism import Request, Shot, Witness, link_of, trains
from inject.mechanisms.rack.rack_mechanism import PCI, Commands, Way, commanded, phases_last, retries
from testbed.errors import Unsupported, UsageError

__all__ = ["BY_KIND", "WAYS"]

_COLOURLESS = r"s/\x1b\[[0-9;]*m//g"
"""For sed: mlxlink colours its values in a pipe, too (mstflint, mlxlink/modules/printutil)."""
_SHORTEST_S = 3.0
"""mlxlink waits 2 s before it looks whether the port is down (sendPaosDown)."""
_LOCKED = (
    "the kernel is locked down (as with Secure Boot) and keeps mlxlink from the device: start MFT's driver (mst start) "
    "or aim at the switch port"
)
_LOCKDOWN = (
    ("sh", "-c", "ls /dev/mst/* 2>/dev/null; cat /sys/kernel/security/lockdown 2>/dev/null || echo '[none]'"),
    r"\[none\]|^/dev/mst/",
    _LOCKED,
)
"""What PCI devices are written by from user space is closed then (kernel_lockdown(7)), unless MFT's driver is there."""
WAYS = (
    Way(kind="rnic.remove", fidelity="real", by="the kernel: PCIe remove, then rescan"),
    Way(kind="rnic.reset", fidelity="real", by="mlxlink: port state down, then up"),
)


def _port(asked: Request) -> Shot:
    rnic = asked.target.rnic
    link, port = link_of(asked)
    if rnic is None:
        raise UsageError(f"{asked.where}.target: {asked.target.text} is not an RNIC")
    edges: list[list[Any]] = trains(asked) if asked.kind == "link.flap" else [[0.0, True]]
    flaps, host, switch = sum(bool(on) for _, on in edges), asked.target.node, link.a
    phases_last(asked, edges, _SHORTEST_S, why="mlxlink takes over 2 s to take a port down")
    if rnic.pcie is None:  # mstflint knows devices by mlx5_N or their PCI address, and hosts name them rocep24s0
        raise Unsupported(
            f"{asked.where}.target: not supported on this lab: the inventory has no pcie of it, by which mlxlink "
            f"finds it; aim at its switch port instead: {switch.node}:{host}:{rnic.name}"
        )
    device = rnic.pcie
    keeps = f"KEEP_ETH_LINK_UP_P{int(device.rpartition('.')[2]) + 1}"
    kept = (
        f"the firmware keeps this port up: `mlxconfig -d {device} set {keeps}=0` and a reset of the firmware allow it, "
        f"or aim at its switch port instead: {switch.node}:{host}:{rnic.name}"
    )
    commands = Commands(
        needs=("mlxlink|mstlink", "mlxconfig|mstconfig"),
        guard=port.netdev,
        device=device,
        able=(
            _LOCKDOWN,
            (
                ("{mlxconfig}", "-d", device, "-e", "query", keeps),
                # default, current, next boot: what counts is the middle one
                rf"^\W*(RO)?\s*{keeps}\s+\S+\s+False\(0\)\s",
                kept,
            ),
        ),
        on=(("{mlxlink}", "-d", device, "--port_state", "DN"),),
        off=(("{mlxlink}", "-d", device, "--port_state", "UP"),),
        look=("sh", "-c", f"{{mlxlink}} -d {shlex.quote(device)} | sed '{_COLOURLESS}'"),
        # "Physical state" is no help: for Ethernet it tells of auto-negotiation, and a healthy port at 400 Gb/s says
        # ETH_AN_FSM_ENABLE as one that is down (mstflint, mlxlink_maps.cpp; recorded by mlxlink_exporter).
        applied="^State +: *Disable",
        normal="^State +: *Active",
    )
    return commanded(
        asked,
        commands,
        node=host,
        claims=f"{host}/{rnic.name}/port",
        shows={"device": device},
        must_move=(Witness(any_of=(f"{switch.node}/{switch.netdev}.carrier_changes",), at_least=flaps),),
        restored=((f"{host}/{port.netdev}.carrier", 1),),
        edges=edges,
    )


def _remove(asked: Request) -> Shot:
    rnic = asked.target.rnic
    if rnic is None:
        raise UsageError(f"{asked.where}.target: {asked.target.text} is not an RNIC")
    if rnic.pcie is None:
        raise Unsupported(f"{asked.where}.target: not supported on this lab: the inventory has no pcie of it")
    host, there = asked.target.node, f"{PCI}/devices/{rnic.pcie}"
    commands = Commands(
        guard=rnic.netdev,
        device=rnic.pcie,
        able=((("test", "-w", f"{PCI}/rescan"), "^", "the PCI bus cannot be rescanned"),),
        on=(("sh", "-c", f"echo 1 > {there}/remove"),),
        off=(("sh", "-c", f"[ -e {there} ] || echo 1 > {PCI}/rescan"),),
        look=("sh", "-c", f"[ -e {there} ] && echo present || echo absent"),
        applied="^absent$",
        normal="^present$",
        settle_s=20.0,
    )
    return commanded(
        asked,
        commands,
        node=host,
        claims=f"{host}/{rnic.pcie}",
        shows={"pcie": rnic.pcie},
        must_move=(Witness(any_of=retries(asked.topology, "completer_retry_err", but=host)),),
    )


BY_KIND: Mapping[tuple[str, str], Callable[[Request], Shot]] = {
    ("link.down", "rnic"): _port,
    ("link.flap", "rnic"): _port,
    ("rnic.reset", "rnic"): _port,
    ("rnic.remove", "rnic"): _remove,
}
