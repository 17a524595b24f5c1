"""The present routing state of a lab's switches: a scheme's rules, tables, groups and marks, and BGP's next hops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from faultbed.testbed.errors import Unsupported

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab

__all__ = ["SwitchRouting", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRouting:
    """The routing state of some switches.

    Attributes:
        switches: the state of each switch by name, as `faultbed.testbed.node.routing.routing_state.read_switch`
            returns it.
        schemes: the routing schemes that holders on the switches' machines keep applied, each once.
    """

    switches: dict[str, dict[str, Any]]
    schemes: tuple[str, ...]


def read(lab: Lab, switches: Iterable[str]) -> SwitchRouting:
    """Return the routing state of Linux switches. Each of their machines gets one query.

    Raises:
        Unsupported: a switch is neither a Linux machine nor a network namespace.
        LabError: a machine could not answer.
    """
    names = list(switches)
    for name in names:
        if not lab.topology.switch_by_name[name].is_linux:
            nos = lab.topology.switch_by_name[name].nos
            raise Unsupported(f"{name} runs {nos}, whose routing faultbed cannot read; name a Linux switch")
    states: dict[str, dict[str, Any]] = {}
    schemes: dict[str, None] = {}
    for machine, nodes in lab.carried(names).items():
        answer = lab.request(machine, {"do": "routing", "nodes": nodes})
        states |= answer["nodes"]
        schemes |= dict.fromkeys(answer["held"])
    return SwitchRouting(switches={name: states[name] for name in names}, schemes=tuple(schemes))
