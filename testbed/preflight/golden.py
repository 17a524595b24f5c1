"""Compare every host with the inventory's `faultbed_golden`: firmware, PCIe, GPU driver and VBIOS. Pure.

The check `firmware` (faultbed.testbed.preflight.rack_checks) finds hosts that differ from the others; this one finds a
lab that is wrong as a whole. Not yet run on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.inventory.schema import GoldenVars
from faultbed.testbed.preflight.collect import Facts
from faultbed.testbed.preflight.rack_formats import gpus, key_values

__all__ = ["problems", "undetermined"]

_Value = tuple[str, str, str | None, str]
"""Where, what, its value (None: unknown), and the golden value."""


def problems(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str, str]]:
    """Yield (where, observed, expected) for each difference from the golden values."""
    for where, quantity, value, expected in _compared(inventory, state):
        if value is not None and value != expected:
            yield where, f"{quantity} {value}", f"{expected} (faultbed_golden)"


def undetermined(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str]]:
    """Yield (where, why) for values without a golden value, and for values that a host does not report."""
    golden = inventory.golden
    if golden is None or golden == GoldenVars():
        yield inventory.name, "the inventory has no faultbed_golden to compare with"
        return
    for where, quantity, value, _ in _compared(inventory, state):
        if value is None:
            yield where, f"the host does not report its {quantity}"
    for where, board in _boards(inventory, state):
        if golden.rnic_firmware and board and board not in golden.rnic_firmware:
            yield where, f"faultbed_golden.rnic_firmware has no board {board}"


def _compared(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[_Value]:
    golden = inventory.golden
    if golden is None:
        return
    for host in inventory.topology.hosts:
        raw = state[host.name].raw
        for rnic in host.rnics:
            yield from _rnic(golden, f"{host.name}:{rnic.name}", raw, rnic.name)
        if golden.gpu_driver is None and golden.gpu_vbios is None:
            continue
        gpu_facts = gpus(raw.get("gpu", ""))
        if golden.gpu_driver is not None and host.gpus:
            yield host.name, "GPU driver", gpu_facts.driver, golden.gpu_driver
        if golden.gpu_vbios is not None and host.gpus:
            if not gpu_facts.gpus:
                yield host.name, "GPUs' VBIOS", None, ""
            for gpu in gpu_facts.gpus:
                yield f"{host.name}:{gpu.place}", "VBIOS", gpu.vbios, golden.gpu_vbios


def _rnic(golden: GoldenVars, where: str, raw: Mapping[str, str], name: str) -> Iterator[_Value]:
    board, version = _firmware(raw.get(f"firmware {name}", ""))
    if golden.rnic_firmware and not board:
        yield where, "board and firmware", None, ""
    elif board in golden.rnic_firmware:
        yield where, "firmware", version or None, golden.rnic_firmware[board]
    links = key_values(raw.get(f"pcie {name}", ""))
    if golden.pcie_speed_gts is not None:
        speed = links.get("current_link_speed", "").partition(" ")[0]
        have = f"{float(speed):g}" if _is_number(speed) else None
        yield where, "PCIe speed (GT/s)", have, f"{golden.pcie_speed_gts:g}"
    if golden.pcie_width is not None:
        yield where, "PCIe width", links.get("current_link_width"), str(golden.pcie_width)


def _boards(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str]]:
    for host in inventory.topology.hosts:
        for rnic in host.rnics:
            yield f"{host.name}:{rnic.name}", _firmware(state[host.name].raw.get(f"firmware {rnic.name}", ""))[0]


def _firmware(raw: str) -> tuple[str, str]:
    """Return board and version, from two lines."""
    board, _, version = raw.strip().partition("\n")
    return board.strip(), version.strip()


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
