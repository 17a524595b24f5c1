"""Switches of racks: SONiC's configuration against a file checked by hand, applied and restored; PFC by dcb on Linux.

The tools of a switch are stand-ins that behave as their documentation says. Not yet run on hardware.
"""

from __future__ import annotations

import functools
import json

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
elif tool == "config" and args[0] == "load":
    assert args[1] == "-y", args
    for table, entries in json.loads((house / "root" / args[2].lstrip("/")).read_text()).items():
        for key, fields in entries.items():
            new = {{f + "@" if isinstance(v, list) else f: ",".join(v) if isinstance(v, list) else v
                   for f, v in fields.items()}}
            db.setdefault(table + "|" + key, {{}}).update(new or {{"NULL": "NULL"}})
elif tool == "sonic-db-cli":
    where, verb, name, *rest = args
    if where == "STATE_DB":
        print((house / "capability").read_text())
    elif verb == "DEL":
        del db[name]
    elif verb == "HDEL":
        del db[name][rest[0]]
    elif verb == "HSET":
        db[name].update({{rest[0]: rest[1]}})
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
    for name in ("sonic-cfggen", "sonic-db-cli", "config", "systemctl"):
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

    def configure(*, load=True, save=False, check=False, fields=FIELDS, qp=False, variables=HOSTVARS):
        made = changes(check=check)
        desired = {
            "tables": render(variables, "leaf1", fields, hash_qp=qp), "name": "leaf1", "load": load, "save": save,
            "path": "/etc/sonic/faultbed.json", "bgp_path": "/etc/sonic/faultbed-bgpd.conf",
            "bgpd": "/etc/sonic/frr/bgpd.conf",
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
    configure.capability = tmp_path / "capability"
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
    assert switch.result == {"loaded": True, "notes": []}
    now = switch.db()
    assert now["PORT|Ethernet0"] == {"lanes": "1,2,3,4", "mtu": "9216", "admin_status": "up", "speed": "400000"}
    assert now["SWITCH_HASH|GLOBAL"] == {"ecmp_hash@": ",".join(FIELDS), "lag_hash@": "DST_IP"}
    assert now["BUFFER_PG|Ethernet0|3"] == {"profile": "FAULTBED_LOSSLESS_IN"}
    assert now["PORT|Ethernet4"] == BEFORE["PORT|Ethernet4"]
    assert switch() == []
    assert [line for line in switch.commands() if line.startswith(("config", "systemctl"))] == [
        "config load -y /etc/sonic/faultbed.json", "systemctl restart bgp",
    ]  # fmt: skip
    assert switch.teardown(check=True)
    assert switch.db() == now
    switch.teardown()
    assert switch.db() == BEFORE
    assert (switch.root / "etc/sonic/frr/bgpd.conf").read_text() == "! theirs\n"
    assert not (switch.root / "etc/sonic/faultbed.json").exists()
    assert switch.commands()[-1] == "systemctl restart bgp", "last: it has to read its old file"
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
    assert len(switch(variables=slower)) == 2
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
    assert {switch.db()[f"PORT_QOS_MAP|{port}"]["pfc_enable"] for port in ("Ethernet0", "Ethernet128")} == {""}
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
        ({"QUEUE|Ethernet0|3-4": {"scheduler": "x"}}, r"QUEUE\|Ethernet0\|3-4 overlaps our entries: split it"),
        (
            {"BUFFER_PG|Ethernet0,Ethernet128|3": {"profile": "x"}},
            r"BUFFER_PG\|Ethernet0,Ethernet128\|3 overlaps our entries",
        ),
        ({"BGP_NEIGHBOR|10.0.0.1": {"asn": "65200"}}, "ConfigDB has BGP_NEIGHBOR"),
    ],
)
def test_sonic_conflicting_entry_is_reported_before_any_write(switch, entries, words):
    switch.there(**entries)
    for check in (True, False):
        with pytest.raises(switch.role.StateError, match=words):
            switch(check=check)
    assert switch.db() == BEFORE | entries
    assert not (switch.root / "etc/sonic/faultbed.json").exists()


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
    assert switch.result["notes"] == [f"SWITCH_HASH: the switch does not report that it hashes on {', '.join(FIELDS)}"]


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

    def configure(*, reload=False, check=False, **edit):
        made = changes(check=check)
        configure.result = role._configure(switch | {"qos": None, "dscp_map": [], "reload": reload} | edit, made)
        return made.made

    def teardown():
        made = changes(check=False)
        keep("frr_switch", made).restore()
        return made.made

    configure.teardown, configure.root = teardown, root
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
