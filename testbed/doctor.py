"""Check this machine for problems before they happen. Reads only; changes nothing."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from testbed.backends.soft import accel, capacity, image, lifecycle
from testbed.directories import SOCKET_PATH_MAX, cache_dir, home_dir, lab_dir
from testbed.inventory.lab_inventory import Inventory
from testbed.tenancy import dirty

__all__ = ["Finding", "examine"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: `ok`, `note` (works, with a remark) or `bad` (will not work), with what to do."""

    what: str
    state: Literal["ok", "note", "bad"]
    found: str
    advice: str = ""


def examine(inventory: Inventory) -> list[Finding]:
    """Check everything that `up` and `run` need for this lab."""
    findings = [_tool(*tool) for tool in _TOOLS]
    findings += [_memory(inventory), *_disks(), _image(), _accelerator(), _cores()]
    if inventory.kind == "soft":
        findings += [_sockets(inventory), _lab(inventory)]
    return findings + _marks(inventory)


def _tool(name: str, package: str, purpose: str) -> Finding:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    if found := shutil.which(name, path=places):
        return Finding(what=name, state="ok", found=found)
    advice = f"`apt-get install {package}`" if package else "install faultbed again (`make setup`)"
    return Finding(what=name, state="bad", found=f"missing; it {purpose}", advice=advice)


def _memory(inventory: Inventory) -> Finding:
    needed = capacity.needed_mib(inventory) if inventory.kind == "soft" else 0
    available = capacity.available_mib()
    running = inventory.kind == "soft" and lifecycle.status(inventory).state == "up"
    if available >= needed or running:
        return Finding(what="memory", state="ok", found=f"{available} MiB available, {inventory.name} needs {needed}")
    return Finding(
        what="memory",
        state="bad",
        found=f"{available} MiB available, {inventory.name} needs {needed}",
        advice="close other programs, or use a smaller lab: `--lab soft-mini`",
    )


def _disks() -> list[Finding]:
    wanted = {
        "disk for images": (cache_dir(), 0 if image.find() else image.NEEDED_MIB, "FAULTBED_CACHE"),
        "disk for labs": (home_dir(), _STATE_MIB, "FAULTBED_HOME"),
        "disk for building": (Path(tempfile.gettempdir()), 0 if image.find() else image.NEEDED_MIB, "TMPDIR"),
    }
    findings = []
    for what, (folder, needed, variable) in wanted.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free // 2**20
        if not os.access(there, os.W_OK):
            findings.append(Finding(what=what, state="bad", found=f"cannot write in {there}", advice=f"set {variable}"))
        elif free < needed:
            findings.append(
                Finding(
                    what=what,
                    state="bad",
                    found=f"{free} MiB free in {there}, {needed} needed",
                    advice=f"free disk space, or set {variable} to a larger disk",
                )
            )
        else:
            findings.append(Finding(what=what, state="ok", found=f"{free} MiB free in {there}"))
    return findings


def _image() -> Finding:
    found = image.find()
    if found:
        return Finding(what="VM image", state="ok", found=f"{found.digest}, Linux {found.kernel_version}")
    return Finding(what="VM image", state="note", found="not built yet; `faultbed up` builds it in about a minute")


def _accelerator() -> Finding:
    remembered = accel.remembered(image.find())
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return Finding(
            what="KVM",
            state="note",
            found="no usable /dev/kvm: VMs are emulated (TCG), slower but with all functions",
        )
    if remembered is None:
        return Finding(what="KVM", state="note", found="/dev/kvm opens; `faultbed up` verifies it with a boot")
    if remembered:
        return Finding(what="KVM", state="ok", found="a guest has booted with it")
    return Finding(what="KVM", state="note", found="a guest does not boot with it here: VMs are emulated (TCG)")


def _cores() -> Finding:
    cores = os.cpu_count() or 1
    if cores >= 2:  # noqa: PLR2004 (the number with which the default lab was measured)
        return Finding(what="cores", state="ok", found=f"{cores}")
    return Finding(what="cores", state="note", found="1: everything works, but slowly; use `--lab soft-mini`")


def _sockets(inventory: Inventory) -> Finding:
    longest = max(len(os.fsencode(path)) for path in lifecycle.socket_paths(inventory))
    if longest <= SOCKET_PATH_MAX:
        return Finding(what="socket paths", state="ok", found=f"{longest} of {SOCKET_PATH_MAX} bytes")
    return Finding(
        what="socket paths",
        state="bad",
        found=f"{longest} bytes, the limit of unix sockets is {SOCKET_PATH_MAX}",
        advice="give the hosts and RNICs of the inventory shorter names",
    )


def _lab(inventory: Inventory) -> Finding:
    now = lifecycle.status(inventory)
    if now.state == "broken":
        dead = ", ".join(vm.name for vm in now.vms if not vm.ssh)
        return Finding(
            what=f"lab {now.name}",
            state="bad",
            found=f"broken: {dead} do not answer",
            advice="`faultbed down`, then `faultbed up`",
        )
    return Finding(what=f"lab {now.name}", state="ok", found=now.state)


def _marks(inventory: Inventory) -> list[Finding]:
    """Report why the lab is DIRTY, and which commands were killed before they compared it."""
    folder = lab_dir(inventory.name)
    findings = [
        Finding(what="unfinished", state="note", found=sentence, advice="`faultbed heal` compares it now")
        for sentence in dirty.unfinished(folder)
    ]
    if marked := dirty.reasons(folder):
        advice = "`faultbed heal`, or on a soft lab `faultbed reset`"
        findings.append(Finding(what="DIRTY", state="note", found="; ".join(marked), advice=advice))
    return findings
