"""A routing scheme on the switches of one machine, held under a lease as a fault is (`inject/routing/scheme_lease.py`).

The holder's process is the switch agent: it wakes up when the kernel reports a change, copies BGP's next hops into the
scheme's tables, and records when a switch differs from the scheme (`faultbed.testbed.node.routing.agent`). If the
controller dies, its channel closes or its lease expires, and the holder removes the scheme. If the holder dies, PID 1
runs the stored revert (`SWEEP`); `faultbed heal` can also run it. Once the rules are removed, every packet takes BGP's
own ECMP.
"""

from __future__ import annotations

from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.command import heartbeat
from faultbed.inject.node.inside import inside
from faultbed.testbed.node.routing.agent import SwitchAgent
from faultbed.testbed.node.routing.owned_numbers import NFT_TABLE, PRIORITY, PROTOCOL
from faultbed.testbed.node.routing.path_choice import LOOK_S

__all__ = ["LEFTOVERS", "SWEEP", "SchemeActuator"]

LEFTOVERS = (
    f'$(ip rule show | grep -F "proto {PROTOCOL}")'
    f"$(ip -4 route show table all proto {PROTOCOL} 2>/dev/null)"
    f"$(ip nexthop show proto {PROTOCOL} 2>/dev/null)"
    f"$(nft list table ip {NFT_TABLE} 2>/dev/null)"
)
"""Shell word, for double quotes, that is empty if nothing of a scheme is in the namespace. It has no single quotes."""
SWEEP = f"""\
while ip rule del priority {PRIORITY} protocol {PROTOCOL} 2>/dev/null; do :; done
nft delete table ip {NFT_TABLE} 2>/dev/null
ip -4 route flush table all proto {PROTOCOL} 2>/dev/null
ip nexthop flush proto {PROTOCOL} >/dev/null 2>&1
[ -z "{LEFTOVERS}" ]
"""
"""Shell that removes a scheme from the namespace that it runs in, any number of times, and fails if a part is left."""


_RETRY_S = 0.25


class SchemeActuator(Actuator):
    """Applies a scheme to `switches`; the format is `faultbed.testbed.routing.switch_tables.SchemeTables.request`."""

    patience_s = 20.0
    """How long nft and the kernel may take, on a switch that forwards under emulation."""

    def __init__(self, *, switches: list[dict[str, Any]]) -> None:
        self._switches = switches
        self._agents: list[SwitchAgent] = []
        self._copied = 0

    @property
    def poll_s(self) -> float | None:  # type: ignore[override]
        """Seconds until a postponed comparison is tried again, or the settings are read again; None: nothing is on."""
        if any(agent.is_due for agent in self._agents):
            return _RETRY_S
        return LOOK_S if any(agent.is_watching for agent in self._agents) else None

    @property
    def files(self) -> list[int]:
        """Descriptors that become readable when a switch's routes have changed."""
        return [file for agent in self._agents for file in agent.files]

    def prepare(self) -> dict[str, Any]:
        """Refuse missing ports, and switches that already use the rules, tables or next hops reserved for schemes."""
        for wanted in self._switches:
            try:
                agent = SwitchAgent(wanted)
            except FileNotFoundError:
                raise Refused(f"there is no network namespace {wanted['netns']} here; provision the lab") from None
            self._agents.append(agent)
            if why := agent.conflict():
                raise Refused(why)
        return self.read()

    def revert_script(self) -> str:
        """Return a script that removes the scheme from every switch whose namespace still exists."""
        lines = ["failed="]
        for wanted in self._switches:
            netns = wanted["netns"]
            guard = f"[ ! -e /run/netns/{netns} ] || " if netns else ""
            lines.append(f"{guard}{inside(netns)}sh -c '{SWEEP}' || failed=1")
        return "\n".join([*lines, '[ -z "$failed" ]'])

    def on(self) -> None:
        """Apply the scheme to one switch after the other."""
        for agent in self._agents:
            heartbeat()
            agent.apply()
            agent.begin_watch()

    def update(self, *, rules: list[list[list[Any]]]) -> None:  # type: ignore[override]
        """Give each switch the rules of the same position in `rules`."""
        if len(rules) != len(self._agents):
            raise Refused(f"rules of {len(rules)} switches for {len(self._agents)}")
        for agent, wanted in zip(self._agents, rules):  # noqa: B905 - Python 3.9 on nodes has no `strict`
            heartbeat()
            agent.replace_rules(wanted)

    def tick(self, now_ns: int) -> None:
        """Copy BGP's changes to switches whose kernel has reported one, and compare these switches with the scheme."""
        for agent in self._agents:
            self._copied += agent.watch(now_ns)

    def off(self) -> None:
        """Remove the scheme from every switch; each is tried even if another one fails."""
        failed = []
        for agent in self._agents:
            heartbeat()
            try:
                agent.end_watch()
                agent.remove()
            except OSError as error:
                failed.append(f"{agent.name}: {error}")
        if failed:
            raise OSError("; ".join(failed))

    def read(self) -> dict[str, Any]:
        """Report whether any part of the scheme is in place (`applied`), and whether all of it is (`whole`).

        A scheme that installs nothing is in place while its switches are watched.
        """
        by_name = {agent.name: agent.counts() for agent in self._agents}
        counts = list(by_name.values())
        whole = all(
            count["rules"] == count["wanted_rules"]
            and count["marks"] == count["wanted_marks"]
            and (count["routes"] > 0 or count["is_only_watching"])
            for count in counts
        )
        left = sorted(name for name, count in by_name.items() if count["left"])
        return {
            "applied": bool(left) or any(count["is_only_watching"] for count in counts),
            "whole": bool(counts) and whole,
            "switches": len(counts),
            "rules": sum(count["rules"] for count in counts),
            "routes": sum(count["routes"] for count in counts),
            "copied": self._copied,
            "left_on": left,
            "deviations": [entry for agent in self._agents for entry in agent.report()],
        }

    def close(self) -> None:
        """Close the agents' sockets."""
        for agent in self._agents:
            agent.close()
