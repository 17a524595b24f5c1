"""A fabric with synthetic probes."""

from __future__ import annotations

from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventories

SOFT = lab_inventory.load(inventories() / "soft.yml").topology
TOR = {host.name: SOFT.rnic_link(host.name, host.rnics[0].name).a.node for host in SOFT.hosts}
