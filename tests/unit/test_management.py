"""The guard of the management path: no fault on what people come in by. For real, in a network namespace of its own."""

import json
import subprocess
import sys

import pytest
from house import HOUSE

from inject.node import management

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
