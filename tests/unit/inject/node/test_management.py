"""The guard of the management path: no fault on the interface of a user's connection. In a real network namespace."""

import json
import subprocess
import sys

import pytest
from house import HOUSE

from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.node import commands, management
from faultbed.inject.node.actuator import Refused
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventories

LOOK = """\
import json, os, socket, subprocess
from faultbed.inject.node.management import management_interfaces
os.environ.pop("SSH_CONNECTION", None)
ip = lambda line: subprocess.run(["ip", *line.split()], check=True)
ip("link set dev lo up")
for name, address in (("rail0", "10.77.1.1/31"), ("eth7", "192.0.2.11/24"), ("eth8", "2001:db8::1/64")):
    ip(f"tuntap add dev {name} mode tap")
    ip(f"link set dev {name} up")
    ip(f"address add {address} dev {name} nodad" if ":" in address else f"address add {address} dev {name}")
told = {"none": sorted(management_interfaces())}
for key, said in (("own", "192.0.2.1 40000 192.0.2.11 22"), ("v6", "::1 4 2001:db8::1 22"), ("odd", "nonsense")):
    os.environ["SSH_CONNECTION"] = said
    told[key] = sorted(management_interfaces())
del os.environ["SSH_CONNECTION"]
def open_now(port, family=socket.AF_INET, bound="192.0.2.11"):
    with socket.create_server((bound, port), family=family, dualstack_ipv6=family == socket.AF_INET6):
        with socket.create_connection(("192.0.2.11", port)):
            return sorted(management_interfaces())
told |= {"ssh": open_now(22), "mapped": open_now(22, socket.AF_INET6, "::"), "web": open_now(443)}
other = subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={"SSH_CONNECTION": "192.0.2.1 1 192.0.2.11 2222"})
told |= {"other_port": open_now(2222), "closed": sorted(management_interfaces())}
other.communicate()
ip("link set rail0 up")
ip("-6 route add default dev rail0")
told["v6_default"] = sorted(management_interfaces())
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def guarded():
    argv = ["unshare", "-rn", sys.executable, "-c", LOOK]
    if subprocess.run(["unshare", "-rn", "ip", "tuntap", "add", "dev", "a", "mode", "tap"], check=False).returncode:
        pytest.skip("no network namespaces for this user here")
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=HOUSE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


USUAL = ["lo", "mgmt0"]


def test_management_interfaces_without_connection_are_the_usual(guarded):
    assert guarded["none"] == guarded["odd"] == guarded["web"] == guarded["closed"] == USUAL


def test_management_address_of_the_ssh_connection_is_guarded(guarded):
    assert guarded["own"] == ["eth7", *USUAL]
    assert guarded["v6"] == ["eth8", *USUAL]


def test_management_open_ssh_connections_are_guarded(guarded):
    """A holder started by systemd has no SSH variables; another SSH port is recognised by its established
    connections.
    """
    assert guarded["ssh"] == guarded["mapped"] == guarded["other_port"] == ["eth7", *USUAL]


def test_management_members_of_the_mgmt_vrf_are_guarded(tmp_path):
    for name, master in (("eth0", "mgmt"), ("Ethernet0", "Vrf_red"), ("mgmt", None), ("Vrf_red", None)):
        (tmp_path / name).mkdir()
        if master:
            (tmp_path / name / "master").symlink_to(f"../{master}")
    assert management.of_vrf(str(tmp_path)) == {"eth0", "mgmt"}


def test_management_interface_of_the_ipv6_default_route_is_guarded(guarded):
    assert guarded["v6_default"] == [*USUAL, "rail0"]


def test_management_below_follows_stacked_interfaces(tmp_path):
    """sysfs has `lower_NAME` for each lower interface; any depth is followed, also in a cycle."""
    for name, lower in (("bond0.7", "bond0"), ("bond0", "eth2"), ("bond0", "eth3"), ("eth2", "bond0.7"), ("eth4", "x")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"lower_{lower}").symlink_to(f"../{lower}")
    assert management.below({"bond0.7", "gone"}, str(tmp_path)) == {"bond0.7", "bond0", "eth2", "eth3", "gone"}


def test_management_device_includes_its_virtual_functions(tmp_path):
    for path in ("0000:18:00.0/net/ens1f0np0", "0000:18:00.2/net/ens1f0v0", "0000:3b:00.0/net/ens2"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "0000:18:00.0" / "virtfn0").symlink_to("../0000:18:00.2")
    assert management.on_device("0000:18:00.0", str(tmp_path)) == {"ens1f0np0", "ens1f0v0"}
    assert management.on_device("0000:99:00.0", str(tmp_path)) == set()


@pytest.mark.parametrize("netdev", ["ens1f0np0", "a_name_of_before"])
def test_management_rnic_is_no_target_under_any_name(monkeypatch, netdev):
    """The inventory may have the name from before a renaming: the PCIe device decides."""
    rack = lab_inventory.load(inventories() / "rack-h100.example.yml").topology
    spec = FaultSpec(kind="rnic.remove", target="host1:mlx5_0", for_s=5.0)
    args = {**plan(spec, rack, lab_kind="rack").request["args"], "guard": netdev, "needs": []}
    monkeypatch.setattr(commands, "on_device", lambda pcie: {"ens1f0np0"} if pcie == "0000:18:00.0" else set())
    monkeypatch.setattr(commands, "management_interfaces", lambda: {"lo", "ens1f0np0"})
    with pytest.raises(Refused, match="ens1f0np0 carries the management"):
        commands.CommandsActuator(**args).prepare()
