"""The lines of `faultbed routing plan`, by FRR of a soft lab: one uplink for each prefix, and none that is dead."""

from __future__ import annotations

import contextlib
import json
import shlex

import pytest
from waiting import until

from faultbed.testbed.observe import fingerprint
from faultbed.testbed.routing.bgp_preferences import switch_configurations
from faultbed.testbed.routing.schemes import Routing

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("racks >= 2", "uplinks >= 2")]


class Switch:
    """The FRR and the kernel's routes of one switch."""

    def __init__(self, lab, name):
        self.netns, self.node = lab.netns(name), lab.node(name)
        self._machine = lab.node(lab.carrier(name).name)

    def vtysh(self, lines):
        said = self._machine.run(["sh", "-c", f"printf '%s\\n' {shlex.join(lines)} | vtysh -N {self.netns}"]).stdout
        assert "%" not in said, said
        return said

    def uplinks(self, prefixes):
        """Return the ports by which the kernel reaches each prefix."""
        routes = json.loads(self.node.run(["ip", "-json", "route", "show"]).stdout)
        hops = {route["dst"]: route.get("nexthops") or [route] for route in routes if route["dst"] in prefixes}
        return {
            prefix: tuple(sorted((hop["dev"], hop.get("weight", 1)) for hop in found)) for prefix, found in hops.items()
        }


@contextlib.contextmanager
def configured(lab, switch, configuration):
    switch.vtysh(configuration.apply)
    try:
        yield
    finally:
        switch.vtysh(configuration.remove)


def test_prefixes_have_the_planned_uplink_and_move_when_it_is_dead(lab):
    topology, before = lab.topology, fingerprint.capture(lab)
    (configuration, *_) = switch_configurations(topology, "static-parity", Routing())
    switch, planned = Switch(lab, configuration.switch), configuration.uplink_by_prefix
    config_before = switch.vtysh(["show running-config"])
    shared = switch.uplinks(planned)
    assert all(len(hops) == 2 for hops in shared.values())

    with configured(lab, switch, configuration):
        until(
            lambda: switch.uplinks(planned) == {prefix: ((port, 1),) for prefix, port in planned.items()}, within_s=20.0
        )
        # The far rack's link to the first spine dies. This switch's own link stays up: only BGP says so.
        dead = next(iter(planned.values()))
        spine = next(
            link.other(switch.node.name).node
            for link in topology.links_of(configuration.switch)
            if link.is_uplink and link.end(configuration.switch).netdev == dead
        )
        far = next(link for link in topology.links_of(spine) if configuration.switch not in (link.a.node, link.b.node))
        end = far.end(spine)
        lab.node(end.node).run(["ip", "link", "set", end.netdev, "down"])
        try:
            affected = {prefix for prefix, port in planned.items() if port == dead}
            until(lambda: all(dead not in dict(switch.uplinks(planned)[prefix]) for prefix in affected), within_s=20.0)
        finally:
            lab.node(end.node).run(["ip", "link", "set", end.netdev, "up"])
        until(
            lambda: switch.uplinks(planned) == {prefix: ((port, 1),) for prefix, port in planned.items()}, within_s=30.0
        )

    until(lambda: switch.uplinks(planned) == shared, within_s=20.0)
    assert switch.vtysh(["show running-config"]) == config_before
    assert fingerprint.diff(before, fingerprint.capture(lab)) == []
