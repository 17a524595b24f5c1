"""Bring a Linux switch to eBGP and ECMP as its inventory says: sysctls, FRR's daemons and configuration; PFC by dcb.

BGP is that of the soft lab's switches (`faultbed_frr`); interfaces and addresses belong to the machine's own network
configuration, and are only looked at.
"""

import re

from faultbed_found import Found
from faultbed_frr import bgpd_config
from faultbed_state import StateError, answer, ip_json, run

PRIORITIES = 8
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
    found = Found("frr_switch", changes)
    for path, value in sysctls(wanted["ecmp_hash_seed"]).items():
        found.sysctl(path, value)
    for path, text in ((wanted["daemons"], DAEMONS), (wanted["config"], config(wanted))):
        found.file(path, text, readers={"FRR": RESTART})
    if wanted["reload"]:
        found.after("FRR", RESTART)
    if wanted["dcb"] and wanted["qos"]:
        for port in wanted["ports"]:
            _pfc(found, port["netdev"], wanted["qos"]["pfc_priorities"])
            _dscp(found, port["netdev"], wanted["dscp_map"])
    unread = ["FRR has not read its new files: set frr_switch_reload, or restart it"] if found.waits("FRR") else []
    return {"notes": unread}


def _pfc(found, netdev, priorities):
    """Which priorities pause, by iproute2's dcb (dcb-pfc(8))."""
    have = pairs(run(["dcb", "pfc", "show", "dev", netdev, "prio-pfc"]))
    if len(have) != PRIORITIES:
        raise StateError(
            f"dcb does not tell which priorities pause on {netdev}: its driver has no DCB, set frr_switch_dcb to false"
        )
    want = {str(number): "on" if number in priorities else "off" for number in range(PRIORITIES)}
    tool = ["dcb", "pfc", "set", "dev", netdev, "prio-pfc"]
    do, undo = ([*tool, *(f"{number}:{value}" for number, value in each.items())] for each in (want, have))
    found.command(f"{netdev} PFC", have=have, want=want, do=do, undo=undo)


def _dscp(found, netdev, dscp_map):
    """The inventory's lines of the DSCP map (dcb-app(8)); what they do not name stays."""
    have = pairs(run(["dcb", "-N", "app", "show", "dev", netdev, "dscp-prio"]))
    tool = ["dcb", "app"]
    for line in dscp_map:
        dscp, want = str(line["dscp"]), str(line["priority"])
        old = have.get(dscp)
        tail = ["dev", netdev, "dscp-prio"]
        undo = [*tool, "replace", *tail, f"{dscp}:{old}"] if old else [*tool, "del", *tail, f"{dscp}:{want}"]
        do = [*tool, "replace", *tail, f"{dscp}:{want}"]
        found.command(f"{netdev} DSCP {dscp}", have=old, want=want, do=do, undo=undo)


def pairs(said):
    """`prio-pfc 0:off 3:on` as {"0": "off", "3": "on"}."""
    return dict(word.split(":", 1) for word in said.split() if re.fullmatch(r"[0-9]+:\w+", word))


def sysctls(seed):
    """Forwarding, and ECMP by layer 4 with a seed of ours (ip-sysctl.rst)."""
    return {
        "net/ipv4/ip_forward": 1,
        "net/ipv6/conf/all/forwarding": 1,
        "net/ipv4/fib_multipath_hash_policy": 1,
        "net/ipv4/fib_multipath_hash_seed": seed,
    }


def config(wanted):
    """frr.conf: the loopback, and BGP as soft switches have it."""
    loopback = f"interface lo\n ip address {wanted['loopback']}\nexit\n"
    return f"{bgpd_config(wanted)}{loopback}"
