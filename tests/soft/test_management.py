"""The guard of the management path, on a kernel with bonds and VLANs. The unit test of this name covers the rest."""

from __future__ import annotations

import json
import shlex

import pytest

from faultbed.testbed.remote import node_archive

pytestmark = pytest.mark.soft

LOOK = """\
import json, os, subprocess
from faultbed.inject.node.management import management_interfaces
for line in (
    "link set lo up", "link add eth8 type dummy", "link add eth9 up type dummy",
    "link add bond0 type bond", "link set eth8 master bond0", "link set bond0 up",
    "link add link bond0 name bond0.7 type vlan id 7", "link set bond0.7 up",
    "address add 2001:db8:7::1/64 dev bond0.7 nodad",
):
    subprocess.run(["ip", *line.split()], check=True)
os.environ["SSH_CONNECTION"] = "::1 4 2001:db8:7::1 22"
print(json.dumps(sorted(management_interfaces())))
"""


def test_bond_members_below_a_management_vlan_are_guarded(lab):
    host = lab.topology.hosts[0].name
    lab.ensure_code(host)
    # Without this option, the module creates its own bond in the machine's namespace.
    lab.node(host).run(["modprobe", "bonding", "max_bonds=0"])
    look = shlex.join(["env", f"PYTHONPATH={node_archive.archive().folder}", "python3", "-c", LOOK])
    # sysfs shows the interfaces of the namespace in which it was mounted.
    text = f"mount -t sysfs sysfs /sys && {look}"
    output = json.loads(lab.node(host).run(["unshare", "--net", "--mount", "sh", "-c", text]).stdout)
    assert output == ["bond0", "bond0.7", "eth8", "lo", "mgmt0"], "eth9 carries nothing"
