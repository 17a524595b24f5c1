"""Bring a host's kernel settings, huge pages, locked memory and time to what is wanted; write down what was there.

Values are set now and kept for the next boot by files of our own, never by editing the host's.
"""

import os

from faultbed_saved import SavedState
from faultbed_state import StateError, answer

SYSCTL_FILE = "/etc/sysctl.d/90-faultbed.conf"
LIMITS_FILE = "/etc/security/limits.d/90-faultbed.conf"
SYSTEMD_FILE = "/etc/systemd/system.conf.d/90-faultbed.conf"
CHRONY_FILE = "/etc/chrony/sources.d/faultbed.sources"
CHRONY_READS = ["sh", "-c", "! pgrep -x chronyd >/dev/null || chronyc reload sources"]
HUGEPAGES = "vm/nr_hugepages"


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    saved = SavedState("base_host", changes)
    sysctls = dict(wanted["sysctls"])
    if wanted["hugepages"]:
        sysctls[HUGEPAGES] = wanted["hugepages"]
    for path, value in sysctls.items():
        if not os.path.exists(f"/proc/sys/{path}"):
            raise StateError(f"this kernel has no {path}: take it out of base_host_sysctls")
        saved.sysctl(path, value)
    _check_hugepages(wanted["hugepages"], changes)
    for path, text in files(wanted, sysctls).items():
        saved.file(path, text)
    if os.path.isdir(os.path.dirname(CHRONY_FILE)) and wanted["ntp_servers"]:
        text = "".join(f"server {server} iburst\n" for server in wanted["ntp_servers"])
        saved.file(CHRONY_FILE, text, readers={"chrony": CHRONY_READS})
        saved.after("chrony", CHRONY_READS)


def files(wanted, sysctls):
    """The files that keep the settings over a boot: path -> text."""
    memlock = str(wanted["memlock"])
    limit = "unlimited" if memlock == "infinity" else memlock
    bytes_ = memlock if memlock == "infinity" else f"{memlock}K"
    head = "# Written by faultbed's role base_host; host_teardown removes it.\n"
    lines = "".join(f"{path.replace('/', '.')} = {value}\n" for path, value in sorted(sysctls.items()))
    return {
        SYSCTL_FILE: head + lines,
        LIMITS_FILE: head + f"* soft memlock {limit}\n* hard memlock {limit}\n",
        SYSTEMD_FILE: head + f"[Manager]\nDefaultLimitMEMLOCK={bytes_}\n",
    }


def _check_hugepages(wanted, changes):
    """The kernel gives as many as it finds in one piece, and says nothing (vm.rst, nr_hugepages)."""
    if not wanted or changes.check:
        return
    with open(f"/proc/sys/{HUGEPAGES}", encoding="ascii") as file:
        have = int(file.read())
    if have < int(wanted):
        raise StateError(f"{have} huge pages of {wanted} could be had: memory is fragmented, reboot and try again")
