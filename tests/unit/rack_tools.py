"""Stand-ins for the tools of a rack, one program under many names: their documented output, over a state in a file.

They do what the tools' documentation says of the few commands that our plans use, and end with an error on all others.
"""

import json
import sys
from pathlib import Path

NAMES = (
    "sonic-db-cli", "config", "aclshow", "TSA", "TSB", "TSC", "docker", "systemctl", "mlxlink", "nvidia-smi", "dcgmi",
)  # fmt: skip
START = {
    "CONFIG_DB": {
        "PORT|Ethernet0": {"mtu": "9216", "admin_status": "up"},
        "SWITCH_HASH|GLOBAL": {"ecmp_hash@": "DST_IP,SRC_IP,IP_PROTOCOL,L4_DST_PORT,L4_SRC_PORT"},
    },
    "STATE_DB": {
        "ACL_STAGE_CAPABILITY_TABLE|EGRESS": {"action_list": "PACKET_ACTION,COUNTER"},
        "ACL_STAGE_CAPABILITY_TABLE|INGRESS": {"action_list": "PACKET_ACTION,MIRROR_INGRESS_ACTION"},
        "SWITCH_CAPABILITY|switch": {"ECMP_HASH_CAPABLE": "true"},
    },
    "mode": "Normal",
    "bgpd": "S",
    "port": "Active",
    "lock": None,
    "busy": True,
    "limit": 700,
    "persistence": "Enabled",
    "drained": False,
    "computing": [],
    "pci": None,
    "xid": "0",
    "packets": 0,
}


def install(folder):
    """Put the stand-ins into a folder; give the path of their state, which is as a healthy rack's."""
    for name in NAMES:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -P {__file__} "$0" "$@"\n')
        path.chmod(0o755)
    state = folder / "state.json"
    state.write_text(json.dumps(START))
    return state


def main(program, argv):
    path = Path(program).parent / "state.json"
    state = json.loads(path.read_text())
    printed = globals()["do_" + Path(program).name.lower().replace("-", "_")](state, argv)
    path.write_text(json.dumps(state))
    print("" if printed is None else printed)


def do_sonic_db_cli(state, argv):
    name, command, key, *rest = argv
    if name == "APPL_DB":
        # portmgrd: the port's configuration, taken over
        return state["CONFIG_DB"][key.replace("PORT_TABLE:", "PORT|")].get(rest[0])
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


def do_config(state, argv):
    area, what, port, *rest = argv
    assert area == "interface"
    entry = state["CONFIG_DB"][f"PORT|{port}"]
    entry.update({"mtu": rest[0]} if what == "mtu" else {"admin_status": {"shutdown": "down", "startup": "up"}[what]})


def do_aclshow(state, argv):
    table = argv[argv.index("-t") + 1]
    state["packets"] += 7
    return (
        f"RULE NAME    TABLE NAME        PRIO    PACKETS COUNT    BYTES COUNT\n"
        f"-----------  --------------  ------  ---------------  -------------\n"
        f"DROP         {table}            9999               {state['packets']}            700"
    )


def do_tsa(state, _argv):
    state["mode"] = "Maintenance"
    return "System Mode: Normal -> Maintenance"


def do_tsb(state, _argv):
    state["mode"] = "Normal"


def do_tsc(state, _argv):
    return f"System Mode: {state['mode']}"


def do_docker(state, argv):
    _exec, _bgp, program, *rest = argv
    if program == "pgrep":
        if state["bgpd"] is None:
            sys.exit(1)
        return "42"
    if program == "pkill":
        state["bgpd"] = {"-KILL": None, "-STOP": "T", "-CONT": "S"}[rest[0]]
        return None
    return f"State:\t{state['bgpd']} (said by /proc)"


def do_systemctl(state, argv):
    assert argv == ["restart", "bgp"]
    state["bgpd"] = "S"


def do_mlxlink(state, argv):
    if "--port_state" in argv:
        state["port"] = {"DN": "Disable", "UP": "Active"}[argv[-1]]
        return None
    physical = {"Active": "LinkUp", "Disable": "Disabled"}[state["port"]]
    return (
        f"\nOperational Info\n----------------\nState                              : \x1b[32m{state['port']}\x1b[0m\n"
        f"Physical state                     : \x1b[32m{physical}\x1b[0m\nSpeed                              : 400G\n"
    )


def do_nvidia_smi(state, argv):
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
    fields = next(word for word in argv if word.startswith("--query-gpu=")).partition("=")[2].split(",")
    values = {
        "persistence_mode": state["persistence"],
        "clocks.max.sm": "1980",
        "clocks.sm": str(state["lock"] or (1980 if state["busy"] else 345)),
        "utilization.gpu": "99" if state["busy"] else "0",
        "clocks_event_reasons.active": f"0x{0 if state['lock'] or state['busy'] else 1:016x}",
        "power.limit": f"{state['limit']}.00",
        "power.default_limit": "700.00",
        "power.min_limit": "200.00",
    }
    return ", ".join(values[field] for field in fields)


def _drain(state, pci, argv):
    """Drain, remove, or take back; and, for there is no kernel here, find what a rescan finds."""
    (bus, what), device = (argv[1], argv[2]), pci / "devices" / argv[1]
    if (pci / "rescan").read_text():
        device.mkdir(exist_ok=True)
    if what == "-r":
        if not state["drained"] or state["persistence"] == "Enabled" or state["computing"]:
            sys.exit(f"Failed to remove GPU {bus}: In use by another client")
        device.rmdir()
    elif argv[3] == "1" and state["persistence"] == "Enabled":
        sys.exit(f"Failed to set drain state for GPU {bus}: In use by another client")
    else:
        state["drained"] = argv[3] == "1"


def do_dcgmi(state, argv):
    if argv[:2] == ["test", "--inject"]:
        state["xid"] = argv[-1]
        return "Successfully injected field info."
    entity = argv[argv.index("-i") + 1]
    return f"#Entity   XIDER\nID\nGPU {entity}     {state['xid']}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
