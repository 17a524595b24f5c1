"""A switch that reboots: its daemons are killed and its ports are down, then everything is started again."""

from __future__ import annotations

from typing import Any

from faultbed.inject.node.actuator import Actuator
from faultbed.inject.node.machine.process import ProcessActuator
from faultbed.inject.node.network.interface import LinkActuator

__all__ = ["RebootActuator"]


class RebootActuator(Actuator):
    """Kills `daemons` of the switch `netns` and takes `ports` down; `off` brings up the ports, then the daemons."""

    loss_check_s = 0.5

    def __init__(self, *, netns: str, ports: list[str], daemons: list[str]) -> None:
        self._netns = netns
        self._daemons = ProcessActuator(find={"daemons": daemons}, how="KILL", netns=netns, again=True)
        self._ports = [LinkActuator(netns=netns, device=port) for port in ports]
        self._parts: tuple[ProcessActuator | LinkActuator, ...] = (*self._ports, self._daemons)
        self.patience_s = len(daemons) * self._daemons.patience_s

    def prepare(self) -> dict[str, Any]:
        """Refuse a switch with a daemon that does not run, or a port that is down."""
        for part in self._parts:
            part.prepare()
        return self.read()

    def revert_script(self) -> str:
        """Return the scripts of all parts, ports first, in subshells: an early exit of one does not skip the others."""
        return " && ".join(f"( {part.revert_script()} )" for part in self._parts)

    def on(self) -> None:
        """Kill the daemons first, so that they cannot close their sessions, as in a switch that loses power."""
        self._daemons.on()
        for port in self._ports:
            port.on()

    def off(self) -> None:
        for port in self._ports:
            port.off()
        self._daemons.off()

    def read(self) -> dict[str, Any]:
        """Report `applied` while any part is; `whole` says whether all parts are."""
        daemons = self._daemons.read()
        down = [port.read()["applied"] for port in self._ports]
        return {
            "applied": bool(daemons["applied"] or any(down)),
            "whole": bool(daemons["applied"] and all(down)),
            "netns": self._netns,
            "ports_down": sum(down),
            "states": daemons["states"],
        }

    def is_lost(self) -> bool:
        """Return whether any daemon runs again, or any port is up."""
        return any(part.is_lost() for part in self._parts)

    def close(self) -> None:
        """Close the sockets."""
        for part in self._parts:
            part.close()
