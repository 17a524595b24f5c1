"""Presets: the inventories in the repository equal the generator's output, and are complete."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import samples

from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.inventory.soft_presets import PRESETS, Preset, _tree, inventory_text
from faultbed.testbed.shipped import inventories


@pytest.mark.parametrize("name", PRESETS)
def test_preset_file_equals_the_generators_output(name):
    assert (inventories() / f"{name}.yml").read_text() == inventory_text(name)


@pytest.mark.parametrize("name", PRESETS)
def test_inventory_loads_with_the_presets_size(name):
    preset, inventory = PRESETS[name], load(inventories() / f"{name}.yml")
    topology = inventory.topology
    assert inventory.name == name
    assert len(topology.racks) == preset.zones * preset.racks
    assert len(topology.hosts) == preset.zones * preset.racks * preset.hosts_per_rack
    assert topology.zones == tuple(f"zone{number}" for number in range(1, preset.zones + 1))
    assert all(len(host.rnics) == preset.rnics_per_host and len(host.gpus) == 1 for host in topology.hosts)
    assert len(topology.uplinks) == preset.zones * preset.ctsws * (preset.racks + preset.atsws)
    assert inventory.carriers[0].switches == tuple(inventory.netns)


def test_preset_addresses_match_the_contract():
    topology = load(inventories() / "soft.yml").topology
    assert [rnic.address for rnic in topology.host_by_name["host2"].rnics] == ["10.77.1.5/31", "10.77.1.7/31"]
    assert topology.rnic_link("host3", "rxe0").a.address == "10.77.2.0/31"
    assert topology.host_by_name["host4"].front_end_address == "10.79.0.4/24"
    assert topology.switch_by_name["rtsw2"].asn == 65102
    assert topology.resolve("ctsw2:rtsw1").port.netdev == "rtsw1"


@pytest.mark.process
def test_ansible_itself_lists_the_default_inventory():
    program = Path(sys.executable).with_name("ansible-inventory")
    argv = [str(program), "-i", str(inventories() / "soft.yml"), "--list"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert '"host4"' in done.stdout
    assert "WARNING" not in done.stderr


def test_unknown_preset_is_named_with_the_known_ones():
    with pytest.raises(UsageError, match="soft-mini, soft, soft-3rack, soft-tapered"):
        inventory_text("hard")


@settings(deadline=None, max_examples=samples(30))
@given(
    racks=st.integers(1, 4),
    hosts=st.integers(1, 5),
    rnics=st.integers(1, 8),
    ctsws=st.integers(1, 4),
    zones=st.integers(1, 3),
    atsws=st.integers(0, 3),
)
def test_preset_macs_and_addresses_are_unique(racks, hosts, rnics, ctsws, zones, atsws):
    preset = Preset(
        name="x",
        summary="",
        racks=racks,
        hosts_per_rack=hosts,
        rnics_per_host=rnics,
        ctsws=ctsws,
        zones=zones,
        atsws=atsws,
    )
    macs, addresses = [], []

    def walk(node):
        if isinstance(node, dict):
            macs.extend([node["mac"]] if "mac" in node else [])
            addresses.extend([node["address"]] if "address" in node else [])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(_tree(preset))
    assert len(set(macs)) == len(macs)
    assert len(set(addresses)) == len(addresses)
    assert yaml.safe_load(yaml.safe_dump(_tree(preset))) == _tree(preset)
