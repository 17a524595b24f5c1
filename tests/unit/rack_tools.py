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
    "limit": 700,
    "compute_mode": "Default",
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
        f"\nOperational Info\n----------------\nState                              : {state['port']}\n"
        f"Physical state                     : {physical}\nSpeed                              : 400G\n"
    )


def do_nvidia_smi(state, argv):
    if "-lgc" in argv:
        state["lock"] = int(argv[-1].split(",")[1])
        return f'GPU clocks set to "(gpuClkMin 0, gpuClkMax {state["lock"]})"'
    if "-rgc" in argv:
        state["lock"] = None
        return "All done."
    if "-pl" in argv:
        state["limit"] = int(argv[-1])
        return "Power limit was set."
    if "--query-compute-apps=pid" in argv:
        # The driver knows who has a context; here it is everybody of that name.
        names = ((path.parent.name, path.read_text().strip()) for path in Path("/proc").glob("[0-9]*/comm"))
        return "\n".join(pid for pid, name in names if name == "faultbed-hog")
    fields = next(word for word in argv if word.startswith("--query-gpu=")).partition("=")[2].split(",")
    values = {
        "compute_mode": state["compute_mode"],
        "clocks.max.sm": "1980",
        "clocks.sm": str(state["lock"] or 1980),
        "utilization.gpu": "99",
        "clocks_event_reasons.active": "0x0000000000000002" if state["lock"] else "0x0000000000000000",
        "power.limit": f"{state['limit']}.00",
        "power.default_limit": "700.00",
        "power.min_limit": "200.00",
    }
    return ", ".join(values[field] for field in fields)


def do_dcgmi(state, argv):
    if argv[:2] == ["test", "--inject"]:
        state["xid"] = argv[-1]
        return "Successfully injected field info."
    entity = argv[argv.index("-i") + 1]
    return f"#Entity   XIDER\nID\nGPU {entity}     {state['xid']}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
