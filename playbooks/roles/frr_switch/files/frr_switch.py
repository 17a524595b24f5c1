"""Bring a Linux switch to eBGP and ECMP as its inventory says: sysctls, FRR's daemons and configuration.

BGP is that of the soft lab's switches (`faultbed_frr`); interfaces and addresses belong to the machine's own network
configuration, and are only looked at.
"""

from faultbed_found import Found
from faultbed_frr import bgpd_config
from faultbed_state import StateError, answer, ip_json, run

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
    wrote = [
        found.file(wanted["daemons"], DAEMONS),
        found.file(wanted["config"], config(wanted)),
    ]
    if any(wrote) and wanted["reload"] and not changes.check:
        run(["systemctl", "restart", "frr"])


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
