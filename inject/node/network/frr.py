"""A change of bgpd's running configuration, or a command to it, through vtysh. Never written to disk."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

from inject.node.actuator import Refused
from inject.node.command import run, still_alive
from inject.node.inside import name_of, unless_gone, vtysh

__all__ = ["BgpResetActuator", "FrrActuator"]


# A session that is just coming back, after the fault before this one, is waited for.
_SESSION_S = 10.0


class FrrActuator:
    """Takes the line `line` of bgpd's configuration away, below the nested `path`; puts it back. `add`: the reverse."""

    poll_s = None
    patience_s = 10.0

    def __init__(self, *, netns: str | None, path: list[str], line: str, add: bool = False) -> None:
        self._netns, self._path, self._line, self._add = netns, path, line, add

    def prepare(self) -> dict[str, Any]:
        """Refuse where somebody else has made the change already."""
        seen = self.read()
        if seen["applied"]:
            has = "has" if self._add else "has no"
            raise Refused(
                f"bgpd of {name_of(self._netns)} {has} `{self._line}`, and not by us: it is not configured by us, or "
                "somebody has changed it (`faultbed reset` brings a soft lab's back)"
            )
        return seen

    def revert_script(self) -> str:
        """The line as it was; a namespace or daemon that is gone has no configuration."""
        # To take away what is not there is an error to bgpd, and to nobody else.
        tolerant = " || true" if self._add else ""
        change = shlex.join(self._argv(add=not self._add))
        return unless_gone(self._netns, f"{change} >/dev/null{tolerant}")

    def on(self) -> None:
        """Without the line, or with it."""
        run(self._argv(add=self._add))

    def off(self) -> None:
        """As it was."""
        run(self._argv(add=not self._add))

    def read(self) -> dict[str, Any]:
        """Whether the running configuration has the line."""
        running = run([*vtysh(self._netns).split(), "-c", "show running-config"])
        there = any(each.strip() == self._line for each in running.splitlines())
        return {"applied": there is self._add, "netns": self._netns, "line": self._line}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Nothing is held open."""

    def _argv(self, *, add: bool) -> list[str]:
        commands = ["configure terminal", *self._path, self._line if add else f"no {self._line}"]
        return [*vtysh(self._netns).split(), *(word for command in commands for word in ("-c", command))]


class BgpResetActuator:
    """Closes every BGP session of a switch once; they come back by themselves."""

    poll_s = None
    patience_s = 10.0

    def __init__(self, *, netns: str | None) -> None:
        self._netns = netns
        self._before = 0
        self._done = False

    def prepare(self) -> dict[str, Any]:
        """Refuse a switch without an established session: there would be nothing to reset."""
        deadline = time.monotonic() + _SESSION_S
        while not (seen := self._sessions())[0] and time.monotonic() < deadline:
            still_alive()
            time.sleep(0.5)
        established, self._before = seen
        if not established:
            raise Refused(f"{name_of(self._netns)} has no established BGP session: is the lab provisioned?")
        return {"applied": False, "netns": self._netns, "established": established, "dropped": self._before}

    def revert_script(self) -> str:
        """Sessions come back by themselves."""
        return "true"

    def on(self) -> None:
        """All sessions, hard."""
        run([*vtysh(self._netns).split(), "-c", "clear bgp *"])
        self._done = True

    def off(self) -> None:
        """Nothing is held."""
        self._done = False

    def read(self) -> dict[str, Any]:
        """How often sessions have been dropped, by bgpd's own count."""
        established, dropped = self._sessions()
        applied = self._done and dropped > self._before
        return {"applied": applied, "netns": self._netns, "established": established, "dropped": dropped}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Nothing is held open."""

    def _sessions(self) -> tuple[int, int]:
        shown = json.loads(run([*vtysh(self._netns).split(), "-c", "show bgp ipv4 unicast summary json"]) or "{}")
        peers = shown.get("peers", {}).values()
        dropped = sum(int(peer.get("connectionsDropped", 0)) for peer in peers)
        return sum(peer.get("state") == "Established" for peer in peers), dropped
