"""Configure a Linux switch as its inventory says: forwarding and ECMP sysctls, FRR's configuration, and PFC by dcb.

BGP is that of the soft lab's switches (`faultbed_frr`). Interfaces and addresses are configured by the machine's own
network configuration; this program only checks that they exist.
"""

import contextlib
import os
import re

from faultbed_dcb import configure_dscp, configure_pfc
from faultbed_fabric_bgp import fabric_bgpd_config
from faultbed_saved import SavedState
from faultbed_state import StateError, answer, ip_json
from faultbed_switch_health import healthy_afterwards

SEED = "net/ipv4/fib_multipath_hash_seed"
SYSCTL_FILE = "/etc/sysctl.d/90-faultbed-frr_switch.conf"
LOG = "/var/log/frr/frr.log"
"""Written by FRR's daemons, and rotated by the distribution's package."""
RESTART = ["systemctl", "restart", "frr"]
DAEMONS = '# Written by faultbed\'s role frr_switch.\nbgpd=yes\nvtysh_enable=yes\nzebra_options="-A 127.0.0.1"\n'


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    interfaces = {link["ifname"] for link in ip_json("link")}
    missing = [port["netdev"] for port in desired["ports"] if port["netdev"] not in interfaces]
    if missing:
        raise StateError(f"{', '.join(missing)}: no such interface; correct the names in faultbed_ports")
    saved = SavedState("frr_switch", changes)
    _require_replaceable(saved, desired)
    values, notes = sysctls(desired["ecmp_hash_seed"]), []
    if not os.path.exists(os.path.join(saved.root, "proc/sys", SEED)):
        del values[SEED]
        notes.append(
            "this kernel is older than Linux 6.11 and has no seed for its ECMP hash: flows may take other paths than "
            "faultbed computes"
        )
    saved.sysctls(values, SYSCTL_FILE)
    for path, text in ((desired["daemons"], DAEMONS), (desired["config"], config(desired))):
        saved.file(path, text, readers={"FRR": RESTART})
    if desired["reload"]:
        with _watched(saved, desired, notes):
            saved.after("FRR", RESTART)
    if desired["dcb"] and desired["qos"]:
        for port in desired["ports"]:
            netdev = port["netdev"]
            configure_pfc(saved, netdev, desired["qos"]["pfc_priorities"], otherwise="set frr_switch_dcb to false")
            configure_dscp(saved, netdev, desired["dscp_map"])
    if saved.has_unread("FRR"):
        notes.append("FRR has not read its new files: set frr_switch_reload, or restart it")
    return {"notes": notes}


def _watched(saved, desired, notes):
    """Return a context that requires the switch to be as healthy after FRR's restart as before."""
    if not desired["health"]:
        return contextlib.nullcontext()
    return healthy_afterwards(
        saved, [port["netdev"] for port in desired["ports"]], notes, sonic=False, unless="frr_switch_health: false"
    )


def _require_replaceable(saved, desired):
    """Refuse to replace routing that is not ours.

    Raises:
        StateError: FRR's configuration has routers that this role did not write.
    """
    path = desired["config"]
    if desired["replace"] or path in saved.record["files"]:
        return
    with (
        contextlib.suppress(FileNotFoundError),
        open(os.path.join(saved.root, path.lstrip("/")), encoding="utf-8") as file,
    ):
        text = file.read()
        routers = re.findall(r"^(?:router|ip route|ipv6 route) .*$", text, re.MULTILINE)
        if routers and text != config(desired):
            raise StateError(
                f"{path} has {', '.join(routers[:3])}, which this role would replace: leave this switch out "
                "(`provision --tags`, or without its name), or set frr_switch_replace"
            )


def sysctls(seed):
    """Return the settings for forwarding and for ECMP by ports with a fixed seed (Linux, ip-sysctl.rst)."""
    return {
        "net/ipv4/ip_forward": 1,
        "net/ipv6/conf/all/forwarding": 1,
        "net/ipv4/fib_multipath_hash_policy": 1,
        SEED: seed,
    }


def config(desired):
    """Return the text of frr.conf: the log file, the loopback address and BGP."""
    loopback = f"interface lo\n ip address {desired['loopback']}\nexit\n"
    return f"log file {LOG} errors\n{fabric_bgpd_config(desired)}{loopback}"
