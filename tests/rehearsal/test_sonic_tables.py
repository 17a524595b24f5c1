"""The role sonic_switch over ConfigDB in a real redis-server: provisioned twice, torn down, compared by dumps.

What is a stand-in: SONiC's command line. Each tool does to redis what its source says, in a few lines: sonic-cfggen and
`config load` (sonic-config-engine, sonic-utilities config/main.py), sonic-db-cli (sonic-swss-common); `config
apply-patch --dry-run` accepts any JSON patch, and vtysh and portstat print a healthy switch.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import time

import pytest
from rack_state import RACK
from served_tools import serve_script

from faultbed.testbed.inventory.ansible_listing import listing
from faultbed.testbed.shipped import playbooks

pytestmark = [pytest.mark.process, pytest.mark.skipif(not shutil.which("redis-server"), reason="needs redis-server")]

TOOL = """\
import json, pathlib, subprocess, sys
tool, args = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
def redis(*words):
    argv = ["redis-cli", "-s", {socket!r}, "-n", "4", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout
def fields_of(key):
    lines = redis("HGETALL", key).splitlines()
    return dict(zip(lines[::2], lines[1::2]))
if tool == "sonic-cfggen" and args[0] == "-y":
    print("broadcom")
elif tool == "sonic-cfggen":
    out = {{}}
    for name in redis("KEYS", "*").split():
        table, _, key = name.partition("|")
        entry = {{f: v for f, v in fields_of(name).items() if f != "NULL"}}
        out.setdefault(table, {{}})[key] = {{
            f.rstrip("@"): v.split(",") if f.endswith("@") else v for f, v in entry.items()
        }}
    print(json.dumps(out))
elif tool == "sonic-db-cli" and args[0] == "STATE_DB":
    print("{{}}")
elif tool == "sonic-db-cli":
    redis(*args[1:])
elif tool == "config" and args[0] == "load":
    for table, entries in json.loads(pathlib.Path(args[2]).read_text()).items():
        for key, fields in entries.items():
            pairs = [(f + "@", ",".join(v)) if isinstance(v, list) else (f, v) for f, v in fields.items()]
            redis("HSET", table + "|" + key, *(word for pair in pairs or [("NULL", "NULL")] for word in pair))
elif tool == "config" and args[0] == "apply-patch":
    json.loads(pathlib.Path(args[-1]).read_text())
elif tool == "vtysh":
    print(json.dumps({{"ipv4Unicast": {{"peers": {{"Ethernet128": {{"state": "Established"}}}}}}}}))
elif tool == "portstat":
    print("{{}}")
"""
SWITCH = "rtsw1"


@pytest.fixture
def redis(tmp_path):
    """Run redis-server on a socket; return a client."""
    socket = tmp_path / "redis.sock"
    argv = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 30
        while not socket.exists() and time.monotonic() < deadline:
            time.sleep(0.05)

        def client(*words):
            argv = ["redis-cli", "-s", str(socket), "-n", "4", *words]
            return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()

        client.socket = str(socket)
        yield client
        process.terminate()


def dump(redis):
    """Return all of ConfigDB, by key."""
    pairs = {key: redis("HGETALL", key) for key in redis("KEYS", "*")}
    return {key: dict(zip(lines[::2], lines[1::2], strict=True)) for key, lines in pairs.items()}


def generated(ports):
    """Yield what a switch has after `config qos reload` (buffers_config.j2 in dynamic mode, qos_config.j2)."""
    yield "DEVICE_METADATA|localhost", {"hostname": "sonic", "type": "LeafRouter"}
    yield "BUFFER_POOL|ingress_lossless_pool", {"mode": "dynamic", "type": "ingress"}
    for number, port in enumerate(ports):
        yield f"PORT|{port}", {"lanes": f"{number}", "mtu": "9100", "admin_status": "up"}
        yield f"BUFFER_PG|{port}|3-4", {"profile": "NULL"}
        yield f"BUFFER_PG|{port}|0", {"profile": "ingress_lossy_profile"}
        yield f"PORT_QOS_MAP|{port}", {"pfc_enable": "3,4", "pfcwd_sw_enable": "3,4", "dscp_to_tc_map": "AZURE"}
        for queue in range(7):
            yield f"QUEUE|{port}|{queue}", {"scheduler": "scheduler.1" if queue in {3, 4} else "scheduler.0"}


def test_sonic_switch_provisioned_twice_and_torn_down_is_as_before(
    tmp_path, monkeypatch, redis, load, program, saved_state, changes
):
    role, root = program("sonic_switch"), tmp_path / "root"
    (tmp_path / "bin").mkdir()
    for name in ("sonic-cfggen", "sonic-db-cli", "config", "systemctl", "vtysh", "portstat"):
        serve_script(tmp_path / "bin" / name, TOOL.format(socket=redis.socket))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (root / "etc/sonic/frr").mkdir(parents=True)
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("first\n")
    keep = functools.partial(saved_state, folder=str(tmp_path / "found"), root=str(root))
    monkeypatch.setattr(role, "SavedState", keep)
    monkeypatch.setattr(sys.modules["faultbed_switch_health"], "WINDOW_S", 0.0)
    hostvars = listing(RACK.path)["_meta"]["hostvars"][SWITCH]
    ports = hostvars["faultbed_ports"] = hostvars["faultbed_ports"][:2] + hostvars["faultbed_ports"][-2:]
    for key, fields in generated([port["netdev"] for port in ports]):
        redis("HSET", key, *(word for pair in fields.items() for word in pair))
    before = dump(redis)
    render = load(playbooks() / "filter_plugins" / "faultbed_sonic.py").sonic_config_db

    def provision():
        made = changes(check=False)
        desired = {
            "tables": render(hostvars, SWITCH), "name": SWITCH, "asn": hostvars["faultbed_asn"], "ports": ports,
            "loopback": hostvars["faultbed_loopback"], "path": "/etc/sonic/faultbed.json",
            "bgp_path": "/etc/sonic/faultbed-bgpd.conf", "bgpd": "/etc/sonic/frr/bgpd.conf",
            **dict.fromkeys(("load", "bgp", "validate", "health"), True), "save": False,
        }  # fmt: skip
        role._configure(json.loads(json.dumps(desired)), made)
        return made.made

    assert provision()
    now = dump(redis)
    assert now["BUFFER_PG|Ethernet0|3-4"] == {"profile": "NULL"}, "no buffer is given, so that SONiC computes it"
    assert now["QUEUE|Ethernet0|6"] == {"scheduler": "FAULTBED_STRICT"}
    assert provision() == []
    assert dump(redis) == now
    keep("sonic_switch", changes(check=False)).restore()
    assert dump(redis) == before
