"""Bring a Linux switch to eBGP and ECMP as its inventory says: sysctls, FRR's daemons and configuration; PFC by dcb.

BGP is that of the soft lab's switches (`faultbed_frr`); interfaces and addresses belong to the machine's own network
configuration, and are only looked at.
"""

import os

from faultbed_dcb import bring_dscp, bring_pfc
from faultbed_fabric_bgp import fabric_bgpd_config
from faultbed_saved import SavedState
from faultbed_state import StateError, answer, ip_json

SEED = "net/ipv4/fib_multipath_hash_seed"
SYSCTL_FILE = "/etc/sysctl.d/90-faultbed-frr_switch.conf"
RESTART = ["systemctl", "restart", "frr"]
DAEMONS = '# Written by faultbed\'s role frr_switch.\nbgpd=yes\nvtysh_enable=yes\nzebra_options="-A 127.0.0.1"\n'


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    there = {link["ifname"] for link in ip_json("link")}
    missing = [port["netdev"] for port in wanted["ports"] if port["netdev"] not in there]
    if missing:
        raise StateError(f"no interface {', '.join(missing)}: mend the names in faultbed_ports")
    saved = SavedState("frr_switch", changes)
    values, notes = sysctls(wanted["ecmp_hash_seed"]), []
    if not os.path.exists(os.path.join(saved.root, "proc/sys", SEED)):
        del values[SEED]
        notes.append("a kernel before Linux 6.11 has no seed for its ECMP hash: ways are not the computed ones")
    saved.sysctls(values, SYSCTL_FILE)
    for path, text in ((wanted["daemons"], DAEMONS), (wanted["config"], config(wanted))):
        saved.file(path, text, readers={"FRR": RESTART})
    if wanted["reload"]:
        saved.after("FRR", RESTART)
    if wanted["dcb"] and wanted["qos"]:
        for port in wanted["ports"]:
            bring_pfc(saved, port["netdev"], wanted["qos"]["pfc_priorities"], otherwise="set frr_switch_dcb to false")
            bring_dscp(saved, port["netdev"], wanted["dscp_map"])
    if saved.has_unread("FRR"):
        notes.append("FRR has not read its new files: set frr_switch_reload, or restart it")
    return {"notes": notes}


def sysctls(seed):
    """Forwarding, and ECMP by layer 4 with a seed of ours (ip-sysctl.rst)."""
    return {
        "net/ipv4/ip_forward": 1,
        "net/ipv6/conf/all/forwarding": 1,
        "net/ipv4/fib_multipath_hash_policy": 1,
        SEED: seed,
    }


def config(wanted):
    """frr.conf: the loopback, and BGP as soft switches have it."""
    loopback = f"interface lo\n ip address {wanted['loopback']}\nexit\n"
    return f"{fabric_bgpd_config(wanted)}{loopback}"
