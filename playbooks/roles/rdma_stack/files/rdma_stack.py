"""Install the RDMA stack by apt: the distribution's, or DOCA-OFED's from a mirror; write down how to take it back.

What apt would do is asked of apt (`apt-get -s`, apt-get(8)) before it does it: what it would install is removed by a
teardown, what it would upgrade or remove is returned in its old version. Not yet run on hardware.
"""

import base64
import re
import shutil

from faultbed_found import Found
from faultbed_found import run as run_long
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
INSTALL = ["install", "--no-install-recommends"]


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    flavour = wanted["flavour"]
    if flavour == "none":
        return
    if flavour not in ("inbox", "doca"):
        raise StateError(f"rdma_stack_flavour is {flavour!r}: say inbox, doca or none")
    found = Found("rdma_stack", changes)
    if flavour == "doca":
        for path, text in source(wanted["mirror"], wanted.get("files", {}).get("key", "")).items():
            found.file(path, text)
    if not shutil.which("dpkg-query"):
        raise StateError("no dpkg here: install the RDMA stack by hand, and set rdma_stack_flavour to none")
    missing = absent(wanted["packages"] if flavour == "inbox" else wanted["doca_packages"])
    if missing and changes.check:
        changes.really(f"{_told(missing)}: installed (was absent)")
    elif missing:
        _install(found, missing, replace=wanted["replace"])


def _install(found, missing, *, replace):
    run_long([*APT, "update"])
    plan = planned(run([*APT, "-s", *INSTALL, *missing]))
    replaced = sorted(name for name, old in plan.items() if old)
    if replaced and not replace:
        names = ", ".join(replaced)
        raise StateError(f"apt would upgrade or remove {names}: allow it by rdma_stack_replace, or install by hand")
    found.command(_told(missing), have="absent", want="installed", do=[*APT, *INSTALL, *missing], undo=undo(plan))
    if still := absent(missing):
        raise StateError(f"{', '.join(still)} not installed, although apt-get ended well")


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
        if found := re.match(r"(Inst|Remv) (\S+)(?: \[([^]]+)\])?", line):
            plan[found[2]] = found[3]
    return plan


def undo(plan):
    """The command that takes back what apt is about to do: old versions again, and new packages gone."""
    words = [f"{name}={old}" if old else f"{name}-" for name, old in sorted(plan.items())]
    return [*APT, "--allow-downgrades", "--purge", *INSTALL, *words]
