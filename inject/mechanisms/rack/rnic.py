"""RNICs of hosts: the port by `mlxlink`, the device by PCIe. Not yet run on hardware.

`mlxlink --port_state DN|UP` is part of NVIDIA's firmware tools (MFT, "mlxlink Utility"; `mstlink` of mstflint is the
same program); `remove` and `rescan` are the kernel's (Documentation/ABI/testing/sysfs-bus-pci). A removed device loses
its configuration: run preflight, or the roles, once it is back.

A port that its firmware keeps up (KEEP_ETH_LINK_UP_Px, the default of every recorded ConnectX) does not go down:
mlxlink checks after 2 s and fails (mstflint, mlxlink_commander.cpp, sendPaosDown). That setting is checked first.

`mlxlink --rx_error_injection` moves the point at which the receiver samples the eye (register PREI: "Enable the RX link
deterioration"; mstflint, mlxlink_err_inj_commander.cpp). Afterwards the link "needs to be toggled", as the tool says.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from faultbed.inject.mechanisms.mechanism import Mechanism, Request, Witness, flap_edges, link_of
from faultbed.inject.mechanisms.rack.rack_mechanism import (
    PCI,
    Commands,
    RackMechanism,
    by_commands,
    port_down_pattern,
    require_phases,
)
from faultbed.inject.mechanisms.soft import rnic as soft_rnic
from faultbed.testbed.errors import Unsupported, UsageError
from faultbed.testbed.node.phy_counters import CORRECTED

__all__ = ["BY_KIND", "MECHANISMS"]

_COLOURLESS = r"s/\x1b\[[0-9;]*m//g"
"""A sed expression: mlxlink colours its values even in a pipe (mstflint, mlxlink/modules/printutil)."""
_SHORTEST_S = 3.0
"""mlxlink waits 2 s before it checks whether the port is down (sendPaosDown)."""
_LOCKED = (
    "the kernel is locked down (as with Secure Boot), so mlxlink cannot access the device; start MFT's driver "
    "(mst start), or target the switch port"
)
_LOCKDOWN = (
    ("sh", "-c", "ls /dev/mst/* 2>/dev/null; cat /sys/kernel/security/lockdown 2>/dev/null || echo '[none]'"),
    r"\[none\]|^/dev/mst/",
    _LOCKED,
)
"""A locked-down kernel blocks access to PCI devices from user space (kernel_lockdown(7)), except by MFT's driver."""
MECHANISMS = (
    RackMechanism(kind="rnic.remove", fidelity="real", by="the kernel: PCIe remove, then rescan"),
    RackMechanism(kind="rnic.address", fidelity="real", by="the kernel of the host, as in a soft lab: ip address"),
    RackMechanism(kind="rnic.reset", fidelity="real", by="mlxlink: port state down, then up"),
    RackMechanism(
        kind="link.fec",
        fidelity="real",
        by="mlxlink: the receiver's sampling point (rx_error_injection), if the firmware has it; then a toggled port",
    ),
)
_NO_ERROR_INJECTION = (
    "the firmware does not give access to the receiver's sampling point (register PREI), so bit errors before FEC "
    "cannot be made at this port; there is no other means: use link.flap or link.rate, or another RNIC"
)
_USUAL_BER = 1e-5
"""A bit error rate before FEC that a port may have without a fault (`faultbed.testbed.preflight.rack_formats`)."""
_READ_APART_S = 30.0
"""Longest time from the baseline to the last reading of the counters, without the window itself."""


def _device(request: Request) -> str:
    """Return the PCI address of the target: mstflint knows devices by mlx5_N or by it, and hosts name them rocep24s0.

    Raises:
        UsageError: the target is no RNIC.
        Unsupported: the inventory has no PCI address for it.
    """
    rnic, (link, _) = request.target.rnic, link_of(request)
    if rnic is None:
        raise UsageError(f"{request.where}.target: {request.target.text} is not an RNIC; name one")
    if rnic.pcie is None:
        raise Unsupported(
            f"{request.where}.target: not supported on this lab: the inventory has no pcie for it, which mlxlink "
            f"needs; add it, or target its switch port: {link.a.node}:{request.target.node}:{rnic.name}"
        )
    return rnic.pcie


def _goes_down(device: str, instead: str) -> tuple[tuple[str, ...], str, str]:
    """Return the check that the firmware lets the port of a device go down, for `Commands.able`."""
    keeps = f"KEEP_ETH_LINK_UP_P{int(device.rpartition('.')[2]) + 1}"
    kept = f"the firmware keeps this port up; run `mlxconfig -d {device} set {keeps}=0` and reset the firmware{instead}"
    return ("{mlxconfig}", "-d", device, "-e", "query", keeps), port_down_pattern(keeps), kept


def _port(request: Request) -> Mechanism:
    device = _device(request)
    link, port = link_of(request)
    edges = flap_edges(request)
    flaps, host, switch = sum(bool(on) for _, on in edges), request.target.node, link.a
    require_phases(request, edges, _SHORTEST_S, why="mlxlink takes over 2 s to take a port down")
    commands = Commands(
        needs=("mlxlink|mstlink", "mlxconfig|mstconfig"),
        guard=port.netdev,
        device=device,
        able=(_LOCKDOWN, _goes_down(device, f", or target its switch port: {switch.node}:{host}:{link.rnic}")),
        on=(("{mlxlink}", "-d", device, "--port_state", "DN"),),
        off=(("{mlxlink}", "-d", device, "--port_state", "UP"),),
        look=("sh", "-c", f"{{mlxlink}} -d {shlex.quote(device)} | sed '{_COLOURLESS}'"),
        # "Physical state" does not help: for Ethernet it is the state of auto-negotiation, and a healthy port at
        # 400 Gb/s shows ETH_AN_FSM_ENABLE like one that is down (mstflint, mlxlink_maps.cpp; mlxlink_exporter).
        applied="^State +: *Disable",
        normal="^State +: *Active",
        # Any state but Disable, such as Polling; a message (-E- Failed to open device) or N/A is none.
        gone="^State +: *([^DN ]|N[^/])",
    )
    return by_commands(
        request,
        commands,
        node=host,
        claims=f"{host}/{link.rnic}/port",
        shows={"device": device},
        must_move=(Witness(any_of=(f"{switch.node}/{switch.netdev}.carrier_changes",), at_least=flaps),),
        restored=((f"{host}/{port.netdev}.carrier", 1),),
        edges=edges,
        quality=(f"{host}/{port.netdev}",),
    )


def _fec(request: Request) -> Mechanism:
    """Return the mechanism that moves the receiver's sampling point, and restores it.

    The witness is the port's own count of corrected bits. A healthy link has some, too, so it must be more than a link
    with a bit error rate of 1e-5 corrects in all the time between the two readings. Errors beyond FEC are no bystander:
    the port is toggled before the last reading, and a port that trains counts some. The rates afterwards are compared.
    """
    device, (link, port) = _device(request), link_of(request)
    host, speed_gbps = request.target.node, port.speed_gbps or link.a.speed_gbps
    if speed_gbps is None:
        raise Unsupported(
            f"{request.where}.target: not supported on this lab: the inventory has no speed_gbps for this link, and "
            "without it no number of corrected bits is unusual; add it"
        )
    require_phases(request, [[0.0, True]], _SHORTEST_S, why="a port counts its errors about once a second")
    offset, inject = request.spec.params["offset"], ("{mlxlink}", "-d", device, "--rx_error_injection")
    shown = f"{{mlxlink}} -d {shlex.quote(device)} --rx_error_injection --show_mixers_offset | sed '{_COLOURLESS}'"
    look, state = ("sh", "-c", shown), f"{host}/{port.netdev}"
    commands = Commands(
        needs=("mlxlink|mstlink", "mlxconfig|mstconfig"),
        guard=port.netdev,
        device=device,
        able=(
            _LOCKDOWN,
            (look, "^mixer_offset0 *: *0x", _NO_ERROR_INJECTION),
            _goes_down(device, ", because the port has to be toggled after this fault"),
        ),
        remember={
            name: (look, f"^mixer_offset{number} *: *(0x[0-9a-f]+)") for number, name in enumerate(("fine", "coarse"))
        },
        on=((*inject, "--mixer_offset0", f"{offset:#x}", "--yes"),),
        off=(
            (*inject, "--mixer_offset0", "{fine}", "--mixer_offset1", "{coarse}", "--yes"),
            ("{mlxlink}", "-d", device, "--port_state", "TG"),
        ),
        look=look,
        applied=f"^mixer_offset0 *: *{offset:#x} *$",
        normal="^mixer_offset0 *: *0x",
        gone="^mixer_offset0 *: *{fine} *$",
        settle_s=20.0,
    )
    usual = _USUAL_BER * speed_gbps * 1e9 * (request.spec.for_s + _READ_APART_S)
    return by_commands(
        request,
        commands,
        node=host,
        claims=f"{host}/{link.rnic}/port",
        shows={"device": device},
        must_move=(Witness(any_of=(f"{state}.{CORRECTED}",), at_least=round(usual)),),
        restored=((f"{state}.carrier", 1),),
        quality=(state,),
    )


def _remove(request: Request) -> Mechanism:
    rnic = request.target.rnic
    if rnic is None:
        raise UsageError(f"{request.where}.target: {request.target.text} is not an RNIC; name one")
    if rnic.pcie is None:
        raise Unsupported(
            f"{request.where}.target: not supported on this lab: the inventory has no pcie for it; add it"
        )
    host, device_path = request.target.node, f"{PCI}/devices/{rnic.pcie}"
    commands = Commands(
        guard=rnic.netdev,
        device=rnic.pcie,
        able=((("test", "-w", f"{PCI}/rescan"), "^", "the PCI bus cannot be rescanned; use an account with root"),),
        on=(("sh", "-c", f"echo 1 > {device_path}/remove"),),
        off=(("sh", "-c", f"[ -e {device_path} ] || echo 1 > {PCI}/rescan"),),
        look=("sh", "-c", f"[ -e {device_path} ] && echo present || echo absent"),
        applied="^absent$",
        normal="^present$",
        settle_s=20.0,
    )
    return by_commands(
        request,
        commands,
        node=host,
        claims=f"{host}/{rnic.pcie}",
        shows={"pcie": rnic.pcie},
        # The counters of the device go with it, and those of other hosts may move for other reasons.
        while_on=((f"{host}/{rnic.netdev}.carrier", None),),
    )


BY_KIND: Mapping[tuple[str, str], Callable[[Request], Mechanism]] = {
    ("link.down", "rnic"): _port,
    ("link.flap", "rnic"): _port,
    ("rnic.reset", "rnic"): _port,
    ("rnic.remove", "rnic"): _remove,
    ("rnic.address", "rnic"): soft_rnic.BY_KIND["rnic.address"],
    ("link.fec", "rnic"): _fec,
}
