"""Install the RDMA stack by apt, from the distribution or from a DOCA-OFED mirror, and save how to remove it.

apt reports what it would do before it does it (`apt-get -s`, apt-get(8)). A teardown removes the packages that were
installed and restores the old version of those that were upgraded or removed. Not yet run on hardware.

Since DOCA 3.2 the drivers are source packages, which DKMS builds for the running kernel. Without that kernel's headers
apt succeeds and no driver exists: the role installs the headers too and checks the result by `dkms status`. If Secure
Boot is on, the kernel loads modules from DKMS only after DKMS's key is enrolled (dkms(8), mokutil(1)).
"""

import base64
import os
import re
import shutil

from faultbed_saved import SavedState
from faultbed_saved import run as run_long
from faultbed_state import StateError, answer, run

SOURCE = "/etc/apt/sources.list.d/faultbed-doca.sources"
KEY = "/etc/apt/keyrings/faultbed-doca.asc"
APT = [
    "env",
    "LC_ALL=C",
    "DEBIAN_FRONTEND=noninteractive",
    "apt-get",
    "-y",
    "-o",
    "Dpkg::Options::=--force-confold",
    "-o",
    "DPkg::Lock::Timeout=300",
]
ENROL = (
    "Secure Boot is on: the new drivers load only after DKMS's key is enrolled; run `mokutil --import "
    "/var/lib/dkms/mok.pub` and confirm the key at the console during the next boot"
)
INSTALL = ["install", "--no-install-recommends"]


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    flavour = desired["flavour"]
    if flavour == "none":
        return None
    if flavour not in ("inbox", "doca"):
        raise StateError(f"rdma_stack_flavour: {flavour!r} is no flavour; set inbox, doca or none")
    saved = SavedState("rdma_stack", changes)
    if flavour == "doca":
        for path, text in source(desired["mirror"], desired.get("files", {}).get("key", "")).items():
            saved.file(path, text)
    if not shutil.which("dpkg-query"):
        raise StateError(
            "rdma_stack: this machine has no dpkg; install the RDMA stack by hand and set rdma_stack_flavour to none"
        )
    missing = not_installed(desired["packages"] if flavour == "inbox" else desired["doca_packages"])
    if missing and changes.check:
        changes.should_make(f"{_description(missing)}: installed (was absent)")
    elif missing:
        return {"notes": _install(saved, missing, replace=desired["replace"])}
    return None


def _install(saved, missing, *, replace):
    """Install packages and return notes for the user.

    Raises:
        StateError: apt would replace packages without permission, or packages or drivers are missing afterwards.
    """
    run_long([*APT, "update"])
    plan = parse_simulation(run([*APT, "-s", *INSTALL, *missing]))
    has_dkms = any(name.endswith("-dkms") for name in plan)
    kernel = os.uname().release
    if has_dkms and not_installed([f"linux-headers-{kernel}"]):
        missing = [*missing, f"linux-headers-{kernel}"]
        plan = parse_simulation(run([*APT, "-s", *INSTALL, *missing]))
    replaced = sorted(name for name, old_version in plan.items() if old_version)
    if replaced and not replace:
        names = ", ".join(replaced)
        raise StateError(
            f"apt would upgrade or remove {names}: allow it by setting rdma_stack_replace, or install by hand"
        )
    saved.command(
        _description(missing),
        current="absent",
        desired="installed",
        do=[*APT, *INSTALL, *missing],
        undo=undo(plan),
    )
    if absent := not_installed(missing):
        raise StateError(f"{', '.join(absent)}: not installed although apt-get succeeded; install by hand")
    if not has_dkms:
        return []
    if problem := dkms_problem(run(["dkms", "status", "-k", kernel])):
        raise StateError(f"drivers not built for kernel {kernel}: {problem}; see /var/lib/dkms/*/*/build/make.log")
    return _secure_boot_notes()


def dkms_problem(output):
    """Return the lines of `dkms status` for modules that are not installed; empty: all are installed.

    A line is `mlnx-ofed-kernel/25.10, 6.8.0-60-generic, x86_64: installed`. A remark in brackets follows if the kernel
    itself has a module of that name.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return "DKMS has no module"
    return "; ".join(line for line in lines if not line.rpartition(": ")[2].startswith("installed"))


def _secure_boot_notes():
    if shutil.which("mokutil") and "SecureBoot enabled" in run(["mokutil", "--sb-state"], ok=(0, 1, 255)):
        return [ENROL]
    return []


def _description(packages):
    return f"packages {', '.join(packages)}"


def source(mirror, key):
    """Return the files that add the mirror to apt (sources.list(5), deb822) with its key: path -> text.

    `key` is the armoured public key in base64.

    Raises:
        StateError: the mirror or the key is missing, or `key` is not an armoured public key.
    """
    if not mirror or not key:
        raise StateError("rdma_stack_flavour doca needs rdma_stack_doca_mirror and rdma_stack_doca_key")
    text = base64.b64decode(key).decode("ascii", errors="replace")
    if "BEGIN PGP PUBLIC KEY BLOCK" not in text:
        raise StateError("rdma_stack_doca_key: no armoured public key; export it with `gpg --armor --export`")
    return {KEY: text, SOURCE: f"Types: deb\nURIs: {mirror}\nSuites: ./\nSigned-By: {KEY}\n"}


def not_installed(packages):
    """Return the packages that dpkg-query does not report as installed, in the given order."""
    output = run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *packages], ok=(0, 1))
    installed = {line.split()[0] for line in output.splitlines() if line.endswith(" installed")}
    return [name for name in packages if name not in installed]


def parse_simulation(output):
    """Return the packages that `apt-get -s` would change: package -> installed version, or None if not installed."""
    plan = {}
    for line in output.splitlines():
        if action := re.match(r"(Inst|Remv) (\S+)(?: \[([^]]+)\])?", line):
            plan[action[2]] = action[3]
    return plan


def undo(plan):
    """Return the apt command that reverts a plan of `parse_simulation`: it restores old versions, removes the rest."""
    words = [f"{name}={old_version}" if old_version else f"{name}-" for name, old_version in sorted(plan.items())]
    return [*APT, "--allow-downgrades", "--purge", *INSTALL, *words]
