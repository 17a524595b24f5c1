"""Look whether PCIe lets RNICs and GPUs reach each other directly: IOMMU, ACS, a way to GPU memory; turn ACS off.

ACS redirects peer-to-peer requests up to the root complex where these bits of its control register are set on a bridge
(PCI Express Base Specification, "Access Control Services"): it is read from the configuration space of each bridge
above a GPU or an RNIC, and written by setpci(8). What other bridges do is nothing to GPUDirect.

An RNIC reaches GPU memory by a dma-buf (Linux 5.12 or later, NVIDIA's open kernel modules), or by nvidia_peermem, which
needs MLNX_OFED or DOCA-OFED (NVIDIA's GPUDirect RDMA documentation). Setting ACS is not yet run on hardware.
"""

import os
import re

from faultbed_saved import SavedState
from faultbed_state import StateError, answer

GRUB = "/etc/default/grub.d/90-faultbed.cfg"
CMDLINE = "/proc/cmdline"
PCI = "/sys/bus/pci/devices"
MODULES = "/sys/module"
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
DRIVER = "/proc/driver/nvidia/version"
DMA_BUF_KERNEL = (5, 12)

_ACS_CAPABILITY, _ACS_CONTROL = 0x000D, 6
_REDIRECT = 0x04 | 0x08  # P2P request redirect, P2P completion redirect
_EXTENDED = 0x100


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_look, wanted, check=check)


def _look(wanted, changes):
    saved = SavedState("gpudirect_host", changes)
    if wanted["cmdline"] and os.path.isdir(os.path.dirname(GRUB)):
        text = f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {wanted["cmdline"]}"\n'
        saved.file(GRUB, text)
    real = [gpu for gpu in wanted["gpus"] if gpu["kind"] != "soft"]
    if not real:
        return {"notes": []}
    wrong, devices = [], [one["pcie"] for one in (*real, *wanted["rnics"]) if one.get("pcie")]
    if not devices:
        wrong.append("ACS was not looked at: the inventory has no pcie of GPUs or RNICs")
    for device, control in redirecting(PCI, devices):
        if wanted["acs_off"]:
            _let_through(saved, device, control)
        else:
            wrong.append(f"ACS redirects peers at {device}: set gpudirect_host_acs_off, or turn it off in the firmware")
    wrong += [
        f"the IOMMU translates for {device} ({kind}): boot with iommu=pt" for device, kind in translated(PCI, devices)
    ]
    if not any(os.path.isdir(f"{MODULES}/{name}") for name in PEER_MODULES) and not has_dma_buf(os.uname().release):
        wrong.append(
            "no way to GPU memory: load nvidia_peermem (it needs MLNX_OFED or DOCA-OFED), or install NVIDIA's open "
            "kernel modules on Linux 5.12 or later for dma-buf"
        )
    if wrong and wanted["strict"]:
        raise StateError("; ".join(wrong))
    return {"notes": wrong}


def redirecting(folder, devices):
    """Bridges above some devices whose ACS sends peers' requests up, sorted, each with its control register."""
    above = set()
    for device in devices:
        above |= set(os.path.realpath(f"{folder}/{device}").split("/")[:-1])
    bridges = []
    for device in sorted(above):
        if not os.path.isfile(f"{folder}/{device}/class"):
            continue  # a folder of sysfs that is no device, or the root
        with open(f"{folder}/{device}/class", encoding="ascii") as file:
            if not file.read().startswith("0x0604"):  # PCI-to-PCI bridge
                continue
        with open(f"{folder}/{device}/config", "rb") as file:
            control = acs_control(file.read())
        if control & _REDIRECT:
            bridges.append((device, control))
    return bridges


def _let_through(saved, device, control):
    """A restart forgets it. The other bits (source validation, translation blocking) stay."""
    want = control & ~_REDIRECT
    do, undo = (["setpci", "-s", device, f"ECAP_ACS+{_ACS_CONTROL}.w={value:04x}"] for value in (want, control))
    saved.command(f"{device} ACS", have=f"{control:04x}", want=f"{want:04x}", do=do, undo=undo)


def has_dma_buf(release):
    """Whether GPU memory can be given to an RNIC as a dma-buf, by the kernel's release and the driver's own words."""
    try:
        with open(DRIVER, encoding="utf-8") as file:
            is_open = "Open Kernel Module" in file.read()
    except FileNotFoundError:
        return False
    number = re.match(r"(\d+)\.(\d+)", release)
    return is_open and number is not None and (int(number[1]), int(number[2])) >= DMA_BUF_KERNEL


def acs_control(config):
    """The ACS control register of a configuration space; 0 where there is none (or it could not be read whole)."""
    at, seen = _EXTENDED, set()
    while at and at not in seen and at + 8 <= len(config):
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS_CAPABILITY:
            return int.from_bytes(config[at + _ACS_CONTROL : at + _ACS_CONTROL + 2], "little")
        at = header >> 20
    return 0


def translated(folder, devices):
    """Devices whose requests an IOMMU translates, each with the type of its domain as the kernel reports it.

    The command line is not enough: a kernel may be built to pass through (CONFIG_IOMMU_DEFAULT_PASSTHROUGH), and a
    domain can be changed at run time. Linux before 5.11 reports no type, and only there the command line decides
    (Documentation/ABI/testing/sysfs-kernel-iommu_groups). A device without a group is behind no IOMMU.
    """
    for device in devices:
        group = f"{folder}/{device}/iommu_group"
        if not os.path.isdir(group):
            continue
        kind = "type unknown"
        if os.path.isfile(f"{group}/type"):
            with open(f"{group}/type", encoding="ascii") as file:
                kind = file.read().strip()
        elif _passes_through():
            continue
        if kind != "identity":
            yield device, kind


def _passes_through():
    with open(CMDLINE, encoding="ascii") as file:
        words = file.read().split()
    passing = ("iommu=pt", "iommu=off", "intel_iommu=off", "amd_iommu=off", "iommu.passthrough=1")
    return any(word in words for word in passing)
