"""A switch whose scheme has a rule for each source port and destination, in a network namespace of its own.

python switch_placed.py     prints as JSON what the kernel decides before, between and after the changes of an update
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from switch_namespace import BASE, BY_PORT, P2, P3, ip, make_switch, seen

from faultbed.testbed.node.next_hops import decisions
from faultbed.testbed.node.routing.agent import SwitchAgent

FIRST: list[list[Any]] = [[1000, 1001, P2, 0, "far1"], [1000, 1002, P3, 0, "far1"], [1000, 1002, P2, 0, "far2"]]
MOVED: list[list[Any]] = [[1000, 1002, P2, 0, "far1"], [1000, 1002, P3, 0, "far1"], [1000, 1001, P2, 0, "far2"]]


def decided() -> dict[str, Any]:
    """Return the port and the table of a packet from each source port to each prefix."""
    flows = [("10.77.1.1", to, port, 50000, 4791) for port in ("far1", "far2") for to in ("10.77.2.1", "10.77.3.1")]
    answers = decisions(None, [list(flow) for flow in flows])
    return {f"{flow[2]} to {flow[1]}": answer for flow, answer in zip(flows, answers, strict=True)}


def main() -> None:
    make_switch()
    agent = SwitchAgent({**BASE, **BY_PORT, "rules": FIRST})
    results: dict[str, Any] = {"refused": agent.conflict()}
    agent.apply()
    agent.begin_watch()
    results["first"], results["rules"] = decided(), seen()["rules"]
    results["idle"] = agent.replace_rules(FIRST)

    # Between the additions and the removals every key still has its old rule.
    kernel, between = agent._kernel, []
    remove_rule = kernel.remove_rule

    def removing(rule: Any) -> None:
        between.append(decided())
        remove_rule(rule)

    kernel.remove_rule = removing
    results["changed"] = agent.replace_rules(MOVED)
    kernel.remove_rule = remove_rule
    results["between"], results["moved"] = between, decided()
    agent.watch(time.monotonic_ns() + 10**9)
    results["deviations"] = [entry["what"] for entry in agent.report()]

    # Another program removes a rule, and the next update puts it back: the time without it is recorded.
    ip(f"rule del iif far1 to {P2} lookup 1002 priority 1000")
    agent.replace_rules(MOVED)
    agent.watch(time.monotonic_ns() + 10**9)
    agent.watch(time.monotonic_ns() + 2 * 10**9)
    results["put back"], results["seen"] = decided(), [entry["what"] for entry in agent.report()]

    ip("link set up1 down")  # its table loses the routes, and the rule falls through to BGP
    results["dead uplink"] = decided()
    for name, rule in (("port", [1000, 1001, P2, 0, "far9"]), ("table", [1000, 1077, P2, 0, "far1"])):
        try:
            agent.replace_rules([rule])
        except ValueError as error:
            results[f"no {name}"] = str(error)
    results["after refusals"] = seen()["rules"]
    agent.end_watch()
    agent.remove()
    results["removed"] = seen()["rules"]
    agent.close()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
