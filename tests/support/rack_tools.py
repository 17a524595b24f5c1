"""Stand-ins for the tools of a rack, one program under many names: their documented output, over a state in a file.

They implement the documented behaviour of the commands that faultbed's plans use, and reject all others.
"""

import fnmatch
import functools
import json
import re
import sys
from pathlib import Path

from served_tools import serve

NAMES = (
    "sonic-db-cli", "sonic-cfggen", "config", "aclshow", "counterpoll", "vtysh", "docker", "systemctl", "mlxlink",
    "mlxconfig", "nvidia-smi", "dcgmi",
)  # fmt: skip
START = {
    "CONFIG_DB": {
        "PORT|Ethernet0": {"mtu": "9216", "admin_status": "up"},
        "SWITCH_HASH|GLOBAL": {"ecmp_hash@": "DST_IP,SRC_IP,IP_PROTOCOL,L4_DST_PORT,L4_SRC_PORT"},
        # sonic-buildimage, files/build_templates/init_cfg.json.j2
        "FLEX_COUNTER_TABLE|ACL": {"FLEX_COUNTER_STATUS": "enable", "POLL_INTERVAL": "10000"},
        "FEATURE|bgp": {"state": "enabled", "auto_restart": "enabled"},
    },
    "STATE_DB": {
        "ACL_STAGE_CAPABILITY_TABLE|EGRESS": {"action_list": "PACKET_ACTION,COUNTER"},
        "ACL_STAGE_CAPABILITY_TABLE|INGRESS": {"action_list": "PACKET_ACTION,MIRROR_INGRESS_ACTION"},
        "SWITCH_CAPABILITY|switch": {"ECMP_HASH_CAPABLE": "true"},
    },
    "asic": "broadcom",
    "bgpd": "S",
    "zebra": "S",
    "starts": 1,
    "redistributes": True,
    "port": "Active",
    "keep_up": "False(0)",
    "mixers": ["0x1e", "0x3"],
    "lock": None,
    "busy": True,
    "limit": 700,
    "persistence": "Enabled",
    "drained": False,
    "computing": [],
    "daemons": [],
    "reasons": 0,
    "pci": None,
    "dcgm": {"230": "0", "310": "0", "311": "0", "395": "0", "396": "0", "150": "41"},
    "packets": 0,
}


def install(folder):
    """Put the stand-ins into a folder, and return the path of their state, which is that of a healthy rack."""
    state = folder / "state.json"
    state.write_text(json.dumps(START))
    for name in NAMES:
        serve(folder / name, functools.partial(_answer, name, state))
    return state


def _answer(name, state_path, argv, out):
    state = json.loads(state_path.read_text())
    printed = globals()["do_" + name.lower().replace("-", "_")](state, argv)
    state_path.write_text(json.dumps(state))
    print("" if printed is None else printed, file=out)


def do_sonic_db_cli(state, argv):  # noqa: PLR0911 - one for each table
    name, command, key, *rest = argv
    if name == "APPL_DB":
        # portmgrd: the port's configuration, taken over
        return state["CONFIG_DB"][key.replace("PORT_TABLE:", "PORT|")].get(rest[0])
    if name == "COUNTERS_DB":
        return {"Ethernet0": "oid:0x1000000000001"}[rest[0]]
    if name == "ASIC_DB":
        return _HASHES if command == "KEYS" else _asic(state.get("programmed") or state["CONFIG_DB"], key, rest[0])
    if command == "KEYS":
        return "\n".join(sorted(each for each in state[name] if fnmatch.fnmatchcase(each, key))) or None
    if name == "STATE_DB" and key.startswith("ACL_RULE_TABLE|"):
        table, rule = key.split("|")[1:]
        there = f"ACL_TABLE|{table}" in state["CONFIG_DB"] and f"ACL_RULE|{table}|{rule}" in state["CONFIG_DB"]
        return "Active" if there else None
    tables = state[name]
    if command == "HGET":
        return tables.get(key, {}).get(rest[0])
    if command == "HSET":
        tables.setdefault(key, {}).update(zip(rest[::2], rest[1::2], strict=True))
        return len(rest) // 2
    if command == "HDEL":
        tables.get(key, {}).pop(rest[0], None)
        return 1
    assert command == "DEL"
    return int(tables.pop(key, None) is not None)


_HASHES = "\n".join(f"ASIC_STATE:SAI_OBJECT_TYPE_HASH:oid:0x1c00000000000{number}" for number in (1, 2))
"""Keys of the hash objects of ECMP and of LAGs."""


def _asic(config, key, field):
    """Return the ASIC state that orchagent derives from a port's scheduler and the hash (sonic-swss, qosorch.cpp).

    `programmed` of the state is the configuration that an orchagent has taken that takes no other one.
    """
    if "SAI_OBJECT_TYPE_HASH" in key:
        fields = config["SWITCH_HASH|GLOBAL"]["ecmp_hash@"] if key.endswith("1") else "SRC_MAC,DST_MAC"
        names = [f"SAI_NATIVE_HASH_FIELD_{name}" for name in fields.split(",")]
        return f"{len(names)}:{','.join(names)}"
    name = config.get("PORT_QOS_MAP|Ethernet0", {}).get("scheduler")
    if "SAI_OBJECT_TYPE_PORT" in key:
        return "oid:0x160000000007f1" if name else "oid:0x0"
    if "SAI_OBJECT_TYPE_SCHEDULER:oid:0x16" in key and field == "SAI_SCHEDULER_ATTR_MAX_BANDWIDTH_RATE":
        return config.get(f"SCHEDULER|{name}", {}).get("pir")
    return None


def do_sonic_cfggen(state, argv):
    assert argv == ["-y", "/etc/sonic/sonic_version.yml", "-v", "asic_type"]
    return state["asic"]


def do_counterpoll(state, argv):
    area, field, interval = argv
    assert (area, field) == ("acl", "interval")
    if not 1000 <= int(interval) <= 30000:
        sys.exit(f"Error: Invalid value for 'POLL_INTERVAL': {interval} is not in the range 1000<=x<=30000.")
    state["CONFIG_DB"].setdefault("FLEX_COUNTER_TABLE|ACL", {})["POLL_INTERVAL"] = interval


def do_vtysh(state, argv):
    """FRR's shell, in the bgp container: one line of bgpd's configuration."""
    words = [word for word in argv if word not in ("-c", "-d", "bgpd")]
    printed = None
    if words[0] == "show running-config":
        printed = "router bgp 65101\n address-family ipv4 unicast\n" + (
            "  redistribute connected\n" if state["redistributes"] else ""
        )
        words = words[1:]
    if words:
        assert words[:2] == ["configure terminal", "router bgp 65101"], words
        state["redistributes"] = {"no redistribute connected": False, "redistribute connected": True}[words[-1]]
    return printed


def do_config(state, argv):
    if argv[:3] == ["feature", "autorestart", "bgp"]:
        state["CONFIG_DB"]["FEATURE|bgp"]["auto_restart"] = argv[3]
        return
    area, field, port, *rest = argv
    assert area == "interface"
    entry = state["CONFIG_DB"][f"PORT|{port}"]
    entry.update({"mtu": rest[0]} if field == "mtu" else {"admin_status": {"shutdown": "down", "startup": "up"}[field]})


def do_aclshow(state, argv):
    table = argv[argv.index("-t") + 1]
    state["packets"] += 7
    return (
        f"RULE NAME    TABLE NAME        PRIO    PACKETS COUNT    BYTES COUNT\n"
        f"-----------  --------------  ------  ---------------  -------------\n"
        f"DROP         {table}            9999               {state['packets']}            700"
    )


def do_docker(state, argv):
    _exec, _bgp, program, *rest = argv
    if program == "pgrep":
        if state["bgpd"] is None:
            sys.exit(1)
        return "42"
    if program == "pkill" and rest[-1] == "zebra":
        state["zebra"] = {"-STOP": "T", "-CONT": "S"}[rest[0]]
        return None
    if program == "pkill":
        state["bgpd"] = {"-KILL": None, "-STOP": "T", "-CONT": "S"}[rest[0]]
        if rest[0] == "-KILL" and state["CONFIG_DB"]["FEATURE|bgp"]["auto_restart"] == "enabled":
            state["bgpd"] = "S"  # supervisor-proc-exit-listener ends the container, and systemd starts it again
        return None
    words = {"T": "stopped", "S": "sleeping"}
    return "".join(f"State:\t{state[name]} ({words[state[name]]})\n" for name in ("bgpd", "zebra"))


def do_systemctl(state, argv):
    if argv[0] == "is-active":
        if argv[-1] not in state["daemons"]:
            sys.exit(3)
        return
    if argv == ["reset-failed", "bgp"]:
        state["starts"] = 0
        return
    assert argv == ["restart", "bgp"]
    if state["starts"] >= 3:  # bgp.service: StartLimitBurst=3 in 1200 s
        sys.exit("Job for bgp.service failed.\nStart request repeated too quickly.")
    state["starts"] += 1
    state["bgpd"] = "S"


def do_mlxlink(state, argv):
    if not re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9]|mlx5_[0-9a-f]+", argv[1]):
        sys.exit(f"-E- Failed to open device: {argv[1]}. No such file or directory.")
    if "--rx_error_injection" in argv:
        return _error_injection(state, argv)
    if argv[-2:] == ["--port_state", "TG"]:
        state["toggles"] = state.get("toggles", 0) + 1
        return "\nOperational Info\n----------------\n"
    if "--port_state" in argv:
        if argv[-1] == "DN" and state["keep_up"] == "True(1)":
            sys.exit(
                "-E- port is not Down, for some reasons:\n1- The link is configured to be up, run this command if "
                "KEEP_ETH_LINK_UP_Px is True:\n   mstconfig -d 18:00.0 set KEEP_ETH_LINK_UP_P<port_number>=0"
            )
        state["port"] = {"DN": "Disable", "UP": "Active"}[argv[-1]]
        return "\nOperational Info\n----------------\n"
    if state.get("silent"):
        sys.exit(f"-E- Failed to open device: {argv[1]}. Resource temporarily unavailable.")
    # Recorded of a ConnectX-7 at 400 Gb/s (mlxlink_exporter, internal/mlxlink/testdata): down or up, the physical
    # state is the same; only an older one at 100 Gb/s says LinkUp.
    speed, width = ("400G", "4x") if state["port"] == "Active" else ("N/A", "N/A")
    return (
        "\nOperational Info\n----------------\n"
        f"State                              : \x1b[32m{state['port']}\x1b[0m\n"
        "Physical state                     : \x1b[32mETH_AN_FSM_ENABLE\x1b[0m\n"
        f"Speed                              : {speed}\nWidth                              : {width}\n"
    )


def _error_injection(state, argv):
    """Show or change the receiver's sampling point (mstflint, mlxlink_err_inj_commander.cpp)."""
    if state["mixers"] is None:
        sys.exit("-E- Failed to send access register: ME_REG_ACCESS_REG_NOT_SUPPORTED")
    if "--show_mixers_offset" in argv:
        if state.get("silent"):
            sys.exit(f"-E- Failed to open device: {argv[1]}. Resource temporarily unavailable.")
        rows = (f"mixer_offset{n:<22}: \x1b[0m{value}\x1b[0m\n" for n, value in enumerate(state["mixers"]))
        return "\nEye Centering Control Information\n---------------------------------\n" + "".join(rows)
    assert argv[-1] == "--yes", "without it mlxlink waits for an answer"
    for number in range(2):
        if f"--mixer_offset{number}" in argv:
            state["mixers"][number] = hex(int(argv[argv.index(f"--mixer_offset{number}") + 1], 0))
    return "\nConfiguring Eye Center...\n"


def do_mlxconfig(state, argv):
    *_, enabled, query, name = argv
    assert (enabled, query) == ("-e", "query")
    if name not in ("KEEP_ETH_LINK_UP_P1", "KEEP_ETH_LINK_UP_P2"):
        sys.exit(f"-E- The Device doesn't support {name} parameter")
    default, now, later = "True(1)", state["keep_up"], state["keep_up"]
    return (
        "\nDevice #1:\n----------\n\nDevice type:        ConnectX7           \n\n"
        "Configurations:                                          Default             Current             Next Boot\n"
        f"{'*' if default != later else ' '}       {name:<48}{default:<20}{now:<20}{later:<20}\n"
    )


def do_nvidia_smi(state, argv):  # noqa: PLR0911 - one for each option
    if argv[0] == "drain":
        return _drain(state, Path(state["pci"]), argv[1:])
    if "-pm" in argv:
        state["persistence"] = {"0": "Disabled", "1": "Enabled"}[argv[-1]]
        return "All done."
    if "--query-compute-apps=pid" in argv:
        return "\n".join(map(str, state["computing"]))
    if "-lgc" in argv or "-rgc" in argv:
        state["lock"] = int(argv[-1].split(",")[1]) if "-lgc" in argv else None
        return "All done."
    if "-pl" in argv:
        state["limit"] = int(argv[-1])
        return "Power limit was set."
    if state.get("silent"):
        return "Unable to determine the device handle for GPU0000:19:00.0: Unknown Error"
    fields = next(word for word in argv if word.startswith("--query-gpu=")).partition("=")[2].split(",")
    values = {
        "persistence_mode": state["persistence"],
        "clocks.max.sm": "1980",
        "clocks.sm": str(state["lock"] or (1980 if state["busy"] and not state["reasons"] else 345)),
        "utilization.gpu": "99" if state["busy"] else "0",
        "clocks_event_reasons.active": f"0x{state['reasons'] or (0 if state['lock'] or state['busy'] else 1):016x}",
        "power.limit": f"{state['limit']}.00",
        "power.default_limit": "700.00",
        "power.min_limit": "200.00",
    }
    return ", ".join(values[field] for field in fields)


def _drain(state, pci, argv):
    """Drain, remove or re-enable a GPU; without a kernel, also find what a PCI rescan finds."""
    (bus, action), device = (argv[1], argv[2]), pci / "devices" / argv[1]
    if (pci / "rescan").read_text():
        device.mkdir(exist_ok=True)
    if action == "-r":
        if not state["drained"] or state["persistence"] == "Enabled" or state["computing"]:
            sys.exit(f"Failed to remove GPU {bus}: In use by another client")
        device.rmdir()
    elif argv[3] == "1" and state["persistence"] == "Enabled":
        sys.exit(f"Failed to set drain state for GPU {bus}: In use by another client")
    else:
        state["drained"] = argv[3] == "1"


def do_dcgmi(state, argv):
    if argv[:2] == ["test", "--inject"]:
        state["dcgm"][argv[argv.index("-f") + 1]] = argv[-1]
        state["injected"] = {
            name: argv[argv.index(f"--{name}") + 1] for name in ("gpuid", "offset") if f"--{name}" in argv
        }
        return "Successfully injected field info."
    if argv == ["discovery", "-l"]:
        # Recorded of DCGM 3: its numbers, and bus ids with eight digits of domain.
        rows = "".join(
            f"| {number}      | Name: NVIDIA H100 80GB HBM3                                          |\n"
            f"|        | PCI Bus ID: 00000000:{bus}:00.0                                         |\n"
            "|        | Device UUID: GPU-00000000-0000-0000-0000-000000000000                |\n"
            for number, bus in enumerate(("2B", "19", "3B"))
        )
        return f"3 GPUs found.\n+--------+---+\n| GPU ID | Device Information |\n+--------+---+\n{rows}"
    entity = argv[argv.index("-i") + 1]
    assert entity == "1", "0000:19:00.0 is DCGM's second one"
    if state.get("silent"):
        return "#Entity   XIDER\nID"
    return f"#Entity   XIDER\nID\nGPU {entity}     {state['dcgm'][argv[argv.index('-e') + 1]]}"
