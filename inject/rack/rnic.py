"""RNICs of hosts: the port by `mlxlink`, the device by PCIe. Not yet run on hardware.

`mlxlink --port_state DN|UP` is of NVIDIA's firmware tools (MFT, "mlxlink Utility"); `remove` and `rescan` are the
kernel's (Documentation/ABI/testing/sysfs-bus-pci). A device that is removed loses its configuration: preflight, or the
roles, have the last word after it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inject.aim.shot import Request, Shot, Witness, link_of, trains
from inject.rack.way import Commands, Way, commanded, retries
from testbed.errors import Unsupported, UsageError

__all__ = ["BY_KIND", "WAYS", "removed"]

WAYS = (
    Way(kind="rnic.remove", fidelity="real", by="the kernel: PCIe remove, then rescan"),
    Way(kind="rnic.reset", fidelity="real", by="mlxlink: port state down, then up"),
)
_SYS = "/sys/bus/pci"


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
        look=("mlxlink", "-d", device),
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
    witness = Witness(any_of=retries(asked.topology, "completer_retry_err", but=asked.target.node))
    return removed(asked, rnic.pcie, guard=rnic.netdev, must_move=(witness,))


def removed(asked: Request, pcie: str | None, *, guard: str | None, must_move: tuple[Witness, ...]) -> Shot:
    """A PCIe device that is taken from its bus, and found again by a rescan of all of them.

    Raises:
        Unsupported: the inventory does not say where it is.
    """
    if pcie is None:
        raise Unsupported(f"{asked.where}.target: not supported on this lab: the inventory has no pcie of it")
    host = asked.target.node
    commands = Commands(
        guard=guard,
        device=pcie,
        able=(((("test", "-w", f"{_SYS}/rescan")), "^", "the PCI bus cannot be rescanned"),),
        on=(("sh", "-c", f"echo 1 > {_SYS}/devices/{pcie}/remove"),),
        off=(("sh", "-c", f"[ -e {_SYS}/devices/{pcie} ] || echo 1 > {_SYS}/rescan"),),
        look=("sh", "-c", f"[ -e {_SYS}/devices/{pcie} ] && echo present || echo absent"),
        applied="^absent$",
        normal="^present$",
        settle_s=20.0,
    )
    shows = {"pcie": pcie}
    return commanded(asked, commands, node=host, claims=f"{host}/{pcie}", shows=shows, must_move=must_move)


BY_KIND: Mapping[tuple[str, str], Callable[[Request], Shot]] = {
    ("link.down", "rnic"): _port,
    ("link.flap", "rnic"): _port,
    ("rnic.reset", "rnic"): _port,
    ("rnic.remove", "rnic"): _remove,
}
