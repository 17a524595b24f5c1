"""Install the RDMA stack by apt: the distribution's, or DOCA-OFED's from a mirror; write down how to take it back.

What apt would do is asked of apt (`apt-get -s`, apt-get(8)) before it does it: what it would install is removed by a
teardown, what it would upgrade or remove is returned in its old version. Not yet run on hardware.

From DOCA 3.2 on its drivers are source, which DKMS builds for the kernel that runs: without the kernel's headers the
packages install well and there is no driver. The headers are installed with them, and `dkms status` has the last word.
Where Secure Boot is on, the kernel loads what DKMS has built only when its key is enrolled (dkms(8), mokutil(1)).
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
    "Secure Boot is on: the new drivers load only when DKMS' key is enrolled: `mokutil --import "
    "/var/lib/dkms/mok.pub`, then confirm it at the console during the next boot"
)
INSTALL = ["install", "--no-install-recommends"]


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    flavour = wanted["flavour"]
    if flavour == "none":
        return None
    if flavour not in ("inbox", "doca"):
        raise StateError(f"rdma_stack_flavour is {flavour!r}: say inbox, doca or none")
    saved = SavedState("rdma_stack", changes)
    if flavour == "doca":
        for path, text in source(wanted["mirror"], wanted.get("files", {}).get("key", "")).items():
            saved.file(path, text)
    if not shutil.which("dpkg-query"):
        raise StateError("no dpkg here: install the RDMA stack by hand, and set rdma_stack_flavour to none")
    missing = absent(wanted["packages"] if flavour == "inbox" else wanted["doca_packages"])
    if missing and changes.check:
        changes.really(f"{_told(missing)}: installed (was absent)")
    elif missing:
        return {"notes": _install(saved, missing, replace=wanted["replace"])}
    return None


def _install(saved, missing, *, replace):
    run_long([*APT, "update"])
    plan = planned(run([*APT, "-s", *INSTALL, *missing]))
    built = any(name.endswith("-dkms") for name in plan)
    kernel = os.uname().release
    if built and absent([f"linux-headers-{kernel}"]):
        missing = [*missing, f"linux-headers-{kernel}"]
        plan = planned(run([*APT, "-s", *INSTALL, *missing]))
    replaced = sorted(name for name, old in plan.items() if old)
    if replaced and not replace:
        names = ", ".join(replaced)
        raise StateError(f"apt would upgrade or remove {names}: allow it by rdma_stack_replace, or install by hand")
    saved.command(_told(missing), have="absent", want="installed", do=[*APT, *INSTALL, *missing], undo=undo(plan))
    if still := absent(missing):
        raise StateError(f"{', '.join(still)} not installed, although apt-get ended well")
    if not built:
        return []
    if wrong := unbuilt(run(["dkms", "status", "-k", kernel])):
        raise StateError(f"drivers not built for kernel {kernel}: {wrong}; see /var/lib/dkms/*/*/build/make.log")
    return _secure_boot()


def unbuilt(said):
    """What of `dkms status` is not installed, in words; empty: all is.

    A line is `mlnx-ofed-kernel/25.10, 6.8.0-60-generic, x86_64: installed`, with a remark in brackets behind it where
    the kernel has a module of that name itself.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines:
        return "DKMS knows of none"
    return "; ".join(line for line in lines if not line.rpartition(": ")[2].startswith("installed"))


def _secure_boot():
    if shutil.which("mokutil") and "SecureBoot enabled" in run(["mokutil", "--sb-state"], ok=(0, 1, 255)):
        return [ENROL]
    return []


def _told(missing):
    return f"packages {', '.join(missing)}"


def source(mirror, key):
    """The mirror as a source of apt (sources.list(5), deb822), and the key that it is signed with: path -> text."""
    if not mirror or not key:
        raise StateError("rdma_stack_flavour doca needs rdma_stack_doca_mirror and rdma_stack_doca_key")
    text = base64.b64decode(key).decode("ascii", errors="replace")
    if "BEGIN PGP PUBLIC KEY BLOCK" not in text:
        raise StateError("rdma_stack_doca_key is no armoured public key: export it with `gpg --armor --export`")
    return {KEY: text, SOURCE: f"Types: deb\nURIs: {mirror}\nSuites: ./\nSigned-By: {KEY}\n"}


def absent(packages):
    """Those of some packages that are not installed, by dpkg."""
    said = run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *packages], ok=(0, 1))
    there = {line.split()[0] for line in said.splitlines() if line.endswith(" installed")}
    return [name for name in packages if name not in there]


def planned(said):
    """What `apt-get -s` would do: package -> the version that is there now; None: there is none."""
    plan = {}
    for line in said.splitlines():
        if action := re.match(r"(Inst|Remv) (\S+)(?: \[([^]]+)\])?", line):
            plan[action[2]] = action[3]
    return plan


def undo(plan):
    """The command that takes back what apt is about to do: old versions again, and new packages gone."""
    words = [f"{name}={old}" if old else f"{name}-" for name, old in sorted(plan.items())]
    return [*APT, "--allow-downgrades", "--purge", *INSTALL, *words]
