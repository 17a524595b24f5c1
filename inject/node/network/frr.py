"""A change of bgpd's running configuration, or a command to bgpd, through vtysh. Never written to disk."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.command import heartbeat, run
from faultbed.inject.node.inside import name_of, unless_gone, vtysh

__all__ = ["BgpResetActuator", "FrrActuator"]


# A session may be coming back after the previous fault.
_SESSION_S = 10.0
_SHOW = "show running-config"
_SUMMARY = "show bgp ipv4 unicast summary json"


class FrrActuator(Actuator):
    """Removes the line `line` below the nested `path` of bgpd's configuration, and restores it. `add`: the reverse."""

    patience_s = 10.0

    def __init__(self, *, netns: str | None, path: list[str], line: str, add: bool = False) -> None:
        self._netns, self._path, self._line, self._add = netns, path, line, add

    def prepare(self) -> dict[str, Any]:
        """Refuse a configuration in which the change is made already."""
        state = self.read()
        if state["applied"]:
            has = "has" if self._add else "has no"
            raise Refused(
                f"bgpd of {name_of(self._netns)} {has} `{self._line}` already: another role has configured it, or a "
                "user has changed it (`faultbed reset` restores a soft lab)"
            )
        return state

    def revert_script(self) -> str:
        """Return a script that restores the line; a namespace or daemon that is gone has no configuration."""
        # bgpd returns an error if the line to remove does not exist, which is no failure here.
        tolerant = " || true" if self._add else ""
        change = shlex.join(self._argv(*self._change(add=not self._add)))
        return unless_gone(self._netns, f"{change} >/dev/null{tolerant}")

    def on(self) -> None:
        run(self._argv(*self._change(add=self._add)))

    def off(self) -> None:
        """Restore the line; the same vtysh prints the configuration before, which shows whether the fault is on."""
        self.was_lost = not self._is_applied(run(self._argv(_SHOW, *self._change(add=not self._add))))

    def is_lost(self) -> bool:
        """Return False: `off` detects a loss. A separate vtysh takes as long as the change and prolongs the fault."""
        return False

    def read(self) -> dict[str, Any]:
        """Report whether the running configuration has the line."""
        return {"applied": self._is_applied(run(self._argv(_SHOW))), "netns": self._netns, "line": self._line}

    def _is_applied(self, running: str) -> bool:
        return any(line.strip() == self._line for line in running.splitlines()) is self._add

    def _change(self, *, add: bool) -> list[str]:
        return ["configure terminal", *self._path, self._line if add else f"no {self._line}"]

    def _argv(self, *commands: str) -> list[str]:
        return [*vtysh(self._netns).split(), *(word for command in commands for word in ("-c", command))]


class BgpResetActuator(Actuator):
    """Closes every BGP session of a switch once; they reconnect on their own."""

    patience_s = 10.0

    def __init__(self, *, netns: str | None) -> None:
        self._netns = netns
        self._before = 0
        self._done = False

    def prepare(self) -> dict[str, Any]:
        """Refuse a switch without an established session: there would be nothing to reset."""
        deadline = time.monotonic() + _SESSION_S
        while not (sessions := self._sessions())[0] and time.monotonic() < deadline:
            heartbeat()
            time.sleep(0.5)
        established, self._before = sessions
        if not established:
            raise Refused(f"{name_of(self._netns)} has no established BGP session; provision the lab")
        return {"applied": False, "netns": self._netns, "established": established, "dropped": self._before}

    def revert_script(self) -> str:
        return "true"

    def on(self) -> None:
        """Close the sessions; the same vtysh prints how many were dropped before, which earlier faults may change."""
        _, self._before = _counted(run([*vtysh(self._netns).split(), "-c", _SUMMARY, "-c", "clear bgp *"]))
        self._done = True

    def off(self) -> None:
        self._done = False

    def read(self) -> dict[str, Any]:
        """Report how many sessions are up, and how many were dropped, by bgpd's own count."""
        established, dropped = self._sessions()
        applied = self._done and dropped > self._before
        return {"applied": applied, "netns": self._netns, "established": established, "dropped": dropped}

    def _sessions(self) -> tuple[int, int]:
        return _counted(run([*vtysh(self._netns).split(), "-c", _SUMMARY]))


def _counted(summary: str) -> tuple[int, int]:
    """Return how many sessions are established, and how many were dropped since bgpd started."""
    peers = json.loads(summary or "{}").get("peers", {}).values()
    dropped = sum(int(peer.get("connectionsDropped", 0)) for peer in peers)
    return sum(peer.get("state") == "Established" for peer in peers), dropped
