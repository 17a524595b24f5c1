"""Shapes the ports of soft switches, to emulate a link's rate, its delay and the depth of its queue.

Each shaped port has two bands. IPv4, all traffic of hosts, waits in a netem with the port's rate, delay and queue. IPv6
is the switches' own (BGP unnumbered, neighbour discovery) and has priority: behind a deep queue a session would end by
its hold timer, and real networks do not let control traffic wait behind data.
"""

import json

from faultbed_state import run

__all__ = ["current_shapes", "shape_ports", "wrong_shapes"]

_ALL_TO_DATA = " ".join(["1"] * 16)
# net/sched/sch_netem.c: a rate in bytes/s, a delay in ns (tc prints seconds).
_BITS, _US = 8, 1_000_000


def shape_ports(shapes, changes, *, namespace):
    """Shape ports (name -> {rate_bps, packets, delay_us}); those that already have their shape are left alone."""
    current = current_shapes(namespace)
    commands = [line for port, shape in shapes.items() if current.get(port) != shape for line in _commands(port, shape)]
    for line in commands:
        changes.should_make(f"tc {line} in {namespace}")
    if commands and not changes.check:
        run(["tc", "-n", namespace, "-batch", "-"], stdin="\n".join(commands) + "\n")


def _commands(port, shape):
    """Return the `tc` commands that shape a port."""
    rate = f" rate {shape['rate_bps']}bit" if shape["rate_bps"] else ""
    delay = f" delay {shape['delay_us']}us" if shape["delay_us"] else ""
    return [
        f"qdisc replace dev {port} root handle 1: prio bands 2 priomap {_ALL_TO_DATA}",
        f"qdisc replace dev {port} parent 1:2 handle 20: netem limit {shape['packets']}{delay}{rate}",
        f"filter replace dev {port} parent 1: protocol ipv6 prio 1 u32 match u32 0 0 flowid 1:1",
    ]


def current_shapes(namespace):
    """Return the shape of each shaped port: one with prio and a netem in its second band."""
    qdiscs = json.loads(run(["tc", "-n", namespace, "-j", "qdisc", "show"]))
    shaped = {item["dev"] for item in qdiscs if item.get("root") and item["kind"] == "prio"}
    return {
        item["dev"]: {
            "rate_bps": item["options"].get("rate", {}).get("rate", 0) * _BITS or None,
            "packets": item["options"]["limit"],
            "delay_us": round(item["options"].get("delay", {}).get("delay", 0) * _US),
        }
        for item in qdiscs
        if item["kind"] == "netem" and item.get("parent") == "1:2" and item["dev"] in shaped
    }


def wrong_shapes(switch, shapes):
    """Return a description of each port of a switch whose shape is not the one in `shapes`."""
    current = current_shapes(switch["netns"])
    return [
        f"{switch['name']}:{port} is shaped {current.get(port, 'not at all')}, not {shape}"
        for port, shape in shapes.items()
        if current.get(port) != shape
    ]
