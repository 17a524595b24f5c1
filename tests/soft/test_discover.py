"""Discovery on a real lab: from what its machines say, its inventory comes out again, whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from testbed.discover import live
from testbed.discover.draft import draft, text
from testbed.inventory import lab_inventory

pytestmark = pytest.mark.soft


def test_discover_rebuilds_the_inventory_from_the_machines(lab, tmp_path):
    nodes = {name: lab.node(name) for name in lab.nodes()}
    silent = {}
    inventory_draft = draft(live.ask(nodes, lambda _: None, silent=silent), name=lab.name)
    assert (inventory_draft.open, silent) == ((), {})
    path = tmp_path / "drafted.yml"
    path.write_text(text(inventory_draft))
    known = lab.inventory_model
    assert replace(lab_inventory.load(path), path=known.path) == known
    links = lab.topology.links
    assert sum(inventory_draft.cables.values()) == len(links)
