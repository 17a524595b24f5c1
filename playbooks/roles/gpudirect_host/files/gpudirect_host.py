"""Check that PCIe lets RNICs and GPUs reach each other directly (IOMMU, ACS, GPU memory), and turn ACS redirection off.

A bridge whose ACS control register has the redirect bits set sends peer-to-peer requests up to the root complex (PCI
Express Base Specification, "Access Control Services"). The register is read from the configuration space of each bridge
above a GPU or an RNIC of the inventory, and written by setpci(8). Other bridges do not affect GPUDirect.

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
_BRIDGE_CLASS = "0x0604"  # PCI-to-PCI bridge


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    saved = SavedState("gpudirect_host", changes)
    if desired["cmdline"] and os.path.isdir(os.path.dirname(GRUB)):
        text = f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {desired["cmdline"]}"\n'
        saved.file(GRUB, text)
    real_gpus = [gpu for gpu in desired["gpus"] if gpu["kind"] != "soft"]
    if not real_gpus:
        return {"notes": []}
    problems = []
    addresses = [device["pcie"] for device in (*real_gpus, *desired["rnics"]) if device.get("pcie")]
    if not addresses:
        problems.append("ACS was not checked: the inventory has no pcie of GPUs or RNICs")
    for bridge, control in redirecting(PCI, addresses):
        if desired["acs_off"]:
            _turn_redirection_off(saved, bridge, control)
        else:
            problems.append(
                f"ACS redirects peers at {bridge}: set gpudirect_host_acs_off, or turn it off in the firmware"
            )
    problems += [
        f"the IOMMU translates for {device} ({kind}): boot with iommu=pt" for device, kind in translated(PCI, addresses)
    ]
    if not any(os.path.isdir(f"{MODULES}/{name}") for name in PEER_MODULES) and not has_dma_buf(os.uname().release):
        problems.append(
            "RNICs cannot reach GPU memory: load nvidia_peermem (it needs MLNX_OFED or DOCA-OFED), or install NVIDIA's "
            "open kernel modules on Linux 5.12 or later for dma-buf"
        )
    if problems and desired["strict"]:
        raise StateError("; ".join(problems))
    return {"notes": problems}


def redirecting(folder, devices):
    """Return the bridges above some devices whose ACS redirects: (PCI address, control register), sorted by address."""
    ancestors = set()
    for device in devices:
        ancestors |= set(os.path.realpath(f"{folder}/{device}").split("/")[:-1])
    bridges = []
    for device in sorted(ancestors):
        if not os.path.isfile(f"{folder}/{device}/class"):
            continue  # not a device, or the root complex
        with open(f"{folder}/{device}/class", encoding="ascii") as file:
            if not file.read().startswith(_BRIDGE_CLASS):
                continue
        with open(f"{folder}/{device}/config", "rb") as file:
            control = acs_control(file.read())
        if control & _REDIRECT:
            bridges.append((device, control))
    return bridges


def _turn_redirection_off(saved, bridge, control):
    """Clear the redirect bits of a bridge until the next boot. Source validation and translation blocking stay."""
    desired = control & ~_REDIRECT
    do, undo = (["setpci", "-s", bridge, f"ECAP_ACS+{_ACS_CONTROL}.w={value:04x}"] for value in (desired, control))
    saved.command(f"{bridge} ACS", current=f"{control:04x}", desired=f"{desired:04x}", do=do, undo=undo)


def has_dma_buf(release):
    """Return whether an RNIC can access GPU memory as a dma-buf, by the kernel's release and NVIDIA's driver."""
    try:
        with open(DRIVER, encoding="utf-8") as file:
            is_open = "Open Kernel Module" in file.read()
    except FileNotFoundError:
        return False
    number = re.match(r"(\d+)\.(\d+)", release)
    return is_open and number is not None and (int(number[1]), int(number[2])) >= DMA_BUF_KERNEL


def acs_control(config):
    """Return the ACS control register in a configuration space (bytes); 0: no ACS, or the space is incomplete."""
    offset, visited = _EXTENDED, set()
    while offset and offset not in visited and offset + 8 <= len(config):
        visited.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS_CAPABILITY:
            return int.from_bytes(config[offset + _ACS_CONTROL : offset + _ACS_CONTROL + 2], "little")
        offset = header >> 20
    return 0


def translated(folder, devices):
    """Yield the devices whose requests an IOMMU translates, each with the kernel's name of its domain's type.

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
    """Return whether the kernel's command line turns the IOMMU's translation off."""
    with open(CMDLINE, encoding="ascii") as file:
        words = file.read().split()
    options = ("iommu=pt", "iommu=off", "intel_iommu=off", "amd_iommu=off", "iommu.passthrough=1")
    return any(word in words for word in options)
