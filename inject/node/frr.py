"""A change of bgpd's running configuration, or a command to it, through vtysh. Never written to disk."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

from inject.node.actuator import Refused
from inject.node.command import run

__all__ = ["BgpResetActuator", "FrrActuator"]


# A session that is just coming back, after the fault before this one, is waited for.
_SESSION_S = 10.0


class FrrActuator:
    """Takes the line `line` of bgpd's configuration away, below the nested `path`; puts it back."""

    poll_s = None
    patience_s = 10.0

    def __init__(self, *, netns: str, path: list[str], line: str) -> None:
        self._netns, self._path, self._line = netns, path, line

    def prepare(self) -> dict[str, Any]:
        """Refuse where the line is not there: somebody has taken it away."""
        seen = self.read()
        if seen["applied"]:
            raise Refused(f"bgpd of {self._netns} has no `{self._line}`, and not by us: run `faultbed reset`")
        return seen

    def revert_script(self) -> str:
        """Put the line back; a namespace or daemon that is gone has no configuration."""
        return f"[ ! -e /run/netns/{self._netns} ] || {shlex.join(self._argv(self._line))} >/dev/null"

    def on(self) -> None:
        """Without the line."""
        run(self._argv(f"no {self._line}"))

    def off(self) -> None:
        """With it."""
        run(self._argv(self._line))

    def read(self) -> dict[str, Any]:
        """Whether the running configuration has the line."""
        running = run([*_vtysh(self._netns), "-c", "show running-config"])
        there = any(each.strip() == self._line for each in running.splitlines())
        return {"applied": not there, "netns": self._netns, "line": self._line}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Nothing is held open."""

    def _argv(self, line: str) -> list[str]:
        commands = ["configure terminal", *self._path, line]
        return [*_vtysh(self._netns), *(word for command in commands for word in ("-c", command))]


class BgpResetActuator:
    """Closes every BGP session of a switch once; they come back by themselves."""

    poll_s = None
    patience_s = 10.0

    def __init__(self, *, netns: str) -> None:
        self._netns = netns
        self._before = 0
        self._done = False

    def prepare(self) -> dict[str, Any]:
        """Refuse a switch without an established session: there would be nothing to reset."""
        deadline = time.monotonic() + _SESSION_S
        while not (seen := self._sessions())[0] and time.monotonic() < deadline:
            time.sleep(0.5)
        established, self._before = seen
        if not established:
            raise Refused(f"{self._netns} has no established BGP session: is the lab provisioned?")
        return {"applied": False, "netns": self._netns, "established": established, "dropped": self._before}

    def revert_script(self) -> str:
        """Sessions come back by themselves."""
        return "true"

    def on(self) -> None:
        """All sessions, hard."""
        run([*_vtysh(self._netns), "-c", "clear bgp *"])
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
        shown = json.loads(run([*_vtysh(self._netns), "-c", "show bgp ipv4 unicast summary json"]) or "{}")
        peers = shown.get("peers", {}).values()
        dropped = sum(int(peer.get("connectionsDropped", 0)) for peer in peers)
        return sum(peer.get("state") == "Established" for peer in peers), dropped


def _vtysh(netns: str) -> list[str]:
    return ["vtysh", "-N", netns, "-d", "bgpd"]
