"""Configure a host's kernel settings, huge pages, locked-memory limits and NTP servers, and save the old values.

Values are set now. Drop-in files of our own set them again at every boot; the host's own files are never edited.
"""

import os

from faultbed_saved import SavedState
from faultbed_state import StateError, answer

SYSCTL_FILE = "/etc/sysctl.d/90-faultbed.conf"
LIMITS_FILE = "/etc/security/limits.d/90-faultbed.conf"
SYSTEMD_FILE = "/etc/systemd/system.conf.d/90-faultbed.conf"
CHRONY_FILE = "/etc/chrony/sources.d/faultbed.sources"
CHRONY_RELOAD = ["sh", "-c", "! pgrep -x chronyd >/dev/null || chronyc reload sources"]
HUGEPAGES = "vm/nr_hugepages"


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    saved = SavedState("base_host", changes)
    sysctls = dict(desired["sysctls"])
    if desired["hugepages"]:
        sysctls[HUGEPAGES] = desired["hugepages"]
    for path, value in sysctls.items():
        if not os.path.exists(f"/proc/sys/{path}"):
            raise StateError(f"base_host_sysctls: this kernel has no {path}; remove the entry")
        saved.sysctl(path, value)
    _check_hugepages(desired["hugepages"], changes)
    for path, text in files(desired, sysctls).items():
        saved.file(path, text)
    if os.path.isdir(os.path.dirname(CHRONY_FILE)) and desired["ntp_servers"]:
        text = "".join(f"server {server} iburst\n" for server in desired["ntp_servers"])
        saved.file(CHRONY_FILE, text, readers={"chrony": CHRONY_RELOAD})
        saved.after("chrony", CHRONY_RELOAD)


def files(desired, sysctls):
    """Return the files that set the values again at every boot: path -> text."""
    memlock = str(desired["memlock"])
    limits_value = "unlimited" if memlock == "infinity" else memlock
    systemd_value = memlock if memlock == "infinity" else f"{memlock}K"
    head = "# Written by faultbed's role base_host; host_teardown removes it.\n"
    lines = "".join(f"{path.replace('/', '.')} = {value}\n" for path, value in sorted(sysctls.items()))
    return {
        SYSCTL_FILE: head + lines,
        LIMITS_FILE: head + f"* soft memlock {limits_value}\n* hard memlock {limits_value}\n",
        SYSTEMD_FILE: head + f"[Manager]\nDefaultLimitMEMLOCK={systemd_value}\n",
    }


def _check_hugepages(count, changes):
    """Raise StateError if the kernel has allocated fewer huge pages than `count`.

    A write to nr_hugepages succeeds even if memory is too fragmented for all of them (Linux, hugetlbpage.rst).
    """
    if not count or changes.check:
        return
    with open(f"/proc/sys/{HUGEPAGES}", encoding="ascii") as file:
        allocated = int(file.read())
    if allocated < int(count):
        raise StateError(
            f"huge pages: the kernel allocated {allocated} of {count} because memory is fragmented; reboot the host "
            "and provision it again"
        )
