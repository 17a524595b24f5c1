"""One next hop for some prefixes: a rule before the main routing table, and a table with a single next hop.

The routes of FRR do not change, so zebra has nothing to restore afterwards.
"""

from __future__ import annotations

import json
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused, enter_netns
from faultbed.inject.node.command import run
from faultbed.inject.node.inside import ip, name_of, unless_gone
from faultbed.testbed.node.next_hops import egress_ports
from faultbed.testbed.node.routing.owned_numbers import STEER_PRIORITY, STEER_TABLE

__all__ = ["PRIORITY", "TABLE", "SteerActuator"]

PRIORITY, TABLE = str(STEER_PRIORITY), str(STEER_TABLE)
"""Priority of the rule, and the table that it looks up; `heal` recognises both."""

_ROCE_PORT = 4791
_SOURCE_PORTS = range(0xC000, 0xC000 + 16)


class SteerActuator(Actuator):
    """Sends `prefixes` out of `device` of the switch `netns` (None: this machine)."""

    def __init__(self, *, netns: str | None, device: str, prefixes: list[str]) -> None:
        self._netns, self._device, self._prefixes = netns, device, prefixes
        self._route_specs: list[str] = []
        self._host = self._port = ""

    def prepare(self) -> dict[str, Any]:
        """Refuse an existing rule, and a prefix without a next hop on the device."""
        enter_netns(self._netns)
        if self._rules():
            raise Refused(f"{name_of(self._netns)} already has a rule {PRIORITY}; run `faultbed heal`")
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
                    f"{name_of(self._netns)} has no route to {prefix} through {self._device}; check its BGP session"
                )
            via = hops[0].get("via")
            next_hop = f"inet6 {via['host']}" if via else hops[0]["gateway"]
            # For a neighbour without an address, zebra uses 169.254.0.1, a placeholder that the kernel accepts as it
            # is.
            onlink = " onlink" if "onlink" in hops[0].get("flags", []) else ""
            self._route_specs.append(f"{prefix} via {next_hop} dev {self._device}{onlink} table {TABLE}")
        # The readback needs the kernel's answer for packets of a host, not for the switch's own.
        pairs = [route for route in routes if route.get("protocol") == "kernel" and route["dst"].endswith("/31")]
        if not pairs:
            raise Refused(f"{name_of(self._netns)} has no link with two addresses (/31) to a host; choose an RTSW")
        own = pairs[0]
        self._host, self._port = _host_end(own["dst"]), own["dev"]
        return self.read()

    def revert_script(self) -> str:
        """Return a script that removes the rule first (the main table decides again), then the routes."""
        at = ip(self._netns)
        return unless_gone(
            self._netns,
            f"{at} rule del priority {PRIORITY} 2>/dev/null; {at} route flush table {TABLE} 2>/dev/null; "
            f"! {at} rule show priority {PRIORITY} | grep -q .",
        )

    def on(self) -> None:
        """Add the routes first and the rule last, so that it takes effect as a whole."""
        lines = [f"route add {spec}" for spec in self._route_specs]
        lines.append(f"rule add priority {PRIORITY} lookup {TABLE}")
        run(["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")

    def off(self) -> None:
        """Remove the rule first, then the routes. The kernel has already removed those of a port that went down."""
        if self._rules():
            run(["ip", "rule", "del", "priority", PRIORITY])
        # The kernel returns an error if an empty table is flushed.
        if any(f"table {TABLE}" in line for line in self._routes()):
            run(["ip", "-4", "route", "flush", "table", TABLE])

    def read(self) -> dict[str, Any]:
        """Report the rule, the routes, and the kernel's next hops to the first prefix for 16 source ports."""
        routes = self._routes()
        return {
            "applied": bool(self._rules()) or bool(routes),
            "netns": self._netns,
            "uplinks": self._uplinks(),
            "routes": len(routes),
        }

    def is_lost(self) -> bool:
        """Return whether the rule or a route of its table is gone: packets then take the main table's next hops."""
        return not self._rules() or len(self._routes()) < len(self._route_specs)

    def _rules(self) -> list[dict[str, Any]]:
        rules: list[dict[str, Any]] = json.loads(run(["ip", "-j", "-4", "rule", "show", "priority", PRIORITY]) or "[]")
        return rules

    def _routes(self) -> list[str]:
        listed = run(["ip", "-4", "route", "show", "table", "all"]).splitlines()
        return [line for line in listed if f" table {TABLE} " in f"{line} "]

    def _uplinks(self) -> list[str]:
        to = _host_end(self._prefixes[0])
        ports = egress_ports(self._netns, [[self._host, to, self._port, sport, _ROCE_PORT] for sport in _SOURCE_PORTS])
        enter_netns(self._netns)
        return sorted({port for port in ports if port is not None})


def _host_end(prefix: str) -> str:
    """Return the second address of a link's /31; the first is the switch's (RFC 3021)."""
    head, _, last = prefix.partition("/")[0].rpartition(".")
    return f"{head}.{int(last) + 1}"
