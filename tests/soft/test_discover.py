"""Discovery on a real lab reproduces its whole inventory from the answers of its machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from faultbed.testbed.discover import live
from faultbed.testbed.discover.draft import draft, text
from faultbed.testbed.inventory import lab_inventory

pytestmark = pytest.mark.soft


def test_discover_rebuilds_the_inventory_and_the_bgp_sessions_from_the_machines(lab, tmp_path):
    """A session identifies the switch at its far end, although spines share an ASN."""
    nodes = {name: lab.node(name) for name in lab.nodes()}
    silent = {}
    machines = live.query(nodes, lambda _: None, unreachable=silent)
    inventory_draft = draft(machines, name=lab.name)
    assert (inventory_draft.gaps, silent) == ((), {})
    path = tmp_path / "drafted.yml"
    path.write_text(text(inventory_draft))
    known = lab.inventory_model
    assert replace(lab_inventory.load(path), path=known.path) == known
    links = lab.topology.links
    assert sum(inventory_draft.cables.values()) == len(links)
    peers = {
        name: namespace.peers
        for machine in machines
        for name, namespace in machine.namespaces.items()
        if namespace.peers
    }
    router_id = {switch.name: switch.loopback.partition("/")[0] for switch in lab.topology.switches}
    assert peers == {
        switch.name: {
            link.end(switch.name).netdev: router_id[link.other(switch.name).node]
            for link in lab.topology.links_of(switch.name)
            if link.is_uplink
        }
        for switch in lab.topology.switches
    }
    assert len({switch.asn for switch in lab.topology.switches if switch.role == "ctsw"}) == 1
