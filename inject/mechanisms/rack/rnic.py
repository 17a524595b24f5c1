"""RNICs of hosts: the port by `mlxlink`, the device by PCIe. Not yet run on hardware.

`mlxlink --port_state DN|UP` is of NVIDIA's firmware tools (MFT, "mlxlink Utility"); `remove` and `rescan` are the
kernel's (Documentation/ABI/testing/sysfs-bus-pci). A device that is removed loses its configuration: preflight, or the
roles, have the last word after it is back.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from inject.mechanisms.mechanism import Request, Shot, Witness, link_of, trains
from inject.mechanisms.rack.rack_mechanism import PCI, Commands, Way, commanded, retries
from testbed.errors import Unsupported, UsageError

__all__ = ["BY_KIND", "WAYS"]

_COLOURLESS = r"s/\x1b\[[0-9;]*m//g"
"""For sed: mlxlink colours its values in a pipe, too (mstflint, mlxlink/modules/printutil)."""
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
    device = rnic.pcie or rnic.name
    commands = Commands(
        needs=("mlxlink",),
        guard=port.netdev,
        device=rnic.pcie,
        on=(("mlxlink", "-d", device, "--port_state", "DN"),),
        off=(("mlxlink", "-d", device, "--port_state", "UP"),),
        look=("sh", "-c", f"mlxlink -d {shlex.quote(device)} | sed '{_COLOURLESS}'"),
        applied="^Physical state +: *Disabled",
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
