"""One way for everything: a rule before the main routing table, and a table that knows a single next hop.

The routes of FRR stay as they are, so that there is nothing that zebra could take for its own or put back.
"""

from __future__ import annotations

import json
from typing import Any

from inject.node.actuator import Refused, enter_netns
from inject.node.command import run
from inject.node.inside import ip, name_of, unless_gone
from testbed.node.counts import STEER_PRIORITY
from testbed.node.next_hops import ways

__all__ = ["PRIORITY", "TABLE", "SteerActuator"]

PRIORITY, TABLE = str(STEER_PRIORITY), "251"
"""Of the rule, and of the table that it looks up: the marks that `heal` goes by."""

_ROCE_PORT = 4791
_SOURCE_PORTS = range(0xC000, 0xC000 + 16)


class SteerActuator:
    """Sends `prefixes` out of `device` of the switch `netns` (None: this machine)."""

    poll_s = None

    def __init__(self, *, netns: str | None, device: str, prefixes: list[str]) -> None:
        self._netns, self._device, self._prefixes = netns, device, prefixes
        self._ways: list[str] = []
        self._host = self._port = ""

    def prepare(self) -> dict[str, Any]:
        """Refuse a rule or table that is there already, and a prefix that has no next hop on the device."""
        enter_netns(self._netns)
        if self._rules():
            raise Refused(f"{name_of(self._netns)} has a rule {PRIORITY} already, and not by us: run `faultbed heal`")
        routes = json.loads(run(["ip", "-j", "-4", "route", "show"]) or "[]")
        for prefix in self._prefixes:
            hops = [
                hop
                for route in routes
                if route.get("dst") == prefix
                for hop in route.get("nexthops", [route])
                if hop.get("dev") == self._device
            ]
            if not hops:
                raise Refused(
                    f"{name_of(self._netns)} has no route to {prefix} by {self._device}: is its BGP session up?"
                )
            via = hops[0].get("via")
            way = f"inet6 {via['host']}" if via else hops[0]["gateway"]
            # zebra gives a neighbour without an address one that is none (169.254.0.1), to be taken as it is.
            onlink = " onlink" if "onlink" in hops[0].get("flags", []) else ""
            self._ways.append(f"{prefix} via {way} dev {self._device}{onlink} table {TABLE}")
        # What the kernel answers for packets of a host, not for the switch's own.
        pairs = [route for route in routes if route.get("protocol") == "kernel" and route["dst"].endswith("/31")]
        if not pairs:
            raise Refused(f"{name_of(self._netns)} has no link of two addresses (/31) to a host: none to ask for")
        own = pairs[0]
        self._host, self._port = _host_end(own["dst"]), own["dev"]
        return self.read()

    def revert_script(self) -> str:
        """The rule first: from then on the main table is asked again."""
        at = ip(self._netns)
        return unless_gone(
            self._netns,
            f"{at} rule del priority {PRIORITY} 2>/dev/null; {at} route flush table {TABLE} 2>/dev/null; "
            f"! {at} rule show priority {PRIORITY} | grep -q .",
        )

    def on(self) -> None:
        """The table first, the rule last: it takes effect as a whole."""
        lines = [f"route add {way}" for way in self._ways]
        lines.append(f"rule add priority {PRIORITY} lookup {TABLE}")
        run(["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")

    def off(self) -> None:
        """The rule first, then the routes; those of a port that went down are gone already."""
        if self._rules():
            run(["ip", "rule", "del", "priority", PRIORITY])
        # A table without routes is none to the kernel, and to flush it an error.
        if any(f"table {TABLE}" in way for way in self._routes()):
            run(["ip", "-4", "route", "flush", "table", TABLE])

    def read(self) -> dict[str, Any]:
        """The rule, the routes, and what the kernel answers for packets of 16 source ports to the first prefix."""
        routes = self._routes()
        return {
            "applied": bool(self._rules()) or bool(routes),
            "netns": self._netns,
            "uplinks": self._uplinks(),
            "routes": len(routes),
        }

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Nothing is held open."""

    def _rules(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(run(["ip", "-j", "-4", "rule", "show", "priority", PRIORITY]) or "[]")
        return found

    def _routes(self) -> list[str]:
        listed = run(["ip", "-4", "route", "show", "table", "all"]).splitlines()
        return [line for line in listed if f" table {TABLE} " in f"{line} "]

    def _uplinks(self) -> list[str]:
        to = _host_end(self._prefixes[0])
        found = ways(self._netns, [[self._host, to, self._port, sport, _ROCE_PORT] for sport in _SOURCE_PORTS])
        enter_netns(self._netns)
        return sorted({port for port in found if port is not None})


def _host_end(prefix: str) -> str:
    """The second address of a link's prefix of two; the first is the switch's (RFC 3021)."""
    head, _, last = prefix.partition("/")[0].rpartition(".")
    return f"{head}.{int(last) + 1}"
