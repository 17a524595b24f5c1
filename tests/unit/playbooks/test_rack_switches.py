"""Switches of racks: SONiC's configuration against a file checked by hand, applied and restored; PFC by dcb on Linux.

The tools of a switch are stand-ins that behave as their documentation says. Not yet run on hardware.
"""

from __future__ import annotations

import functools
import json
import sys

import pytest
from house import DATA
from served_tools import serve_script

from faultbed.testbed.shipped import playbooks

GOLDEN = DATA / "sonic"
HOSTVARS = {
    "faultbed_asn": 65101,
    "faultbed_loopback": "10.78.0.1/32",
    "faultbed_mtu": 9000,
    "faultbed_ports": [
        {"netdev": "Ethernet0", "mac": "02:fb:02:01:01:00", "address": "10.77.1.0/31", "peer": "host1",
         "rnic": "mlx5_0", "mtu": 9216, "speed_gbps": 400},
        {"netdev": "Ethernet128", "mac": "02:fb:03:00:01:01", "peer": "spine1", "mtu": 9216, "speed_gbps": 800},
    ],
    "faultbed_dscp_map": [
        {"dscp": 0, "priority": 0, "use": "best effort"},
        {"dscp": 26, "priority": 3, "use": "RoCE data"},
        {"dscp": 48, "priority": 6, "use": "CNP"},
    ],
    "faultbed_qos": {
        "profile": "dcqcn", "trust": "dscp", "roce_dscp": 26, "cnp_dscp": 48, "pfc_priorities": [3], "dcqcn": True,
        "ecn": {"min_kib": 1000, "max_kib": 4000, "max_percent": 20}, "pfc_watchdog_ms": 200,
        "buffer": {"xon_kib": 19, "xoff_kib": 160},
    },
}  # fmt: skip
FIELDS = ["IP_PROTOCOL", "DST_IP", "SRC_IP", "L4_DST_PORT", "L4_SRC_PORT"]

TOOL = """\
# One of SONiC's tools, over ConfigDB in a file, as redis has it: lists are joined, their names end in an at sign.
import json, pathlib, sys
tool, args, house = pathlib.Path(sys.argv[0]).name, sys.argv[1:], pathlib.Path({house!r})
file = house / "db.json"
db = json.loads(file.read_text())
with (house / "commands").open("a") as commands:
    print(tool, *args, file=commands)
if tool == "sonic-cfggen" and args[0] == "-y":
    print("broadcom")
elif tool == "sonic-cfggen":
    assert args == ["-d", "--print-data"], args
    out = {{}}
    for name, fields in db.items():
        table, _, key = name.partition("|")
        entry = {{f: v for f, v in fields.items() if f != "NULL"}}
        entry = {{f.rstrip("@"): v.split(",") if f.endswith("@") else v for f, v in entry.items()}}
        out.setdefault(table, {{}})[key] = entry
    print(json.dumps(out))
elif tool == "systemctl" and (house / "broken").exists():
    sys.exit("systemctl: killed")
elif tool == "vtysh":
    states = json.loads((house / "sessions").read_text())
    print(json.dumps({{"ipv4Unicast": {{"peers": {{peer: {{"state": state}} for peer, state in states.items()}}}}}}))
elif tool == "portstat":
    drops = house / "drops"
    print("Last cached time was 2026-11-27")
    print(json.dumps({{"Ethernet0": {{"RX_DRP": drops.read_text() if drops.exists() else "N/A", "TX_DRP": "1,204"}}}}))
    if (house / "dropping").exists() and "config load" in (house / "commands").read_text():
        drops.write_text(str(int(drops.read_text()) + 1) if drops.exists() else "0")
elif tool == "config" and args[0] == "apply-patch":
    assert args[1:3] == ["--dry-run", "--ignore-non-yang-tables"], args
    (house / "patch.json").write_text(pathlib.Path(args[3]).read_text())
    if (house / "rejects").exists():
        sys.exit("Error: Failed to apply patch due to: libyang[0]: Data validation failed")
elif tool == "config" and args[0] in ("checkpoint", "delete-checkpoint"):
    places = house / "checkpoints"
    names = set(places.read_text().split()) if places.exists() else set()
    names = names | {{args[1]}} if args[0] == "checkpoint" else names - {{args[1]}}
    places.write_text(" ".join(names))
elif tool == "config" and args[0] == "load" and (house / "refuses").exists():
    sys.exit("config: killed")
elif tool == "config" and args[0] == "load":
    assert args[1] == "-y", args
    for table, entries in json.loads(pathlib.Path(args[2]).read_text()).items():
        for key, fields in entries.items():
            new = {{f + "@" if isinstance(v, list) else f: ",".join(v) if isinstance(v, list) else v
                   for f, v in fields.items()}}
            db.setdefault(table + "|" + key, {{}}).update(new or {{"NULL": "NULL"}})
elif tool == "sonic-db-cli":
    where, verb, name, *rest = args
    if where == "STATE_DB":
        print((house / "capability").read_text())
    elif verb == "DEL":
        db.pop(name, None)
    elif verb == "HDEL":
        for field in rest:
            db[name].pop(field, None)
    elif verb == "HSET":
        db.setdefault(name, {{}}).update(zip(rest[::2], rest[1::2]))
file.write_text(json.dumps(db))
"""
BEFORE = {
    "DEVICE_METADATA|localhost": {"hostname": "sonic", "type": "LeafRouter", "hwsku": "x"},
    "PORT|Ethernet0": {"lanes": "1,2,3,4", "mtu": "9100", "admin_status": "up"},
    "PORT|Ethernet4": {"lanes": "5,6,7,8", "mtu": "9100"},
    "PORT|Ethernet128": {"lanes": "129,130", "mtu": "9100"},
    "PORT_QOS_MAP|Ethernet128": {"pfc_enable": "3,4", "dscp_to_tc_map": "AZURE"},
    "SWITCH_HASH|GLOBAL": {"ecmp_hash@": "DST_IP,SRC_IP", "lag_hash@": "DST_IP"},
    "INTERFACE|Ethernet0": {"NULL": "NULL"},
    "DSCP_TO_TC_MAP|AZURE": {"0": "1"},
    "BUFFER_PG|Ethernet0|0": {"profile": "ingress_lossy_profile"},
    "BUFFER_PG|Ethernet128|0": {"profile": "ingress_lossy_profile"},
    "BUFFER_POOL|ingress_lossless_pool": {"mode": "dynamic", "size": "33004032", "type": "ingress"},
    "BUFFER_POOL|egress_lossless_pool": {"mode": "static", "size": "32340992", "type": "egress"},
}


@pytest.fixture
def render(load):
    return load(playbooks() / "filter_plugins" / "faultbed_sonic.py").sonic_config_db


@pytest.fixture
def bgpd(load):
    return load(playbooks() / "module_utils" / "faultbed_fabric_bgp.py").fabric_bgpd_config


def test_sonic_tables_equal_the_hand_checked_file(render):
    made = render(HOSTVARS, "leaf1", FIELDS, hash_qp=True)
    assert made == json.loads((GOLDEN / "leaf.config_db.json").read_text())


def test_sonic_bgp_equals_the_hand_checked_file(bgpd):
    switch = {"name": "leaf1", **{key: HOSTVARS[f"faultbed_{key}"] for key in ("asn", "loopback", "ports")}}
    assert bgpd(switch) == (GOLDEN / "leaf.bgpd.conf").read_text()


def test_switch_announces_only_the_fabric(bgpd, linux):
    """The switch must not announce its management network: other switches would then reach it over the fabric.

    Run by hand with FRR 8.4.4 in network namespaces: before, a switch two hops away had a route to 192.0.2.0/24.
    """
    switch = {"name": "leaf1", **{key: HOSTVARS[f"faultbed_{key}"] for key in ("asn", "loopback", "ports")}}
    linux()
    for text in (bgpd(switch), (linux.root / "etc/frr/frr.conf").read_text()):
        assert "neighbor fabric route-map FAULTBED out" in text
        own = [line.split()[-1] for line in text.splitlines() if line.startswith("ip prefix-list FAULTBED")]
        assert own == ["10.77.1.0/31", "10.78.0.1/32"]
        assert "  redistribute connected\n" in text, "the line that the fault switch.withdraw takes away"


def test_sonic_tables_omit_sections_without_variables(render):
    qos = {key: value for key, value in HOSTVARS["faultbed_qos"].items() if key not in ("buffer", "ecn")}
    made = render(HOSTVARS | {"faultbed_qos": qos}, "leaf1")
    assert not {"SWITCH_HASH", "BUFFER_PROFILE", "BUFFER_PG", "BUFFER_QUEUE", "WRED_PROFILE"} & set(made)
    assert "RDMA_BTH_DEST_QP" not in render(HOSTVARS, "leaf1", FIELDS)["SWITCH_HASH"]["GLOBAL"]["ecmp_hash"]
    none = render(HOSTVARS | {"faultbed_qos": HOSTVARS["faultbed_qos"] | {"pfc_priorities": []}}, "leaf1")
    assert "BUFFER_PG" not in none, "a lossless buffer is of no use to a priority without PFC"


@pytest.fixture
def switch(tmp_path, monkeypatch, program, saved_state, changes, render):
    """Runs of the role over stand-ins for SONiC's tools; returns the changes that it reported, and keeps its result."""
    role, root = program("sonic_switch"), tmp_path / "root"
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sonic-cfggen", "sonic-db-cli", "config", "systemctl", "vtysh", "portstat"):
        serve_script(tools / name, TOOL.format(house=str(tmp_path)))
    (tmp_path / "db.json").write_text(json.dumps(BEFORE))
    (tmp_path / "capability").write_text(f"{{'HASH|NATIVE_HASH_FIELD_LIST': '{','.join(FIELDS)}', 'X': 'true'}}")
    (root / "etc/sonic/frr").mkdir(parents=True)
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("first\n")
    (root / "etc/sonic/frr/bgpd.conf").write_text("! theirs\n")
    (root / "etc/sonic/frr/frr.conf").write_text("password theirs\n")
    (root / "etc/sonic/frr/frr.conf").chmod(0o640)
    db = tmp_path / "db.json"
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    keep = functools.partial(saved_state, folder=str(tmp_path / "found"), root=str(root))
    monkeypatch.setattr(role, "SavedState", keep)
    (tmp_path / "sessions").write_text(json.dumps({"10.0.0.1": "Established", "10.0.0.3": "Active"}))
    waits = sys.modules["faultbed_switch_health"]
    for name in ("WINDOW_S", "RETRY_S"):
        monkeypatch.setattr(waits, name, 0.0)
    monkeypatch.setattr(waits, "DEADLINE_S", 0.2)

    def configure(*, load=True, save=False, check=False, fields=FIELDS, qp=False, variables=HOSTVARS, **edit):
        made = changes(check=check)
        bgp = edit.get("bgp", True)
        desired = {
            "tables": render(variables, "leaf1", fields, hash_qp=qp, bgp=bgp), "name": "leaf1", "load": load,
            "path": "/etc/sonic/faultbed.json", "bgp_path": "/etc/sonic/faultbed-bgpd.conf",
            "bgpd": "/etc/sonic/frr/bgpd.conf", "save": save, "bgp": bgp, "validate": True, "health": True, **edit,
        } | {key: variables[f"faultbed_{key}"] for key in ("asn", "loopback", "ports")}  # fmt: skip
        configure.result = role._configure(desired, made)
        return made.made

    def teardown(*, check=False):
        made = changes(check=check)
        keep("sonic_switch", made).restore()
        return made.made

    configure.role, configure.root, configure.teardown, configure.broken = role, root, teardown, tmp_path / "broken"
    configure.db = lambda: json.loads(db.read_text())
    configure.there = lambda **entries: db.write_text(json.dumps(BEFORE | entries))
    configure.commands = lambda: (
        (tmp_path / "commands").read_text().splitlines() if (tmp_path / "commands").exists() else []
    )
    configure.capability, configure.house = tmp_path / "capability", tmp_path
    return configure


def test_sonic_role_by_default_writes_files_and_loads_nothing(switch):
    assert switch(load=False, check=True) == switch(load=False)
    assert switch(load=False) == []
    assert json.loads((switch.root / "etc/sonic/faultbed.json").read_text())["PFC_WD"]
    assert (switch.root / "etc/sonic/faultbed-bgpd.conf").read_text() == (GOLDEN / "leaf.bgpd.conf").read_text()
    assert (switch.root / "etc/sonic/frr/bgpd.conf").read_text() == "! theirs\n"
    assert switch.commands() == []
    assert switch.db() == BEFORE


def test_sonic_role_loads_once_and_restores_the_old_state(switch):
    would = switch(check=True)
    assert switch.db() == BEFORE
    assert switch() == would
    assert switch.result["loaded"]
    now = switch.db()
    assert now["PORT|Ethernet0"] == {"lanes": "1,2,3,4", "mtu": "9216", "admin_status": "up", "speed": "400000"}
    assert now["SWITCH_HASH|GLOBAL"] == {"ecmp_hash@": ",".join(FIELDS), "lag_hash@": "DST_IP"}
    assert now["BUFFER_PG|Ethernet0|3"] == {"profile": "FAULTBED_LOSSLESS_IN"}
    assert now["PORT|Ethernet4"] == BEFORE["PORT|Ethernet4"]
    assert switch() == []
    done = [line.rpartition(" ")[0] for line in switch.commands() if line.startswith(("config", "systemctl"))]
    dry_run = "config apply-patch --dry-run --ignore-non-yang-tables"
    assert done == [dry_run, dry_run, "config checkpoint", "config load -y", "systemctl restart"]
    assert (switch.house / "checkpoints").read_text().startswith("faultbed-")
    assert switch.teardown(check=True)
    assert switch.db() == now
    switch.teardown()
    assert switch.db() == BEFORE
    assert (switch.root / "etc/sonic/frr/bgpd.conf").read_text() == "! theirs\n"
    assert not (switch.root / "etc/sonic/faultbed.json").exists()
    assert switch.commands()[-1] == "systemctl restart bgp", "last: it has to read its old file"
    assert (switch.house / "checkpoints").read_text() == ""
    assert switch.teardown() == []


def test_sonic_teardown_removes_references_before_their_entry(switch):
    """SONiC cannot remove a profile that a queue uses, nor an interface that has an address."""
    switch()
    switch.teardown()
    gone = [line.split()[3] for line in switch.commands() if "CONFIG_DB DEL" in line]
    assert gone.index("QUEUE|Ethernet0|3") < gone.index("WRED_PROFILE|FAULTBED_ROCE")
    assert gone.index("BUFFER_PG|Ethernet0|3") < gone.index("BUFFER_PROFILE|FAULTBED_LOSSLESS_IN")
    assert gone.index("PORT_QOS_MAP|Ethernet0") < gone.index("DSCP_TO_TC_MAP|FAULTBED")
    assert "INTERFACE|Ethernet0" not in gone, "that was there before"


def test_sonic_role_changed_values_keep_the_first_record(switch):
    switch()
    slower = json.loads(json.dumps(HOSTVARS))
    slower["faultbed_ports"][0]["mtu"] = 4200
    changed = switch(variables=slower)
    assert "ConfigDB PORT|Ethernet0: mtu=4200 (was 9216)" in changed
    assert len(changed) == 4, "the file, the checkpoint, the value, the load"
    assert switch.db()["PORT|Ethernet0"]["mtu"] == "4200"
    switch()
    switch.teardown()
    assert switch.db() == BEFORE


def test_sonic_saved_configuration_is_saved_again_after_teardown(switch):
    switch(save=True)
    switch.teardown()
    assert [line for line in switch.commands() if line == "config save -y"] == ["config save -y"] * 2
    assert switch.commands()[-1] == "config save -y"


def test_sonic_split_unified_mode_routing_is_restored(switch):
    """The bgp container removes frr.conf when it starts in split mode, and its content exists nowhere else."""
    theirs = switch.root / "etc/sonic/frr/frr.conf"
    switch(load=False)
    assert theirs.exists()
    switch()
    assert not theirs.exists()
    assert switch() == []
    switch.teardown()
    assert (theirs.read_text(), theirs.stat().st_mode & 0o777) == ("password theirs\n", 0o640)


def test_sonic_pfc_and_ecn_of_an_earlier_profile_are_switched_off(switch):
    """`config load` merges: a setting that is merely left out stays in force."""
    switch()
    assert switch.db()["PORT_QOS_MAP|Ethernet128"]["pfc_enable"] == "3"
    calm = HOSTVARS | {"faultbed_qos": HOSTVARS["faultbed_qos"] | {"pfc_priorities": [], "ecn": None}}
    switch(variables=calm)
    rows = [switch.db()[f"PORT_QOS_MAP|{port}"] for port in ("Ethernet0", "Ethernet128")]
    assert not [row for row in rows if {"pfc_enable", "pfcwd_sw_enable"} & set(row)], 'SONiC rejects "" up to 202411'
    assert switch.db()["WRED_PROFILE|FAULTBED_ROCE"]["ecn"] == "ecn_none"
    assert switch.db()["WRED_PROFILE|FAULTBED_ROCE"]["wred_green_enable"] == "false"
    assert switch(variables=calm) == []
    switch()
    assert switch.db()["WRED_PROFILE|FAULTBED_ROCE"]["ecn"] == "ecn_all"
    switch.teardown()
    assert switch.db() == BEFORE


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"VLAN_MEMBER|Vlan1000|Ethernet0": {"tagging_mode": "untagged"}}, "Ethernet0 is a member of Vlan1000"),
        ({"PORTCHANNEL_MEMBER|PortChannel1|Ethernet128": {"NULL": "NULL"}}, "Ethernet128 is a member of PortChannel1"),
        ({"BGP_NEIGHBOR|10.0.0.1": {"asn": "65200"}}, "ConfigDB has BGP_NEIGHBOR.*sonic_switch_bgp to false"),
        (
            {"INTERFACE|Ethernet128|10.0.0.0/31": {"NULL": "NULL"}},
            "Ethernet128 has the address 10.0.0.0/31, which stops an unnumbered BGP session: remove it",
        ),
    ],
)
def test_sonic_conflicting_entry_is_reported_before_any_write(switch, entries, words):
    switch.there(**entries)
    for check in (True, False):
        with pytest.raises(switch.role.StateError, match=words):
            switch(check=check)
    assert switch.db() == BEFORE | entries
    assert not (switch.root / "etc/sonic/faultbed.json").exists()


GENERATED = {
    f"{table}|{port}|{numbers}": {"profile": profile}
    for port in ("Ethernet0", "Ethernet4", "Ethernet128")
    for table, numbers, profile in (
        ("BUFFER_PG", "3-4", "NULL"), ("BUFFER_PG", "0", "ingress_lossy_profile"),
        ("BUFFER_QUEUE", "0-2", "egress_lossy_profile"), ("BUFFER_QUEUE", "3-4", "egress_lossless_profile"),
        ("BUFFER_QUEUE", "5-6", "egress_lossy_profile"),
    )
} | {
    f"QUEUE|{port}|{number}": {"scheduler": "scheduler.1" if number in (3, 4) else "scheduler.0"}
    for port in ("Ethernet0", "Ethernet4", "Ethernet128")
    for number in range(7)
}  # fmt: skip
"""What `config qos reload` makes (sonic-buildimage, buffers_config.j2 in dynamic mode, and qos_config.j2)."""


def test_sonic_role_is_merged_with_what_the_switch_generated(switch):
    """Each range is divided: our priority gets our profile, the rest of the range keeps its own."""
    switch.there(**GENERATED)
    assert switch(check=True) == switch()
    now = switch.db()
    assert {key: now[f"BUFFER_PG|{key}"] for key in ("Ethernet0|0", "Ethernet0|3", "Ethernet0|4")} == {
        "Ethernet0|0": {"profile": "ingress_lossy_profile"},
        "Ethernet0|3": {"profile": "FAULTBED_LOSSLESS_IN"},
        "Ethernet0|4": {"profile": "NULL"},
    }
    assert "BUFFER_PG|Ethernet0|3-4" not in now
    assert now["BUFFER_QUEUE|Ethernet128|4"] == {"profile": "egress_lossless_profile"}
    assert now["BUFFER_QUEUE|Ethernet128|0-2"] == {"profile": "egress_lossy_profile"}
    assert now["QUEUE|Ethernet0|3"] == {"scheduler": "scheduler.1", "wred_profile": "FAULTBED_ROCE"}
    assert now["QUEUE|Ethernet0|6"] == {"scheduler": "FAULTBED_STRICT"}, "CNPs do not wait behind data"
    assert {key: now[key] for key in GENERATED if "Ethernet4|" in key} == {
        key: GENERATED[key] for key in GENERATED if "Ethernet4|" in key
    }, "no port of the fabric"
    assert switch() == []
    switch.teardown()
    assert switch.db() == BEFORE | GENERATED


def test_sonic_role_divides_an_entry_for_several_ports(switch):
    both = {"QUEUE|Ethernet0,Ethernet4|2-4": {"scheduler": "x"}}
    switch.there(**both)
    switch()
    now = {key: value for key, value in switch.db().items() if key.startswith("QUEUE|")}
    assert now["QUEUE|Ethernet0|3"] == {"scheduler": "x", "wred_profile": "FAULTBED_ROCE"}
    assert {key for key, value in now.items() if value == {"scheduler": "x"}} == {
        "QUEUE|Ethernet0|2", "QUEUE|Ethernet0|4", "QUEUE|Ethernet4|2", "QUEUE|Ethernet4|3", "QUEUE|Ethernet4|4",
    }  # fmt: skip
    switch.teardown()
    assert switch.db() == BEFORE | both


def test_sonic_check_prints_every_value(switch):
    switch.there(**GENERATED)
    lines = switch(check=True)
    assert "ConfigDB PORT|Ethernet0: mtu=9216 (was 9100), speed=400000 (new)" in lines
    assert "ConfigDB BUFFER_PG|Ethernet0|3-4, Ethernet128|3-4: divided, was profile=NULL" in lines
    assert "ConfigDB QUEUE|Ethernet0|6, Ethernet128|6: scheduler=FAULTBED_STRICT (was scheduler.0)" in lines
    (classes,) = [line for line in lines if line.startswith("ConfigDB TC_TO_PRIORITY_GROUP_MAP")]
    assert classes.endswith("|FAULTBED: new: 0=0 1=0 2=0 3=3 4=0 5=0 6=0 7=0")


def test_sonic_switch_checks_the_changes_itself_before_they_are_made(switch):
    """The patch must lead to the same ConfigDB as the load, and a rejection leaves everything as it is."""
    switch.there(**GENERATED)
    (switch.house / "rejects").touch()
    for check in (True, False):
        with pytest.raises(switch.role.StateError, match=r"rejects the changes before they are made.*libyang"):
            switch(check=check)
    assert switch.db() == BEFORE | GENERATED
    assert not (switch.root / "etc/sonic/faultbed.json").exists()
    steps = json.loads((switch.house / "patch.json").read_text())
    assert {"op": "remove", "path": "/BUFFER_PG/Ethernet0|3-4"} in steps
    assert {"op": "add", "path": "/INTERFACE/Ethernet0|10.77.1.0~131", "value": {}} in steps
    there = {key.partition("|")[0] for key in BEFORE | GENERATED}
    assert not [step for step in steps if step["path"].lstrip("/") in there], "it would replace a whole table"
    (switch.house / "rejects").unlink()
    switch()
    made = patched(BEFORE | GENERATED, steps)
    assert {key: fields or {"NULL": "NULL"} for key, fields in made.items()} == switch.db()
    name = (switch.house / "checkpoints").read_text()
    assert f"`sudo config rollback {name}` returns to the ConfigDB before this run" in switch.result["notes"]


def patched(redis, steps):
    """Return ConfigDB in redis after a JSON patch of its tables: only whole tables, entries and fields occur."""
    result = {key: dict(fields) for key, fields in redis.items()}
    for step in steps:
        table, *rest = (word.replace("~1", "/").replace("~0", "~") for word in step["path"][1:].split("/"))
        entries = {rest[0]: step.get("value")} if rest else step["value"]
        for key, value in entries.items():
            name = f"{table}|{key}"
            if len(rest) == 2 and step["op"] == "remove":
                del result[name][rest[1]]
            elif len(rest) == 2:
                result[name].update(redis_fields({rest[1]: value}))
            elif step["op"] == "remove":
                del result[name]
            else:
                result[name] = redis_fields(value)
    return result


def redis_fields(fields):
    return {f"{k}@" if isinstance(v, list) else k: ",".join(v) if isinstance(v, list) else v for k, v in fields.items()}


def test_sonic_failed_load_is_reverted(switch):
    switch.there(**GENERATED)
    (switch.house / "refuses").touch()
    with pytest.raises(switch.role.StateError, match="config: killed; the changes are reverted"):
        switch()
    assert switch.db() == BEFORE | GENERATED


def test_sonic_switch_without_buffers_is_refused_before_any_write(switch):
    """Before `config qos reload` there are no pools, and a priority group without a profile stores nothing."""
    for missing, words in (
        ([key for key in BEFORE if "BUFFER" in key], "ConfigDB has no BUFFER_POOL: run `config qos reload`"),
        (["BUFFER_PG|Ethernet128|0"], "priority group 0 has no buffer at Ethernet128: run `config qos reload`"),
    ):
        bare = {key: value for key, value in BEFORE.items() if key not in missing}
        (switch.house / "db.json").write_text(json.dumps(bare))
        calm = HOSTVARS | {"faultbed_qos": {k: v for k, v in HOSTVARS["faultbed_qos"].items() if k != "buffer"}}
        with pytest.raises(switch.role.StateError, match=words):
            switch(variables=calm)
        assert switch.db() == bare


def test_sonic_switch_whose_bgp_does_not_return_ends_the_run(switch):
    """The next run checks it again although it changes nothing: what was not proven healthy stays unproven."""
    sessions = switch.house / "sessions"
    serve_script(switch.house / "bin" / "systemctl", "import pathlib\n"
                 f"pathlib.Path({str(sessions)!r}).write_text('{{\"10.0.0.1\": \"Connect\"}}')")  # fmt: skip
    for _ in range(2):
        with pytest.raises(switch.role.StateError, match=r"BGP with 10\.0\.0\.1 is not established again 0\.2 s"):
            switch()
    sessions.write_text(json.dumps({"Ethernet128": "Active"}))
    with pytest.raises(switch.role.StateError, match="none of 1 BGP sessions is not established again"):
        switch()
    sessions.write_text(json.dumps({"Ethernet128": "Established", "Ethernet132": "Active"}))
    assert switch() == []
    assert switch.result["notes"] == ["BGP with Ethernet132 is Active; the other end may not be configured yet"]


def test_sonic_switch_with_new_drops_ends_the_run(switch):
    (switch.house / "dropping").touch()
    (switch.house / "drops").write_text("7")
    with pytest.raises(switch.role.StateError, match="packets are dropped at Ethernet0, where none were before"):
        switch()


def test_sonic_role_leaves_the_routing_of_an_existing_fabric_alone(switch):
    """Numbered uplinks and SONiC's own BGP, as in its factory configuration."""
    theirs = {"BGP_NEIGHBOR|10.0.0.1": {"asn": "65200"}, "INTERFACE|Ethernet128|10.0.0.0/31": {"NULL": "NULL"}}
    switch.there(**theirs)
    switch(bgp=False)
    now = switch.db()
    assert {key: now[key] for key in theirs} == theirs
    assert now["DEVICE_METADATA|localhost"] == BEFORE["DEVICE_METADATA|localhost"]
    assert "INTERFACE|Ethernet128" not in now
    assert not [key for key in now if key.startswith("LOOPBACK_INTERFACE")]
    assert now["PORT|Ethernet128"]["mtu"] == "9216"
    assert (switch.root / "etc/sonic/frr/bgpd.conf").read_text() == "! theirs\n"
    assert (switch.root / "etc/sonic/frr/frr.conf").exists()
    assert "systemctl restart bgp" not in switch.commands()
    switch.teardown()
    assert switch.db() == BEFORE | theirs


def test_sonic_foreign_entries_beside_ours_are_no_conflict(switch):
    beside = {"QUEUE|Ethernet0|0-2": {"scheduler": "x"}, "QUEUE|Ethernet4|3-4": {"scheduler": "x"}}
    beside |= {"VLAN_MEMBER|Vlan1000|Ethernet4": {"tagging_mode": "untagged"}}
    switch.there(**beside)
    switch()
    assert switch() == []


def test_sonic_missing_port_is_not_created(switch):
    """Without lanes orchagent cannot create the port."""
    more = json.loads(json.dumps(HOSTVARS))
    more["faultbed_ports"][1]["netdev"] = "Ethernet132"
    with pytest.raises(switch.role.StateError, match="no port Ethernet132: break it out"):
        switch(variables=more)
    assert switch.db() == BEFORE


@pytest.mark.parametrize(("detect", "poll"), [(100, "100"), (200, "200"), (2000, "1000")])
def test_sonic_pfc_watchdog_polls_within_its_limits(render, detect, poll):
    made = render(HOSTVARS | {"faultbed_qos": HOSTVARS["faultbed_qos"] | {"pfc_watchdog_ms": detect}}, "leaf1")
    assert made["PFC_WD"]["GLOBAL"] == {"POLL_INTERVAL": poll}
    assert made["PFC_WD"]["Ethernet0"]["detection_time"] == str(detect)


def test_sonic_pfc_watchdog_out_of_range_is_rejected(render):
    for detect in (50, 6000):
        with pytest.raises(ValueError, match="SONiC takes 100 to 5000"):
            render(HOSTVARS | {"faultbed_qos": HOSTVARS["faultbed_qos"] | {"pfc_watchdog_ms": detect}}, "leaf1")


def test_sonic_run_interrupted_before_the_bgp_restart_is_completed(switch):
    """Files and tables already match, and the second run must still restart bgp."""
    switch.broken.write_text("")
    with pytest.raises(switch.role.StateError, match="systemctl restart bgp"):
        switch()
    switch.broken.unlink()
    assert switch(check=True) == switch() == ["bgp: systemctl restart bgp"]
    assert switch() == []
    switch.broken.write_text("")
    with pytest.raises(switch.role.StateError, match="not restored: bgp"):
        switch.teardown()
    switch.broken.unlink()
    assert switch.teardown() == ["bgp: systemctl restart bgp"]
    assert switch.db() == BEFORE


def test_sonic_bgp_restarts_for_a_mode_change_with_an_unchanged_file(switch):
    """After `config reload` of an unsaved configuration the container runs in the switch's old mode."""
    switch()
    switch.there()
    assert switch()[-1] == "bgp: systemctl restart bgp"


def test_sonic_loaded_configuration_can_be_saved_by_a_later_run(switch):
    switch()
    assert switch(save=True) == ["save: config save -y"]
    assert switch(save=True) == []


def test_sonic_hashes_on_the_qp_only_if_the_switch_lists_the_field(switch):
    with pytest.raises(switch.role.StateError, match="set sonic_switch_hash_qp to false"):
        switch(qp=True)
    assert switch.db() == BEFORE
    assert not (switch.root / "etc/sonic/faultbed.json").exists()
    switch.capability.write_text(f"{{'HASH|NATIVE_HASH_FIELD_LIST': '{','.join(FIELDS)},RDMA_BTH_DEST_QP'}}")
    switch(qp=True)
    assert switch.db()["SWITCH_HASH|GLOBAL"]["ecmp_hash@"].endswith(",RDMA_BTH_DEST_QP")


def test_sonic_switch_without_hash_capabilities_is_left_alone_with_a_note(switch):
    switch.capability.write_text("{}")
    switch()
    assert switch.db()["SWITCH_HASH|GLOBAL"] == BEFORE["SWITCH_HASH|GLOBAL"]
    assert switch.result["notes"][0] == f"SWITCH_HASH: the switch does not report that it hashes on {', '.join(FIELDS)}"


DCB = """\
# iproute2's dcb of one port, over its state in a file, as dcb-pfc(8) and dcb-app(8) have it.
import json, pathlib, sys
path = pathlib.Path({state!r})
state, words = json.loads(path.read_text()), [word for word in sys.argv[1:] if word != "-N"]
table = "pfc" if words[0] == "pfc" else "app"
pairs = [word.split(":") for word in words[5:]]
if words[1] == "show":
    print("prio-pfc" if table == "pfc" else "dscp-prio", *(f"{{k}}:{{v}}" for k, v in state[table].items()))
elif words[1] == "del":
    for key, value in pairs:
        assert state[table].pop(key) == value
else:
    state[table].update(pairs)
path.write_text(json.dumps(state))
"""


def test_linux_switch_sets_pfc_and_dscp_of_the_profile_and_is_restored(
    tmp_path,
    monkeypatch,
    load,
    saved_state,
    changes,
):
    role, state = load(playbooks() / "module_utils/faultbed_dcb.py"), tmp_path / "state.json"
    before = {"pfc": {str(number): "off" for number in range(8)}, "app": {"0": "0", "26": "1"}}
    state.write_text(json.dumps(before))
    serve_script(tmp_path / "dcb", DCB.format(state=str(state)))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def configure(*, check=False):
        made = changes(check=check)
        one = saved_state("frr_switch", made, folder=str(tmp_path / "found"))
        role.configure_pfc(one, "swp1", [3], otherwise="")
        role.configure_dscp(one, "swp1", HOSTVARS["faultbed_dscp_map"])
        return [line.partition(":")[0] for line in made.made]

    assert configure(check=True) == configure() == ["swp1 PFC", "swp1 DSCP 26", "swp1 DSCP 48"]
    assert configure() == []
    assert json.loads(state.read_text())["pfc"]["3"] == "on"
    assert json.loads(state.read_text())["app"] == {"0": "0", "26": "3", "48": "6"}
    saved_state("frr_switch", changes(check=False), folder=str(tmp_path / "found")).restore()
    assert json.loads(state.read_text()) == before


@pytest.fixture
def linux(tmp_path, monkeypatch, program, saved_state, changes):
    """Run the role frr_switch on a machine below tmp_path whose systemctl records its arguments."""
    role, root = program("frr_switch"), tmp_path / "root"
    for path in [*role.sysctls(0), "kernel/random/boot_id"]:
        (root / "proc/sys" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "proc/sys" / path).write_text("0\n")
    output = tmp_path / "commands"
    (tmp_path / "systemctl").write_text(f"#!/bin/sh\necho $@ >>{output}\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(role, "ip_json", lambda *_words: [{"ifname": port["netdev"]} for port in switch["ports"]])
    keep = functools.partial(saved_state, folder=str(tmp_path / "found"), root=str(root))
    monkeypatch.setattr(role, "SavedState", keep)
    switch = {"name": "leaf1", **{key: HOSTVARS[f"faultbed_{key}"] for key in ("asn", "loopback", "ports")}}
    switch |= {"ecmp_hash_seed": 7, "config": "/etc/frr/frr.conf", "daemons": "/etc/frr/daemons", "dcb": False}
    switch |= {"replace": False, "health": False}

    def configure(*, reload=False, check=False, **edit):
        made = changes(check=check)
        configure.result = role._configure(switch | {"qos": None, "dscp_map": [], "reload": reload} | edit, made)
        return made.made

    def teardown():
        made = changes(check=False)
        keep("frr_switch", made).restore()
        return made.made

    configure.teardown, configure.root, configure.role = teardown, root, role
    configure.reboot = lambda: (root / "proc/sys/kernel/random/boot_id").write_text("second\n")
    configure.commands = lambda: output.read_text().splitlines() if output.exists() else []
    return configure


def test_frr_reads_its_files_when_reload_is_enabled_later(linux):
    """The intended order on a rack: write and inspect the files first, then set frr_switch_reload."""
    linux()
    assert linux.commands() == []
    assert linux.result["notes"] == ["FRR has not read its new files: set frr_switch_reload, or restart it"]
    assert linux(reload=True, check=True) == ["FRR: systemctl restart frr"]
    assert linux(reload=True) == ["FRR: systemctl restart frr"]
    assert linux(reload=True) == []
    assert linux.result["notes"] == []
    assert linux.teardown()[-1] == "FRR: systemctl restart frr"
    assert linux.commands() == ["restart frr"] * 2


THEIRS = "frr defaults traditional\nrouter bgp 65001\n neighbor 10.0.0.1 remote-as 65002\nexit\n"


def test_frr_configuration_of_others_is_refused_and_kept(linux):
    path = linux.root / "etc/frr/frr.conf"
    path.parent.mkdir(parents=True)
    path.write_text(THEIRS)
    with pytest.raises(linux.role.StateError, match="has router bgp 65001, which this role would replace"):
        linux()
    assert path.read_text() == THEIRS
    linux(replace=True)
    assert path.read_text() != THEIRS
    assert linux() == [], "it is ours now"
    linux.teardown()
    assert path.read_text() == THEIRS


def test_frr_whose_sessions_do_not_return_after_the_restart_ends_the_run(linux, monkeypatch):
    waits = sys.modules["faultbed_switch_health"]
    states = iter([{"swp1": "Established"}, {"swp1": "Active"}, {"swp1": "Active"}])
    monkeypatch.setattr(waits, "_states", lambda: next(states, {"swp1": "Active"}))
    monkeypatch.setattr(waits, "_kernel_drops", dict)
    for name, value in (("WINDOW_S", 0.0), ("RETRY_S", 0.0), ("DEADLINE_S", 0.1)):
        monkeypatch.setattr(waits, name, value)
    with pytest.raises(linux.role.StateError, match=r"BGP with swp1 is not established again.*frr_switch_health"):
        linux(reload=True, health=True)


def test_frr_that_read_its_files_at_boot_is_restarted_only_by_teardown(linux):
    linux()
    linux.reboot()
    assert linux(reload=True) == []
    assert linux.commands() == []
    linux.teardown()
    assert linux.commands() == ["restart frr"]


def test_linux_switch_keeps_forwarding_and_hash_settings_across_a_restart(linux):
    linux()
    (kept,) = (linux.root / "etc/sysctl.d").iterdir()
    assert "net/ipv4/ip_forward = 1\n" in kept.read_text()
    assert "net/ipv4/fib_multipath_hash_seed = 7\n" in kept.read_text()
    linux.teardown()
    assert not (linux.root / "etc/sysctl.d").exists()
    assert (linux.root / "proc/sys/net/ipv4/ip_forward").read_text().strip() == "0"


def test_linux_switch_kernel_without_a_hash_seed_is_a_note(linux):
    """Cumulus Linux 5, Debian 12 and Ubuntu 24.04 have kernels before 6.11."""
    (linux.root / "proc/sys/net/ipv4/fib_multipath_hash_seed").unlink()
    assert linux(check=True) == linux()
    assert "has no seed for its ECMP hash" in linux.result["notes"][0]
    assert (linux.root / "proc/sys/net/ipv4/fib_multipath_hash_policy").read_text() == "1"


def test_frr_that_has_never_read_our_files_is_left_alone(linux):
    linux()
    linux.teardown()
    assert linux.commands() == []


def test_linux_switch_port_without_dcb_is_reported(load, saved_state, changes, monkeypatch):
    role = load(playbooks() / "module_utils/faultbed_dcb.py")
    monkeypatch.setattr(role, "run", lambda _argv: "")
    with pytest.raises(role.StateError, match="set frr_switch_dcb to false"):
        one = saved_state("frr_switch", changes(check=True), folder="/nonexistent")
        role.configure_pfc(one, "swp1", [3], otherwise="set frr_switch_dcb to false")
