"""A switch whose scheme another program changes and puts back, in a network namespace of its own: for the switch agent.

python switch_watched.py     prints what the agent recorded of each change as JSON; run by `unshare -rn`
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from switch_namespace import BASE, HOP, P2, P3, SCHEMES, both, ip, make_switch

from faultbed.inject.node.network.scheme import SchemeActuator
from faultbed.testbed.node.routing import agent as agent_module
from faultbed.testbed.node.routing import path_choice as path_choice_module
from faultbed.testbed.node.routing.agent import SwitchAgent

ECMP = {**BASE, "rules": [], "marks": []}
UP1, UP2 = HOP.format(port="up1"), HOP.format(port="up2")
SHARES = f"nexthop {UP1} weight {{}} nexthop {UP2} weight 1"
PREFIX_RULE, MARK_RULE = f"to {P2} lookup 1001 priority", "fwmark 1001 lookup 1001 priority"
RESILIENT = "nexthop replace id 1001000 group {} type resilient buckets 32 idle_timer 0 unbalanced_timer 0 proto 251"
CHANGES = {
    "route replaced": (
        "static",
        [f"route replace {P2} table 1001 {UP2} proto static"],
        [f"route replace {P2} table 1001 {UP1} proto 251"],
    ),
    "route replaced under its protocol": (
        "marked",
        [f"route replace {P2} table 1001 {UP2} proto 251"],
        [f"route replace {P2} table 1001 {UP1} proto 251"],
    ),
    "more specific route": (
        "static", ["route add blackhole 10.77.2.1/32 table 1001"], ["route del 10.77.2.1/32 table 1001"],
    ),
    "rule moved": (
        "static",
        [f"rule del {PREFIX_RULE} 1000", f"rule add {PREFIX_RULE} 40000 protocol 251"],
        [f"rule del {PREFIX_RULE} 40000", f"rule add {PREFIX_RULE} 1000 protocol 251"],
    ),
    "rule removed": (
        "marked", [f"rule del {MARK_RULE} 1000"], [f"rule add {MARK_RULE} 1000 protocol 251"],
    ),
    "route before it": (
        "static",
        [f"route prepend {P2} table 1001 {UP2} proto static"],
        [f"route del {P2} table 1001 {UP2} proto static"],
    ),
    "route for one type of service": (
        "static",
        [f"route add tos 0x10 {P2} table 1001 {UP2} proto static"],
        [f"route del tos 0x10 {P2} table 1001"],
    ),
    "rule narrowed": (
        "static",
        [f"rule del {PREFIX_RULE} 1000", f"rule add iif lo {PREFIX_RULE} 1000 protocol 251"],
        [f"rule del {PREFIX_RULE} 1000", f"rule add {PREFIX_RULE} 1000 protocol 251"],
    ),
    "rule beside that of a fault": ("static", ["rule add priority 900 lookup 77"], ["rule del priority 900"]),
    "route of the local table": (
        "static", [f"route add {P2} table local {UP2} proto static"], [f"route del {P2} table local"],
    ),
    "rule before": ("marked", ["rule add priority 500 lookup 254"], ["rule del priority 500"]),
    "weights": (
        "weighted",
        [f"route replace {P2} table 1000 proto 251 {SHARES.format(1)}"],
        [f"route replace {P2} table 1000 proto 251 {SHARES.format(3)}"],
    ),
    "members": ("resilient", [RESILIENT.format("1000000")], [RESILIENT.format("1000000/1000001")]),
    "withdrawn by BGP": ("static", [f"route replace {P2} metric 20 proto bgp {UP2}"], []),
    "link down": ("weighted", ["link set up1 down"], ["link set up1 up"]),
    "ecmp, withdrawn by BGP": ("ecmp", [f"route replace {P2} metric 20 proto bgp {UP2}"], []),
    "ecmp, route replaced": (
        "ecmp", [f"route replace {P2} metric 20 proto static nexthop {UP1} nexthop {UP2}"], [],
    ),
    "ecmp, more specific route": (
        "ecmp", [f"route add 10.77.2.1/32 {UP2} proto static"], ["route del 10.77.2.1/32"],
    ),
    "ecmp, rule before main": ("ecmp", ["rule add priority 30000 lookup 77"], ["rule del priority 30000"]),
    "ecmp, rule of main moved": (
        "ecmp",
        ["rule add priority 40000 lookup 77", "rule add priority 40001 lookup 254", "rule del priority 32766"],
        ["rule add priority 32766 lookup 254", "rule del priority 40001", "rule del priority 40000"],
    ),
    "ecmp, address on the switch": (
        "ecmp", ["address add 10.77.2.1/32 dev lo"], ["address del 10.77.2.1/32 dev lo"],
    ),
    "ecmp, weights": (
        "ecmp", [f"route replace {P2} metric 20 proto bgp nexthop {UP1} weight 9 nexthop {UP2} weight 1"], [],
    ),
    "ecmp, another port": (
        "ecmp",
        [f"route replace {P2} metric 20 proto bgp nexthop {UP1} nexthop {UP2} nexthop {HOP.format(port='far1')}"],
        [],
    ),
    "ecmp, rule of a fault": ("ecmp", ["rule add priority 900 lookup 251"], ["rule del priority 900"]),
    "ecmp, nothing of the scheme": (
        "ecmp", ["route add 10.98.0.0/16 dev up1", "rule add priority 40001 lookup 77"], [],
    ),
    "rule of a fault": ("static", ["rule add priority 900 lookup 251"], ["rule del priority 900"]),
    "nothing of the scheme": ("marked", ["route add 10.99.0.0/16 dev up1", "rule add priority 40000 lookup 77"], []),
}  # fmt: skip


def watch(agent: SwitchAgent) -> None:
    """Let the agent compare, however recently it did."""
    agent.watch(time.monotonic_ns() + 10**12)


def recorded(scheme: str, changes: list[str], reverts: list[str]) -> dict:
    agent = SwitchAgent(SCHEMES.get(scheme, ECMP))
    assert agent.conflict() == ""
    agent.apply()
    agent.begin_watch()
    watch(agent)
    for words in changes:
        ip(words)
    before_ns = time.monotonic_ns()
    agent.watch(0)  # too early after the last comparison
    is_put_off = agent.is_due
    watch(agent)
    watch(agent)
    assert not agent.is_due
    during = agent.report()
    for words in reverts:
        ip(words)
    both(P2)
    after_ns = time.monotonic_ns()
    watch(agent)
    watch(agent)
    ended = agent.report()
    agent.end_watch()
    agent.remove()
    last = agent.report()
    agent.close()
    return {
        "during": during,
        "put off": is_put_off,
        "after": last,
        "in time": [one["begin_ns"] >= before_ns and one["end_ns"] >= after_ns for one in ended if one["end_ns"]],
    }


def deleted_late() -> dict[str, list]:
    """The kernel reports a deletion, and shows the route once more: to the agent, which was faster than the kernel."""
    found = {}
    for name, request, words in (
        ("main", ECMP, f"route del {P2} metric 20"),
        ("scheme", SCHEMES["static"], f"route del {P2} table 1001"),
    ):
        agent = SwitchAgent(request)
        agent.apply()
        agent.begin_watch()
        watch(agent)
        read = agent_module.read_routes
        stale = [read(agent._kernel, request["prefixes"])]
        agent_module.read_routes = lambda *each, stale=stale, read=read: stale.pop() if stale else read(*each)
        ip(words)
        watch(agent)
        assert agent.report() == []
        assert agent.is_due
        watch(agent)
        watch(agent)
        agent_module.read_routes = read
        found[name] = agent.report()
        both(P2)
        agent.remove()
        agent.close()
    return found


def only_watching() -> list:
    """What a holder reads back of a scheme that installs nothing: before it is applied, applied, and removed."""
    actuator = SchemeActuator(switches=[ECMP])
    readbacks = [actuator.prepare()]
    for change in (actuator.on, actuator.off):
        change()
        readbacks.append(actuator.read())
    actuator.close()
    return readbacks


def polls() -> dict:
    """How often the holder calls the actuator: before a change, while its comparison is put off, and afterwards."""
    actuator = SchemeActuator(switches=[SCHEMES["static"]])
    actuator.prepare()
    actuator.on()
    far_ns = time.monotonic_ns() + 10**12
    actuator.tick(far_ns)
    polls = [actuator.poll_s]
    ip(f"route replace {P2} table 1001 {UP2} proto 251")
    for now_ns in (0, far_ns, far_ns):
        actuator.tick(now_ns)
        polls.append(actuator.poll_s)
    actuator.off()
    found = {"polls": polls, "readback": actuator.read()}
    actuator.close()
    return found


def marks() -> list:
    """Another program flushes the marks, and loads what nft had listed of them."""
    draw = "jhash @th,104,24 mod 2 seed 1 map { 0 : 1001, 1 : 1002 }"
    line = f"ip daddr {{ {P2} }} udp dport 4791 counter meta mark set {draw}"
    agent = SwitchAgent({**SCHEMES["marked"], "marks": [line]})
    agent.apply()
    agent.begin_watch()
    watch(agent)
    listed = nft("list table ip faultbed_routing")
    nft("flush chain ip faultbed_routing choose")
    watch(agent)
    nft("-f -", listed)
    watch(agent)
    nft("add table ip other")
    watch(agent)
    nft("delete table ip other")
    watch(agent)
    agent.end_watch()
    agent.remove()
    found = agent.report()
    agent.close()
    return found


def nft(words: str, stdin: str = "") -> str:
    return subprocess.run(["nft", *words.split()], check=True, capture_output=True, text=True, input=stdin).stdout


def overrun() -> list:
    """More notifications than the socket holds, while the agent does not read them."""
    agent = SwitchAgent(SCHEMES["static"])
    agent._notifications.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    agent.apply()
    agent.begin_watch()
    watch(agent)
    for number in range(40):
        ip(f"route add 10.99.{number}.0/24 dev up1")
    watch(agent)
    agent.remove()
    found = agent.report()
    agent.close()
    return found


def withdrawn_at_the_end() -> list:
    """BGP withdraws a next hop while another program's route is there, and the scheme is removed at once."""
    agent = SwitchAgent(SCHEMES["static"])
    agent.apply()
    agent.begin_watch()
    ip(f"route replace {P2} table 1002 {UP1} proto 251")
    watch(agent)
    ip(f"route replace {P2} metric 20 proto bgp {UP1}")
    agent.end_watch()
    agent.remove()
    found = agent.report()
    agent.close()
    both(P2)
    return found


def rule_from_before() -> list:
    """A rule of another program, which is there before the scheme, sends the packets of one source elsewhere."""
    ip("rule add from 10.77.1.3 priority 500 lookup 77")
    agent = SwitchAgent(ECMP)
    agent.apply()
    agent.begin_watch()
    watch(agent)
    ip("rule del priority 500")
    watch(agent)
    agent.end_watch()
    found = agent.report()
    agent.close()
    return found


def path_choice() -> dict:
    """Another program changes a setting of ECMP or a neighbour entry, and puts it back; or nobody looks for long."""
    policy = Path("/proc/sys/net/ipv4/fib_multipath_hash_policy")
    neighbour = "169.254.0.1 dev up1 lladdr 02:00:00:00:00:{} nud permanent"
    policy.write_text("1")
    ip(f"neigh replace {neighbour.format('01')}")
    found = {}

    def policy_changed(agent: SwitchAgent) -> None:
        policy.write_text("0")
        watch(agent)
        found["policy during"] = agent.report()
        policy.write_text("1")
        watch(agent)

    def neighbour_changed(agent: SwitchAgent) -> None:
        ip(f"neigh replace {neighbour.format('02')}")
        ip(f"neigh replace {neighbour.format('01')}")
        watch(agent)

    def neighbour_wrong_until_the_end(agent: SwitchAgent) -> None:
        ip(f"neigh replace {neighbour.format('02')}")
        watch(agent)

    def neighbour_deleted(agent: SwitchAgent) -> None:
        ip("neigh del 169.254.0.1 dev up1")
        watch(agent)

    def port_down(agent: SwitchAgent) -> None:
        ip("link set up1 down")
        watch(agent)
        ip("link set up1 up")
        ip(f"neigh replace {neighbour.format('01')}")
        both(P2)
        both(P3)
        watch(agent)
        watch(agent)

    def not_looked(agent: SwitchAgent) -> None:
        agent._settings._looked_ns -= path_choice_module.LARGEST_GAP_NS
        watch(agent)

    def nothing(agent: SwitchAgent) -> None:
        ip("neigh replace 10.77.1.1 dev far1 lladdr 02:00:00:00:00:09 nud permanent")
        ip("neigh replace 10.77.1.1 dev far1 lladdr 02:00:00:00:00:08 nud permanent")
        watch(agent)

    cases = (
        policy_changed, neighbour_changed, neighbour_wrong_until_the_end, neighbour_deleted, port_down, not_looked,
        nothing,
    )  # fmt: skip
    for case in cases:
        ip(f"neigh replace {neighbour.format('01')}")
        agent = SwitchAgent(ECMP)
        agent.apply()
        agent.begin_watch()
        watch(agent)
        case(agent)
        agent.end_watch()
        found[case.__name__] = agent.report()
        agent.close()
    return found


def restless_at_the_end() -> list:
    """The main table changes during each comparison, until the scheme is removed."""
    agent = SwitchAgent(SCHEMES["static"])
    agent.apply()
    agent.begin_watch()
    agent.drain = lambda: True
    agent.end_watch()
    agent.remove()
    found = agent.report()
    agent.close()
    return found


def main() -> None:
    path_choice_module.LARGEST_GAP_NS = 1000 * 10**9  # commands may take seconds on a busy machine
    make_switch()
    results: dict = {name: recorded(*each) for name, each in CHANGES.items()}
    results["polls"] = polls()
    results["only watching"] = only_watching()
    results["deleted late"] = deleted_late()
    results["marks"] = marks() if shutil.which("nft") else None
    results |= {"overrun": overrun(), "at the end": withdrawn_at_the_end(), "restless": restless_at_the_end()}
    results |= {"path choice": path_choice(), "rule from before": rule_from_before()}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
