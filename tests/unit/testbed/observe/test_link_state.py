"""Links that are down according to the reports of their ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from faultbed.testbed.errors import CommandFailed
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.observe.link_state import down_links, read_down_links
from faultbed.testbed.shipped import inventories

SOFT = load(inventories() / "soft.yml")
UPLINK = next(link for link in SOFT.topology.links if link.name == "rtsw1:ctsw1")


@pytest.mark.parametrize("end", ["a", "b"])
@pytest.mark.parametrize(("states", "is_down"), [
    ({"up": 1, "carrier": 1}, False), ({"up": 1, "carrier": 0}, True), ({"up": 0}, True), ({}, False),
])  # fmt: skip
def test_link_is_down_if_one_of_its_ends_is(end, states, is_down):
    port = getattr(UPLINK, end)
    snapshot = {port.node: {f"{port.netdev}.{name}": value for name, value in states.items()}}
    assert down_links(SOFT.topology, snapshot) == ({UPLINK.name} if is_down else set())


@pytest.mark.parametrize("silent", [(), ("host1",)])
def test_links_down_exclude_a_node_that_does_not_answer(silent):
    host = next(link for link in SOFT.topology.links if link.b.node == "host1")

    def request(machine, request, *, timeout_s):
        assert timeout_s == 3.0
        if machine in silent:
            raise CommandFailed(f"{machine}: no answer")
        port = host.b if machine == "host1" else UPLINK.b
        return {"nodes": {name: {f"{port.netdev}.carrier": int(name != port.node)} for name in request["nodes"]}}

    def carried(nodes):
        machines = {}
        for name in nodes:
            machines.setdefault(name if name.startswith("host") else "fabric", {})[name] = None
        return machines

    lab = SimpleNamespace(topology=SOFT.topology, name="soft", carried=carried, request=request)
    down = read_down_links(lab, ["host1", UPLINK.b.node], timeout_s=3.0)
    assert down == ({UPLINK.name} if silent else {UPLINK.name, host.name})
