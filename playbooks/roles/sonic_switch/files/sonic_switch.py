"""Configure a SONiC switch as its inventory says: ConfigDB by `config load`, eBGP by FRR's own file in split mode.

`config load` merges: entries that our tables do not name stay. The values that our tables change are read before
(`sonic-cfggen -d --print-data`) and saved entry by entry, so that a teardown restores old values and deletes our own
entries by sonic-db-cli. Not yet run on hardware.
"""

import hashlib
import json
import os
import shlex

from faultbed_fabric_bgp import fabric_bgpd_config
from faultbed_saved import SavedState
from faultbed_state import StateError, answer, run

QP_FIELD = "RDMA_BTH_DEST_QP"
MAP, WRED = "FAULTBED", "FAULTBED_ROCE"
PAUSE_GROUP_ASICS = ("mellanox", "barefoot")
NO_MARKING = {"ecn": "ecn_none"} | {f"wred_{colour}_enable": "false" for colour in ("green", "yellow", "red")}
DB = ["sonic-db-cli", "CONFIG_DB"]
RESTART = ["systemctl", "restart", "bgp"]


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    saved, tables = SavedState("sonic_switch", changes), desired["tables"]
    config_db, notes = {}, []
    if desired["load"]:
        config_db, notes = json.loads(run(["sonic-cfggen", "-d", "--print-data"])), _remove_unsupported(tables)
        if problems := [*conflicts(tables, config_db), *fit_pools(tables, config_db)]:
            raise StateError("; ".join(problems))
        pause_groups(tables, _asic())
        # Left by an earlier profile with ECN: its queues would continue to mark packets.
        if WRED in config_db.get("WRED_PROFILE", {}):
            tables.setdefault("WRED_PROFILE", {WRED: NO_MARKING})
    saved.file(desired["path"], json.dumps(tables, indent=2) + "\n")
    bgp = fabric_bgpd_config(desired)
    saved.file(desired["bgp_path"], bgp)
    if not desired["load"]:
        note = "ConfigDB and BGP are written to files and not in force: inspect them and set sonic_switch_load"
        return {"loaded": False, "notes": [note]}
    differing = differences(tables, config_db)
    if differing:
        _load(saved, desired["path"], differing, config_db)
    saved.file(desired["bgpd"], bgp, readers={"bgp": RESTART})
    # In split mode the bgp container removes frr.conf when it starts (dockers/docker-fpm-frr/docker_init.sh). On a
    # switch in split-unified mode that file is the only copy of the administrator's routing configuration.
    saved.file(os.path.join(os.path.dirname(desired["bgpd"]), "frr.conf"), None)
    saved.after("bgp", RESTART)
    if desired["save"]:
        saved.after("save", ["config", "save", "-y"])
    return {"loaded": True, "notes": notes}


def _load(saved, path, differing, config_db):
    saved.unread("save")
    if "DEVICE_METADATA" in {table for table, _, _ in differing}:
        saved.unread("bgp", RESTART)
    saved.command(
        f"ConfigDB {_description(differing)}",
        current="otherwise",
        desired="as in the inventory",
        do=["config", "load", "-y", path],
        undo=undo(differing, config_db),
    )


def _remove_unsupported(tables):
    """Remove SWITCH_HASH from the tables if the ASIC does not support its fields; return notes about it.

    Raises:
        StateError: the inventory requests a hash on the QP, and the ASIC does not support it.
    """
    if "SWITCH_HASH" not in tables:
        return []
    supported = capable(run(["sonic-db-cli", "STATE_DB", "HGETALL", "SWITCH_CAPABILITY|switch"]))
    unsupported = [field for field in tables["SWITCH_HASH"]["GLOBAL"]["ecmp_hash"] if field not in supported]
    if QP_FIELD in unsupported:
        raise StateError(
            f"this switch does not hash on {QP_FIELD}, which no public SONiC supports: set sonic_switch_hash_qp to "
            "false"
        )
    if unsupported:
        del tables["SWITCH_HASH"]
        return [f"SWITCH_HASH: the switch does not report that it hashes on {', '.join(unsupported)}"]
    return []


def capable(output):
    """Return the fields that the ASIC hashes on, from SWITCH_CAPABILITY as sonic-db-cli prints it (a Python dict)."""
    _, _, tail = output.partition("'HASH|NATIVE_HASH_FIELD_LIST': '")
    return [word.strip() for word in tail.partition("'")[0].split(",") if word.strip()]


def _asic():
    return run(["sonic-cfggen", "-y", "/etc/sonic/sonic_version.yml", "-v", "asic_type"]).strip()


def pause_groups(tables, asic):
    """Add the map of priorities to the priority groups that they pause, on ASICs that have such a map.

    SONiC's own template has it for these two ASICs only (sonic-buildimage, qos_config.j2,
    pfc_to_pg_map_supported_asics).
    """
    if asic in PAUSE_GROUP_ASICS and "PORT_QOS_MAP" in tables:
        port_maps = tables.pop("PORT_QOS_MAP")
        tables["PFC_PRIORITY_TO_PRIORITY_GROUP_MAP"] = {MAP: {str(number): str(number) for number in range(8)}}
        tables["PORT_QOS_MAP"] = {port: {**fields, "pfc_to_pg_map": MAP} for port, fields in port_maps.items()}


def fit_pools(tables, config_db):
    """Give each of our buffer profiles the threshold that its pool's mode requires; return what is impossible, as text.

    The ASIC rejects a profile with `dynamic_th` on a pool of mode `static`, and the rejection ends orchagent up to
    202411 (sonic-swss, saihelper.cpp). Broadcom's lossless egress pools are static: the threshold is the pool's size,
    as in their own profiles (sonic-buildimage, device/arista/*/buffers_defaults_t1.j2).
    """
    problems = []
    pools = config_db.get("BUFFER_POOL", {})
    for name, profile in tables.get("BUFFER_PROFILE", {}).items():
        pool = pools.get(profile["pool"])
        if pool is None:
            problems.append(
                f"no buffer pool {profile['pool']}: the switch has {', '.join(pools) or 'none'}, so correct "
                "faultbed_qos.buffer"
            )
        elif pool.get("mode") == "static" and profile.get("xoff"):
            problems.append(f"buffer pool {profile['pool']} of {name} is static: lossless input needs a dynamic one")
        elif pool.get("mode") == "static":
            del profile["dynamic_th"]
            if not str(pool.get("size", "")).isdigit():
                problems.append(f"buffer pool {profile['pool']} is static and has no size: set it on the switch")
            else:
                profile["static_th"] = str(pool["size"])
        elif pool.get("mode") != "dynamic":
            problems.append(
                f"buffer pool {profile['pool']} has the mode {pool.get('mode')!r}: neither static nor dynamic"
            )
    return problems


def conflicts(tables, config_db):
    """Return the parts of a switch's ConfigDB that conflict with our tables, as text that says what to do."""
    return [
        *_missing_ports(tables, config_db),
        *_member_ports(tables, config_db),
        *_overlapping_ranges(tables, config_db),
        *_other_bgp(config_db),
    ]


def _missing_ports(tables, config_db):
    """Report ports that the switch does not have: `config load` would create them without the mandatory lanes.

    Source: sonic-port.yang.
    """
    missing = [netdev for netdev in tables["PORT"] if netdev not in config_db.get("PORT", {})]
    return [f"no port {', '.join(missing)}: break it out, or correct the names in faultbed_ports"] if missing else []


def _member_ports(tables, config_db):
    """Report ports of the fabric, which must be routed, that are members of a VLAN or a port channel."""
    for table in ("VLAN_MEMBER", "PORTCHANNEL_MEMBER"):
        for key in config_db.get(table, {}):
            group, _, netdev = key.partition("|")
            if netdev in tables["INTERFACE"]:
                yield f"{netdev} is a member of {group}: remove it from there, because a fabric port is routed"


def _overlapping_ranges(tables, config_db):
    """Report entries for several ports, queues or groups (`Ethernet0|3-4`) that include ours.

    SONiC does not document which of two overlapping entries takes effect.
    """
    for table in ("QUEUE", "BUFFER_PG", "BUFFER_QUEUE"):
        for key in config_db.get(table, {}):
            netdevs, _, numbers = key.rpartition("|")
            first, _, last = numbers.partition("-")
            if not numbers.replace("-", "").isdigit() or (not last and "," not in netdevs):
                continue
            expanded = range(int(first), int(last or first) + 1)
            names = [f"{netdev}|{number}" for netdev in netdevs.split(",") for number in expanded]
            if any(name in tables.get(table, {}) for name in names):
                yield f"{table}|{key} overlaps our entries: split it into an entry for each port and number"


def _other_bgp(config_db):
    """Report BGP in ConfigDB: bgpcfgd and frrcfgd apply it in every mode (docker-fpm-frr, supervisord.conf.j2)."""
    tables = [table for table in ("BGP_NEIGHBOR", "BGP_PEER_RANGE", "BGP_GLOBALS") if config_db.get(table)]
    return [f"ConfigDB has {table}: SONiC would run it beside our BGP, so remove it" for table in tables]


def differences(tables, config_db):
    """Return the changes that `config load` would make, in the order of the tables: (table, key, {field: value})."""
    differing = []
    for table, entries in tables.items():
        for key, fields in entries.items():
            old = config_db.get(table, {}).get(key)
            changed = {name: value for name, value in fields.items() if old is None or old.get(name) != value}
            if changed or old is None:
                differing.append((table, key, changed))
    return differing


def undo(differing, config_db):
    """Return the shell command that reverts some changes, the last one first. New entries are deleted whole."""
    lines = []
    for table, key, changed in reversed(differing):
        name, old = f"{table}|{key}", config_db.get(table, {}).get(key)
        if old is None:
            lines.append([*DB, "DEL", name])
            continue
        for field, value in changed.items():
            if field in old:
                lines.append([*DB, "HSET", name, *_redis_field(field, old[field])])
            else:
                lines.append([*DB, "HDEL", name, _redis_field(field, value)[0]])
    return ["sh", "-ec", "\n".join(shlex.join(line) for line in lines)]


def _redis_field(field, value):
    """Return a field's name and value as stored in redis: lists are joined by commas, and their names end in `@`."""
    return (f"{field}@", ",".join(value)) if isinstance(value, list) else (field, value)


def _description(differing):
    """Return the names of the changed tables and a digest of the changes, so that each set of changes has its undo."""
    content = json.dumps(differing).encode()
    tables = ", ".join(dict.fromkeys(table for table, _, _ in differing))
    return f"{tables} ({len(differing)} entries, {hashlib.sha256(content).hexdigest()[:8]})"
