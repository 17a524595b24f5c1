"""A switch that reboots: what it runs is killed, its ports are down, then everything is started again."""

from __future__ import annotations

from typing import Any

from inject.node.machine.process import ProcessActuator
from inject.node.network.interface import LinkActuator

__all__ = ["RebootActuator"]


class RebootActuator:
    """Kills `daemons` of the switch `netns` and takes `ports` down; ports up and daemons started, in that order."""

    poll_s = None

    def __init__(self, *, netns: str, ports: list[str], daemons: list[str]) -> None:
        self._netns = netns
        self._daemons = ProcessActuator(find={"daemons": daemons}, how="KILL", netns=netns, again=True)
        self._ports = [LinkActuator(netns=netns, device=port) for port in ports]
        self._parts: tuple[ProcessActuator | LinkActuator, ...] = (*self._ports, self._daemons)
        self.patience_s = len(daemons) * self._daemons.patience_s

    def prepare(self) -> dict[str, Any]:
        """Refuse a switch of which anything is not as it must be."""
        for part in self._parts:
            part.prepare()
        return self.read()

    def revert_script(self) -> str:
        """Each part's own, ports first; a subshell each, so that one that is done already does not end the others."""
        return " && ".join(f"( {part.revert_script()} )" for part in self._parts)

    def on(self) -> None:
        """The daemons first: a switch that loses its power says goodbye to nobody."""
        self._daemons.on()
        for port in self._ports:
            port.on()

    def off(self) -> None:
        """Ports, then daemons."""
        for port in self._ports:
            port.off()
        self._daemons.off()

    def read(self) -> dict[str, Any]:
        """Applied while anything of it is; `whole` says whether all of it is."""
        daemons = self._daemons.read()
        down = [port.read()["applied"] for port in self._ports]
        return {
            "applied": bool(daemons["applied"] or any(down)),
            "whole": bool(daemons["applied"] and all(down)),
            "netns": self._netns,
            "ports_down": sum(down),
            "states": daemons["states"],
        }

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Close the sockets."""
        for part in self._parts:
            part.close()
