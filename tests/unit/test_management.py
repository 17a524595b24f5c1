"""The guard of the management path: no fault on what people come in by. For real, in a network namespace of its own."""

import json
import subprocess
import sys

import pytest
from house import HOUSE

from inject.fault_plan import FaultSpec, plan
from inject.node import commands, management
from inject.node.actuator import Refused
from testbed.inventory import lab_inventory
from testbed.shipped import inventories

LOOK = """\
import json, os, socket, subprocess
from inject.node.management import management_interfaces
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
def told():
    argv = ["unshare", "-rn", sys.executable, "-c", LOOK]
    if subprocess.run(["unshare", "-rn", "ip", "tuntap", "add", "dev", "a", "mode", "tap"], check=False).returncode:
        pytest.skip("no network namespaces for this user here")
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=HOUSE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


USUAL = ["lo", "mgmt0"]


def test_what_carries_no_connection_is_free(told):
    assert told["none"] == told["odd"] == told["web"] == told["closed"] == USUAL


def test_the_address_of_ssh_connection_is_guarded(told):
    assert told["own"] == ["eth7", *USUAL]
    assert told["v6"] == ["eth8", *USUAL]


def test_so_is_every_open_ssh_connection(told):
    """Of a holder, which systemd starts, the environment has none; another port is known by who came in by it."""
    assert told["ssh"] == told["mapped"] == told["other_port"] == ["eth7", *USUAL]


def test_so_is_what_is_enslaved_to_the_vrf_mgmt(tmp_path):
    for name, master in (("eth0", "mgmt"), ("Ethernet0", "Vrf_red"), ("mgmt", None), ("Vrf_red", None)):
        (tmp_path / name).mkdir()
        if master:
            (tmp_path / name / "master").symlink_to(f"../{master}")
    assert management.of_vrf(str(tmp_path)) == {"eth0", "mgmt"}


def test_so_is_the_default_route_of_ipv6(told):
    assert told["v6_default"] == [*USUAL, "rail0"]


def test_what_stands_on_what(tmp_path):
    """As sysfs has it: `lower_NAME` for each, over as many floors as there are, also in a circle."""
    for name, lower in (("bond0.7", "bond0"), ("bond0", "eth2"), ("bond0", "eth3"), ("eth2", "bond0.7"), ("eth4", "x")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"lower_{lower}").symlink_to(f"../{lower}")
    assert management.below({"bond0.7", "gone"}, str(tmp_path)) == {"bond0.7", "bond0", "eth2", "eth3", "gone"}


def test_a_device_has_the_interfaces_of_its_virtual_functions(tmp_path):
    for path in ("0000:18:00.0/net/ens1f0np0", "0000:18:00.2/net/ens1f0v0", "0000:3b:00.0/net/ens2"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "0000:18:00.0" / "virtfn0").symlink_to("../0000:18:00.2")
    assert management.on_device("0000:18:00.0", str(tmp_path)) == {"ens1f0np0", "ens1f0v0"}
    assert management.on_device("0000:99:00.0", str(tmp_path)) == set()


@pytest.mark.parametrize("netdev", ["ens1f0np0", "a_name_of_before"])
def test_an_rnic_that_people_come_in_by_is_no_target_whatever_it_is_called(monkeypatch, netdev):
    """The inventory's name may be that of before a renaming: the PCIe device decides."""
    rack = lab_inventory.load(inventories() / "rack-h100.example.yml").topology
    spec = FaultSpec(kind="rnic.remove", target="host1:mlx5_0", for_s=5.0)
    args = {**plan(spec, rack, lab_kind="rack").request["args"], "guard": netdev, "needs": []}
    monkeypatch.setattr(commands, "on_device", lambda pcie: {"ens1f0np0"} if pcie == "0000:18:00.0" else set())
    monkeypatch.setattr(commands, "management_interfaces", lambda: {"lo", "ens1f0np0"})
    with pytest.raises(Refused, match="ens1f0np0 carries the management"):
        commands.CommandsActuator(**args).prepare()
