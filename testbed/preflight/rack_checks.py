"""Checks that only hardware can answer. Not yet run on hardware; their readers are tested with recorded output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from testbed.inventory import Inventory
from testbed.preflight.checks import Check, State
from testbed.preflight.rack_formats import (
    chrony_offset_s,
    gpu_wrong,
    gpus,
    key_values,
    link_wrong,
    pcie_wrong,
    qos,
    qos_wrong,
)

__all__ = ["RACK_CHECKS"]

CLOCK_BOUND_S = 0.001


def _pcie(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for where, raw in _of_rnics(inventory, state, "pcie"):
        for found, wanted in pcie_wrong(key_values(raw)):
            yield where, found, wanted


def _link_quality(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for where, raw in _of_rnics(inventory, state, "mlxlink"):
        for found, wanted in link_wrong(key_values(raw)):
            yield where, found, wanted


def _firmware(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    """RNICs of one board run one firmware; which one is right, the most frequent says."""
    versions: dict[str, dict[str, str]] = {}
    for where, raw in _of_rnics(inventory, state, "firmware"):
        board, _, version = raw.strip().partition("\n")
        if not version.strip():
            yield where, "board and firmware cannot be read", "both in /sys/class/infiniband"
            continue
        versions.setdefault(board.strip(), {})[where] = version.strip()
    for board, by_rnic in versions.items():
        usual = Counter(by_rnic.values()).most_common(1)[0][0]
        for where, version in by_rnic.items():
            if version != usual:
                yield where, f"firmware {version}", f"{usual}, as the other {board}"


def _gpus(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for host in inventory.topology.hosts:
        found = gpus(state[host.name].raw.get("gpu", ""))
        if len(found) != len(host.gpus):
            yield host.name, f"{len(found)} GPUs answer", str(len(host.gpus))
        for gpu in found:
            for what, wanted in gpu_wrong(gpu):
                yield f"{host.name}:gpu{gpu.index} ({gpu.bus_id})", what, wanted


def _time(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for host in inventory.topology.hosts:
        offset_s = chrony_offset_s(state[host.name].raw.get("chrony", ""))
        if offset_s is None:
            yield host.name, "chrony is not there, or not synchronised", f"within {CLOCK_BOUND_S:g} s"
        elif offset_s > CLOCK_BOUND_S:
            yield host.name, f"{offset_s:g} s from its source", f"within {CLOCK_BOUND_S:g} s"


def _qos(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    profile = inventory.qos
    if profile is None:
        return
    for where, raw in _of_rnics(inventory, state, "qos"):
        have = qos(raw)
        for found, wanted in qos_wrong(
            have, trust=profile.trust, pfc=profile.pfc_priorities, priority=inventory.priority_of_dscp
        ):
            yield where, found, wanted


def _of_rnics(inventory: Inventory, state: State, tool: str) -> Iterator[tuple[str, str]]:
    """What a tool said of each RNIC, as (where, text)."""
    for host in inventory.topology.hosts:
        for rnic in host.rnics:
            yield f"{host.name}:{rnic.name}", state[host.name].raw.get(f"{tool} {rnic.name}", "")


RACK_CHECKS: tuple[Check, ...] = (
    Check(
        name="pcie",
        how="current_link_* and max_link_* of each RNIC in sysfs",
        right="as fast and as wide as both ends can",
        do="reseat the card; look at the slot's bifurcation in the BIOS",
        wrong=_pcie,
        labs=("rack",),
    ),
    Check(
        name="link-quality",
        how="`mlxlink -d RNIC -c`",
        right="active, with FEC, errors before FEC well below what it can correct, none after it",
        do="clean or replace the optics or the cable; both ends must have the same FEC",
        wrong=_link_quality,
        labs=("rack",),
    ),
    Check(
        name="qos",
        how="`mlnx_qos -i NETDEV`",
        right="trust, PFC and DSCP map as in the lab's faultbed_qos and faultbed_dscp_map",
        do="set what differs: one RNIC with another map pauses the wrong class of the whole lab",
        wrong=_qos,
        labs=("rack",),
    ),
    Check(
        name="firmware",
        how="board_id and fw_ver of each RNIC in sysfs",
        right="one version for all RNICs of one board",
        do="bring the odd ones to the others' version",
        wrong=_firmware,
        labs=("rack",),
    ),
    Check(
        name="gpu",
        how="`nvidia-smi --query-gpu`",
        right="all GPUs answer, unthrottled, without uncorrected ECC errors, at full PCIe width, persistence on",
        do="look at power and cooling; after an ECC error reset the GPU or take the host out",
        wrong=_gpus,
        labs=("rack",),
    ),
    Check(
        name="time",
        how="`chronyc -c tracking`",
        right="synchronised, within 1 ms of its source",
        do="look at `chronyc sources`; racks with PTP: at phc2sys",
        wrong=_time,
        labs=("rack",),
    ),
)
