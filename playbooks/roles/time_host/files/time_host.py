"""Let a host's clock follow PTP: ptp4l's configuration, and units for it and for phc2sys (linuxptp)."""

import os
import shutil

from faultbed_saved import SavedState
from faultbed_state import StateError, answer, run

CONFIG = "/etc/linuxptp/faultbed.conf"
UNITS = "/etc/systemd/system"
PTP4L, PHC2SYS = "faultbed-ptp4l.service", "faultbed-phc2sys.service"
RIVALS = ("chrony.service", "chronyd.service", "ntpsec.service", "ntp.service", "systemd-timesyncd.service")
RELOAD = ["systemctl", "daemon-reload"]


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    saved = SavedState("time_host", changes)
    if not wanted["netdev"]:
        saved.restore()
        return
    if not os.path.isdir(f"/sys/class/net/{wanted['netdev']}"):
        raise StateError(f"no interface {wanted['netdev']}: mend time_host_ptp_netdev")
    if wanted["start"] and shutil.which("ptp4l") is None:
        raise StateError("ptp4l is not installed: install linuxptp, or set time_host_start to false")
    for path, text in files(wanted).items():
        saved.file(path, text, readers=readers(path))
    saved.after("systemd", RELOAD)
    if wanted["start"]:
        _run(saved, units(wanted))


def readers(path):
    """Who reads a file: systemd its units, and each program what it was started with."""
    program = {PTP4L: None} if path == CONFIG else {os.path.basename(path): None}
    return program if path == CONFIG else program | {"systemd": RELOAD}


def _run(saved, wanted):
    """Only our units set the clock: what else does is stopped, and so are those of ours that are no longer wanted."""
    for unit in (*RIVALS, *(unit for unit in (PTP4L, PHC2SYS) if unit not in wanted)):
        stop, start = ["systemctl", "stop", unit], ["systemctl", "start", unit]
        if _active(unit):
            saved.command(unit, have="active", want="stopped", do=stop, undo=start if unit in RIVALS else stop)
    for unit in wanted:
        start, stop = ["systemctl", "start", unit], ["systemctl", "stop", unit]
        if _active(unit):
            saved.after(unit, ["systemctl", "restart", unit], again=False)
        elif saved.command(unit, have="stopped", want="active", do=start, undo=stop):
            saved.has_read(unit)


def _active(unit):
    return run(["systemctl", "is-active", unit], ok=(0, 3, 4)).strip() == "active"


def units(wanted):
    """The units that are wanted: without a hardware clock ptp4l sets the system's by itself."""
    return [PTP4L, PHC2SYS] if wanted["hardware"] else [PTP4L]


def files(wanted):
    """Configuration and units: path -> text."""
    stamps = "hardware" if wanted["hardware"] else "software"
    made = {
        CONFIG: (
            f"[global]\ndomainNumber {wanted['domain']}\nslaveOnly 1\ntime_stamping {stamps}\n[{wanted['netdev']}]\n"
        ),
        f"{UNITS}/{PTP4L}": _unit("PTP", f"/usr/sbin/ptp4l -f {CONFIG}", after="network.target"),
    }
    if wanted["hardware"]:
        follow = f"/usr/sbin/phc2sys -s {wanted['netdev']} -c CLOCK_REALTIME -w -n {wanted['domain']}"
        made[f"{UNITS}/{PHC2SYS}"] = _unit("the system clock after PTP", follow, after=PTP4L)
    return made


def _unit(what, command, *, after):
    return (
        f"[Unit]\nDescription=faultbed: {what}\nAfter={after}\n\n[Service]\nExecStart={command}\nRestart=on-failure\n"
    )
