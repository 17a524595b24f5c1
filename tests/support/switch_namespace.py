"""A switch with two uplinks and BGP's routes over both, in a network namespace of its own: for the switch agent.

python switch_namespace.py     prints what happened to each scheme as JSON; run by `unshare -rn`
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from faultbed.testbed.node import state
from faultbed.testbed.node.next_hops import decisions
from faultbed.testbed.node.routing.agent import SwitchAgent
from faultbed.testbed.node.routing.routing_state import read_switch

P2, P3 = "10.77.2.0/31", "10.77.3.0/31"
HOP = "via 169.254.0.1 dev {port} onlink"
BASE = {"netns": None, "prefixes": {P2: ["up1", "up2"], P3: ["up1", "up2"]}, "tables": {}, "weights": {}, "buckets": 0}
BY_PORT = {"tables": {"1001": "up1", "1002": "up2"}, "marks": []}
FLOW = ["10.77.1.1", "10.77.3.1", "far1", 50000, 4791]
SCHEMES = {
    "static": {**BASE, **BY_PORT, "rules": [[1000, 1001, P2, 0], [1000, 1002, P3, 0]]},
    "marked": {**BASE, **BY_PORT, "rules": [[1000, 1001, None, 1001], [1000, 1002, None, 1002]]},
    "weighted": {**BASE, "weights": {"up1": 3, "up2": 1}, "rules": [[1000, 1000, None, 0]], "marks": []},
    "resilient": {
        **BASE, "weights": {"up1": 1, "up2": 1}, "buckets": 32, "rules": [[1000, 1000, None, 0]], "marks": [],
    },
}  # fmt: skip


def ip(words: str) -> str:
    return subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True).stdout


def both(prefix: str) -> None:
    hops = " ".join(f"nexthop {HOP.format(port=port)}" for port in ("up1", "up2"))
    ip(f"route replace {prefix} metric 20 proto bgp {hops}")


def seen() -> dict:
    now = read_switch(None)
    main = {prefix: hops for prefix, hops in now["tables"].pop("main").items() if prefix in (P2, P3)}
    return {"tables": now["tables"], "groups": now["groups"], "main": main, "rules": now["rules"]}


def foreign() -> dict[str, str]:
    """Return the agent's messages about state of other programs, by kind."""
    wanted = SCHEMES["static"]
    output = {}
    for name, add, remove in (
        ("rule", "rule add to 10.9.0.0/16 lookup 77 priority 1000", "rule del priority 1000"),
        ("route", "route add 10.9.0.0/16 dev up1 table 1500", "route flush table 1500"),
        ("blackhole", "route add blackhole 10.9.0.0/16 table 1001", "route flush table 1001"),
        ("next hop", "nexthop add id 1000007 dev up1", "nexthop del id 1000007"),
        ("leftover", "rule add to 10.9.0.0/16 lookup 1001 priority 1000 protocol 251", "rule del priority 1000"),
    ):
        ip(add)
        agent = SwitchAgent(wanted)
        output[name] = agent.conflict()
        agent.close()
        with contextlib.suppress(subprocess.CalledProcessError):
            ip(output[name].partition("`ip ")[2].partition("`")[0])  # as advised
        agent = SwitchAgent(wanted)
        output[f"{name}, removed"] = agent.conflict()
        agent.close()
        subprocess.run(["ip", *remove.split()], check=False, capture_output=True)
    absent = SwitchAgent({**wanted, "prefixes": {P2: ["up1", "up9"]}})
    output["port"] = absent.conflict()
    absent.close()
    return output


def facts() -> set[tuple[str, str]]:
    """What the fingerprint says of routing beside the main table. Nftables, which come last, may not be here.

    Routes of links in the main table come and go by themselves here: their other ends went down with them.
    """
    actual = set()
    with contextlib.suppress(OSError):
        for subject, text in state.network_facts():
            if subject.split()[0] in ("route", "rule", "nexthop") and "route main" not in subject:
                actual.add((subject, text))
    return actual


def life(wanted: dict) -> dict[str, dict]:
    """Apply a scheme, withdraw a prefix from one uplink, take that uplink down and up again, and remove the scheme."""
    agent, before = SwitchAgent(wanted), facts()
    results: dict = {"refused": agent.conflict()}
    agent.apply()
    results["facts"] = sorted({subject.split()[0] for subject, _ in facts() ^ before})
    results["applied"] = seen()
    results["decision"] = ip("route get 10.77.3.1").split(" uid")[0]
    results["marked decision"] = ip("route get 10.77.3.1 mark 1001").split(" uid")[0]
    results["asked"] = decisions(None, [FLOW, [*FLOW, 1001], [*FLOW, 1002]])
    results["idle"] = agent.follow()
    ip(f"route replace {P2} metric 20 proto bgp {HOP.format(port='up2')}")
    results["told"] = agent.drain()
    agent.follow()
    results["withdrawn"] = seen()
    ip("link set up1 down")
    results["at once"] = seen()
    agent.drain()
    agent.follow()
    results["down"] = seen()
    results["without uplink"] = ip("route get 10.77.2.1 mark 1001").split(" uid")[0]
    ip("link set up1 up")
    both(P2)
    both(P3)
    agent.drain()
    agent.follow()
    results["up"] = seen()
    agent.remove()
    agent.remove()
    results["removed"] = {**seen(), "left": agent.counts()["left"]}
    results["facts left"] = sorted(subject for subject, _ in facts() ^ before)
    agent.close()
    return results


def make_switch() -> None:
    """Two uplinks, a host port's address, and BGP's routes to two prefixes over both uplinks."""
    ip("link set lo up")
    for number in (1, 2):
        ip(f"link add up{number} type veth peer name far{number}")
        ip(f"link set up{number} up")
        ip(f"link set far{number} up")
    ip("address add 10.77.1.0/31 dev far1")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    both(P2)
    both(P3)


def main() -> None:
    make_switch()
    json.dump({"foreign": foreign(), **{name: life(wanted) for name, wanted in SCHEMES.items()}}, sys.stdout)


if __name__ == "__main__":
    main()
