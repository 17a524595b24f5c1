"""Read the routing state of a switch, and which schemes holders on this machine have claimed to apply."""

from __future__ import annotations

import glob
import socket

from faultbed.testbed.node import netns
from faultbed.testbed.node.holders import read_claim
from faultbed.testbed.node.routing.kernel import MAIN, Kernel
from faultbed.testbed.node.routing.marking_rules import read_marks
from faultbed.testbed.node.routing.owned_numbers import LAST_TABLE, TABLE

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["KIND", "held_schemes", "read_switch"]

KIND = "routing."
"""Prefix of the kind in the claims of scheme holders; the scheme's name follows."""
_CLAIMS = "/run/faultbed/faults/*.claim"


def read_switch(namespace: str | None) -> dict[str, Any]:
    """Return the routing state of a switch: rules, tables and groups of schemes, BGP's next hops, and marked packets.

    The keys for the marks are those of `marking_rules.read_marks`.
    """
    netns.enter(namespace)
    try:
        names = dict(socket.if_nameindex())
        kernel = Kernel()
    finally:
        netns.enter(None)
    try:
        tables: dict[str, dict[str, list[Any]]] = {}
        for route in kernel.routes():
            hops: list[Any] = [f"group {route.group}"] if route.group and route.table != MAIN else []
            hops = hops or [names.get(hop.index, "?") for hop in route.hops if hop.is_usable]
            if route.table != MAIN and any(hop.weight > 1 for hop in route.hops):
                hops = [f"{names.get(hop.index, '?')} weight {hop.weight}" for hop in route.hops if hop.is_usable]
            tables.setdefault("main" if route.table == MAIN else str(route.table), {})[route.prefix] = hops
        groups = list(kernel.next_hop_objects())
        port_of = {next_hop.id: names.get(next_hop.hop.index, "?") for next_hop in groups if next_hop.hop}
        return {
            "rules": [
                {
                    "priority": rule.priority,
                    "table": rule.table,
                    "to": rule.prefix,
                    "mark": rule.mark or None,
                    "in": rule.interface or None,
                }
                for rule in kernel.rules()
                if TABLE <= rule.table <= LAST_TABLE
            ],
            "tables": tables,
            "groups": {
                str(group.id): {
                    "ports": [port_of.get(member, "?") for member in group.members],
                    "buckets": group.buckets,
                }
                for group in groups
                if group.members
            },
            **read_marks(namespace),
        }
    finally:
        kernel.close()


def held_schemes() -> list[str]:
    """Return the names of the schemes that holders on this machine have claimed to apply."""
    kinds = (str(read_claim(path).get("kind", "")) for path in sorted(glob.glob(_CLAIMS)))
    return [kind.removeprefix(KIND) for kind in kinds if kind.startswith(KIND)]
