"""Synchronise a host's clock by PTP: write ptp4l's configuration and systemd units for ptp4l and phc2sys (linuxptp)."""

import os
import shutil

from faultbed_saved import SavedState
from faultbed_state import StateError, answer, run

CONFIG = "/etc/linuxptp/faultbed.conf"
UNITS = "/etc/systemd/system"
PTP4L, PHC2SYS = "faultbed-ptp4l.service", "faultbed-phc2sys.service"
OTHER_CLOCK_UNITS = ("chrony.service", "chronyd.service", "ntpsec.service", "ntp.service", "systemd-timesyncd.service")
RELOAD = ["systemctl", "daemon-reload"]


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    saved = SavedState("time_host", changes)
    if not desired["netdev"]:
        saved.restore()
        return
    if not os.path.isdir(f"/sys/class/net/{desired['netdev']}"):
        raise StateError(f"{desired['netdev']}: no such interface; correct time_host_ptp_netdev")
    if desired["start"] and shutil.which("ptp4l") is None:
        raise StateError("ptp4l: not installed; install linuxptp, or set time_host_start to false")
    for path, text in files(desired).items():
        saved.file(path, text, readers=readers(path))
    saved.after("systemd", RELOAD)
    if desired["start"]:
        _start(saved, units(desired))


def readers(path):
    """Return what must read a changed file: key -> command or None, as in `SavedState.file`.

    A unit file is read by systemd and takes effect when its unit starts. ptp4l's configuration takes effect when ptp4l
    starts.
    """
    if path == CONFIG:
        return {PTP4L: None}
    return {os.path.basename(path): None, "systemd": RELOAD}


def _start(saved, own_units):
    """Start our units, restart those with changed files, and stop every other unit that sets the clock."""
    for unit in (*OTHER_CLOCK_UNITS, *(unit for unit in (PTP4L, PHC2SYS) if unit not in own_units)):
        stop, start = ["systemctl", "stop", unit], ["systemctl", "start", unit]
        if _active(unit):
            undo = start if unit in OTHER_CLOCK_UNITS else stop
            saved.command(unit, current="active", desired="stopped", do=stop, undo=undo)
    for unit in own_units:
        start, stop = ["systemctl", "start", unit], ["systemctl", "stop", unit]
        if _active(unit):
            saved.after(unit, ["systemctl", "restart", unit], again=False)
        elif saved.command(unit, current="stopped", desired="active", do=start, undo=stop):
            saved.has_read(unit)


def _active(unit):
    return run(["systemctl", "is-active", unit], ok=(0, 3, 4)).strip() == "active"


def units(desired):
    """Return the units to run. Without a hardware clock ptp4l sets the system clock itself, without phc2sys."""
    return [PTP4L, PHC2SYS] if desired["hardware"] else [PTP4L]


def files(desired):
    """Return ptp4l's configuration and the unit files: path -> text."""
    stamps = "hardware" if desired["hardware"] else "software"
    netdev, domain = desired["netdev"], desired["domain"]
    texts = {
        CONFIG: f"[global]\ndomainNumber {domain}\nslaveOnly 1\ntime_stamping {stamps}\n[{netdev}]\n",
        f"{UNITS}/{PTP4L}": _unit("PTP", f"/usr/sbin/ptp4l -f {CONFIG}", after="network.target"),
    }
    if desired["hardware"]:
        command = f"/usr/sbin/phc2sys -s {netdev} -c CLOCK_REALTIME -w -n {domain}"
        texts[f"{UNITS}/{PHC2SYS}"] = _unit("the system clock after PTP", command, after=PTP4L)
    return texts


def _unit(description, command, *, after):
    return (
        f"[Unit]\nDescription=faultbed: {description}\nAfter={after}\n\n"
        f"[Service]\nExecStart={command}\nRestart=on-failure\n"
    )
