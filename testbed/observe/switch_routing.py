"""What routes packets on a lab's switches now: rules, tables, groups and marks of a scheme beside BGP's next hops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from testbed.errors import Unsupported

if TYPE_CHECKING:
    from testbed.lab import Lab

__all__ = ["SwitchRouting", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRouting:
    """State of some switches.

    Attributes:
        switches: by name, what `testbed.node.routing.agent.read_switch` returns.
        held: schemes that holders on the switches' machines have claimed, each once.
    """

    switches: dict[str, dict[str, Any]]
    held: tuple[str, ...]


def read(lab: Lab, switches: Iterable[str]) -> SwitchRouting:
    """Read switches that are Linux; each machine gets one query.

    Raises:
        Unsupported: a switch is no Linux machine or namespace of one.
        LabError: a machine could not answer.
    """
    names = list(switches)
    for name in names:
        if not lab.topology.switch_by_name[name].is_linux:
            raise Unsupported(f"{name}: its routing is not read: it runs {lab.topology.switch_by_name[name].nos}")
    states: dict[str, dict[str, Any]] = {}
    held: dict[str, None] = {}
    for machine, nodes in lab.carried(names).items():
        answer = lab.request(machine, {"do": "routing", "nodes": nodes})
        states |= answer["nodes"]
        held |= dict.fromkeys(answer["held"])
    return SwitchRouting(switches={name: states[name] for name in names}, held=tuple(held))
