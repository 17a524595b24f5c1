"""Check this machine for problems before they happen. Reads only; changes nothing."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from faultbed.testbed.backends.lab_backend import DoctorFinding, backend_of
from faultbed.testbed.backends.soft import accel, capacity, image
from faultbed.testbed.directories import cache_dir, home_dir, lab_dir
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.tenancy import dirty

__all__ = ["DoctorFinding", "examine"]

_TOOLS = (
    ("qemu-system-x86_64", "qemu-system-x86", "runs the VMs"),
    ("qemu-img", "qemu-utils", "makes their disks"),
    ("mmdebstrap", "mmdebstrap", "builds the VM image"),
    ("mke2fs", "e2fsprogs", "builds the VM image"),
    ("zstd", "zstd", "unpacks the guest kernel"),
    ("xz", "xz-utils", "unpacks the guest kernel's modules"),
    ("ssh", "openssh-client", "carries Ansible"),
    ("ansible-playbook", "", "provisions the lab; it is in the virtual environment"),
)
_STATE_MIB = 1500


def examine(inventory: Inventory) -> list[DoctorFinding]:
    """Check everything that `up` and `run` need for this lab."""
    findings = [_tool(*tool) for tool in _TOOLS]
    findings += [_memory(inventory), *_disks(), _image(), _accelerator(), _cores()]
    return findings + backend_of(inventory.kind).examine(inventory) + _marks(inventory)


def _tool(name: str, package: str, purpose: str) -> DoctorFinding:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    if path := shutil.which(name, path=places):
        return DoctorFinding(what=name, state="ok", found=path)
    advice = f"`apt-get install {package}`" if package else "install faultbed again (`make setup`)"
    return DoctorFinding(what=name, state="bad", found=f"missing; it {purpose}", advice=advice)


def _memory(inventory: Inventory) -> DoctorFinding:
    needed, available = backend_of(inventory.kind).needed_mib(inventory), capacity.available_mib()
    memory = f"{available} MiB available, {inventory.name} needs {needed}"
    if available >= needed or backend_of(inventory.kind).is_up(inventory):
        return DoctorFinding(what="memory", state="ok", found=memory)
    return DoctorFinding(
        what="memory",
        state="bad",
        found=memory,
        advice="close other programs, or use a smaller lab: `--lab soft-mini`",
    )


def _disks() -> list[DoctorFinding]:
    space_by_use = {
        "disk for images": (cache_dir(), 0 if image.cached() else image.NEEDED_MIB, "FAULTBED_CACHE"),
        "disk for labs": (home_dir(), _STATE_MIB, "FAULTBED_HOME"),
        "disk for the build": (Path(tempfile.gettempdir()), 0 if image.cached() else image.NEEDED_MIB, "TMPDIR"),
    }
    findings = []
    for check, (folder, needed, variable) in space_by_use.items():
        folder_or_parent = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(folder_or_parent).free // 2**20
        if not os.access(folder_or_parent, os.W_OK):
            findings.append(
                DoctorFinding(
                    what=check, state="bad", found=f"cannot write in {folder_or_parent}", advice=f"set {variable}"
                )
            )
        elif free < needed:
            findings.append(
                DoctorFinding(
                    what=check,
                    state="bad",
                    found=f"{free} MiB free in {folder_or_parent}, {needed} needed",
                    advice=f"free disk space, or set {variable} to a larger disk",
                )
            )
        else:
            findings.append(DoctorFinding(what=check, state="ok", found=f"{free} MiB free in {folder_or_parent}"))
    return findings


def _image() -> DoctorFinding:
    built = image.cached()
    if built:
        return DoctorFinding(what="VM image", state="ok", found=f"{built.digest}, Linux {built.kernel_version}")
    return DoctorFinding(
        what="VM image", state="note", found="not built yet; `faultbed up` builds it in about a minute"
    )


def _accelerator() -> DoctorFinding:
    remembered = accel.remembered(image.cached())
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return DoctorFinding(
            what="KVM",
            state="note",
            found="no usable /dev/kvm: VMs are emulated (TCG), which is slower and supports everything",
        )
    if remembered is None:
        return DoctorFinding(what="KVM", state="note", found="/dev/kvm opens; `faultbed up` verifies it with a boot")
    if remembered:
        return DoctorFinding(what="KVM", state="ok", found="a guest has booted with it")
    return DoctorFinding(what="KVM", state="note", found="a guest does not boot with it here: VMs are emulated (TCG)")


def _cores() -> DoctorFinding:
    cores = os.cpu_count() or 1
    if cores >= 2:  # noqa: PLR2004 (the number with which the default lab was measured)
        return DoctorFinding(what="cores", state="ok", found=f"{cores}")
    return DoctorFinding(what="cores", state="note", found="1: everything works, but slowly; use `--lab soft-mini`")


def _marks(inventory: Inventory) -> list[DoctorFinding]:
    """Report why the lab is DIRTY, and which commands were killed before they compared it."""
    folder = lab_dir(inventory.name)
    findings = [
        DoctorFinding(what="unfinished", state="note", found=sentence, advice="`faultbed heal` compares it now")
        for sentence in dirty.unfinished(folder)
    ]
    if marked := dirty.reasons(folder):
        advice = "`faultbed heal`, or on a soft lab `faultbed reset`"
        findings.append(DoctorFinding(what="DIRTY", state="note", found="; ".join(marked), advice=advice))
    return findings
