"""Look whether PCIe lets RNICs and GPUs reach each other directly: IOMMU, ACS, the peer memory module.

ACS redirects peer-to-peer requests up to the root complex where these bits of its control register are set on a bridge
(PCI Express Base Specification, "Access Control Services"): it is read from each bridge's configuration space.
"""

import os

from faultbed_found import Found
from faultbed_state import StateError, answer

GRUB = "/etc/default/grub.d/90-faultbed.cfg"
IOMMU = "/sys/class/iommu"
PCI = "/sys/bus/pci/devices"
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")

_ACS_CAPABILITY, _ACS_CONTROL = 0x000D, 6
_REDIRECT = 0x04 | 0x08  # P2P request redirect, P2P completion redirect
_EXTENDED = 0x100


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_look, wanted, check=check)


def _look(wanted, changes):
    if wanted["cmdline"] and os.path.isdir(os.path.dirname(GRUB)):
        text = f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {wanted["cmdline"]}"\n'
        Found("gpudirect_host", changes).file(GRUB, text)
    real = [gpu for gpu in wanted["gpus"] if gpu["kind"] != "soft"]
    wrong = [f"ACS redirects peers at {device}" for device in bridges_that_redirect(PCI)]
    if real and os.path.isdir(IOMMU) and os.listdir(IOMMU) and not _passes_through():
        wrong.append("the IOMMU translates: boot with iommu=pt")
    if real and not any(os.path.isdir(f"/sys/module/{name}") for name in PEER_MODULES):
        wrong.append("no nvidia_peermem: modprobe it, or install the driver with it")
    if real and wrong and wanted["strict"]:
        raise StateError("; ".join(wrong))
    return {"notes": wrong}


def bridges_that_redirect(folder):
    """PCI bridges whose ACS sends peers' requests up, sorted."""
    found = []
    for device in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        with open(f"{folder}/{device}/class", encoding="ascii") as file:
            if not file.read().startswith("0x0604"):  # PCI-to-PCI bridge
                continue
        with open(f"{folder}/{device}/config", "rb") as file:
            if acs_control(file.read()) & _REDIRECT:
                found.append(device)
    return found


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


def _passes_through():
    with open("/proc/cmdline", encoding="ascii") as file:
        words = file.read().split()
    return any(word in words for word in ("iommu=pt", "iommu=off", "intel_iommu=off", "amd_iommu=off"))
