"""Bring a SONiC switch to what its inventory says: ConfigDB by `config load`, eBGP by FRR's own file in split mode.

`config load` merges: what our tables do not name stays. What they change is read before (`sonic-cfggen -d
--print-data`) and written down entry by entry, so that a teardown gives back old values, and takes away what is ours
alone, by sonic-db-cli. Not yet run on hardware.
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
PAUSE_GROUPS = ("mellanox", "barefoot")
MARKS_NOTHING = {"ecn": "ecn_none"} | {f"wred_{colour}_enable": "false" for colour in ("green", "yellow", "red")}
DB = ["sonic-db-cli", "CONFIG_DB"]
RESTART = ["systemctl", "restart", "bgp"]


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    saved, tables = SavedState("sonic_switch", changes), wanted["tables"]
    have, left_out = {}, []
    if wanted["load"]:
        have, left_out = json.loads(run(["sonic-cfggen", "-d", "--print-data"])), _unable(tables)
        if wrong := [*in_the_way(tables, have), *fit_pools(tables, have)]:
            raise StateError("; ".join(wrong))
        pause_groups(tables, _asic())
        if WRED in have.get("WRED_PROFILE", {}):  # of an earlier profile with ECN: its queues would go on marking
            tables.setdefault("WRED_PROFILE", {WRED: MARKS_NOTHING})
    saved.file(wanted["path"], json.dumps(tables, indent=2) + "\n")
    bgp = fabric_bgpd_config(wanted)
    saved.file(wanted["bgp_path"], bgp)
    if not wanted["load"]:
        return {"loaded": False, "notes": ["ConfigDB and BGP are only written: sonic_switch_load puts them in force"]}
    differing = differences(tables, have)
    if differing:
        _load(saved, wanted["path"], differing, have)
    saved.file(wanted["bgpd"], bgp, readers={"bgp": RESTART})
    # In split mode the bgp container removes it when it starts (dockers/docker-fpm-frr/docker_init.sh); of a switch in
    # split-unified mode it is all that there is of somebody's routing.
    saved.file(os.path.join(os.path.dirname(wanted["bgpd"]), "frr.conf"), None)
    saved.after("bgp", RESTART)
    if wanted["save"]:
        saved.after("save", ["config", "save", "-y"])
    return {"loaded": True, "notes": left_out}


def _load(saved, path, differing, have):
    saved.unread("save")
    if "DEVICE_METADATA" in {table for table, _, _ in differing}:
        saved.unread("bgp", RESTART)
    saved.command(
        f"ConfigDB {_named(differing)}",
        have="otherwise",
        want="as in the inventory",
        do=["config", "load", "-y", path],
        undo=undo(differing, have),
    )


def _unable(tables):
    """Take out of the tables what this switch's ASIC cannot do, and say it; a QP that was asked for must be there."""
    if "SWITCH_HASH" not in tables:
        return []
    said = run(["sonic-db-cli", "STATE_DB", "HGETALL", "SWITCH_CAPABILITY|switch"])
    wanted = tables["SWITCH_HASH"]["GLOBAL"]["ecmp_hash"]
    lacking = [field for field in wanted if field not in capable(said)]
    if QP_FIELD in lacking:
        raise StateError(
            f"this switch does not hash on {QP_FIELD}, which no public SONiC knows: set sonic_switch_hash_qp to false"
        )
    if lacking:
        del tables["SWITCH_HASH"]
        return [f"SWITCH_HASH: the switch does not report that it hashes on {', '.join(lacking)}"]
    return []


def capable(said):
    """Fields that the ASIC hashes on, of SWITCH_CAPABILITY as sonic-db-cli prints it (a dict of Python)."""
    _, _, tail = said.partition("'HASH|NATIVE_HASH_FIELD_LIST': '")
    return [word.strip() for word in tail.partition("'")[0].split(",") if word.strip()]


def _asic():
    return run(["sonic-cfggen", "-y", "/etc/sonic/sonic_version.yml", "-v", "asic_type"]).strip()


def pause_groups(tables, asic):
    """Name the priority group that each priority pauses, on ASICs that have such a map.

    SONiC's own template has it for these two alone (sonic-buildimage, qos_config.j2, pfc_to_pg_map_supported_asics).
    """
    if asic in PAUSE_GROUPS and "PORT_QOS_MAP" in tables:
        port_maps = tables.pop("PORT_QOS_MAP")
        tables["PFC_PRIORITY_TO_PRIORITY_GROUP_MAP"] = {MAP: {str(number): str(number) for number in range(8)}}
        tables["PORT_QOS_MAP"] = {port: {**fields, "pfc_to_pg_map": MAP} for port, fields in port_maps.items()}


def fit_pools(tables, have):
    """Give each of our buffer profiles the threshold that its pool's mode takes; what cannot be, in words.

    A profile with `dynamic_th` on a pool of mode `static` is rejected by the ASIC, and what it rejects ends orchagent
    up to 202411 (sonic-swss, saihelper.cpp). Broadcom's lossless egress pools are static: a share of all of it, as
    their own profiles have (sonic-buildimage, device/arista/*/buffers_defaults_t1.j2).
    """
    wrong = []
    pools = have.get("BUFFER_POOL", {})
    for name, profile in tables.get("BUFFER_PROFILE", {}).items():
        pool = pools.get(profile["pool"])
        if pool is None:
            wrong.append(
                f"no buffer pool {profile['pool']}: it has {', '.join(pools) or 'none'}; faultbed_qos.buffer names them"
            )
        elif pool.get("mode") == "static" and profile.get("xoff"):
            wrong.append(f"buffer pool {profile['pool']} of {name} is static: lossless input needs a dynamic one")
        elif pool.get("mode") == "static":
            del profile["dynamic_th"]
            if not str(pool.get("size", "")).isdigit():
                wrong.append(f"buffer pool {profile['pool']} is static and has no size: set it on the switch")
            else:
                profile["static_th"] = str(pool["size"])
        elif pool.get("mode") != "dynamic":
            wrong.append(f"buffer pool {profile['pool']} has the mode {pool.get('mode')!r}: neither static nor dynamic")
    return wrong


def in_the_way(tables, have):
    """What of a switch's ConfigDB our tables cannot be loaded beside, in words, with what to do."""
    return [*_no_ports(tables, have), *_of_others(tables, have), *_ranges(tables, have), *_other_bgp(have)]


def _no_ports(tables, have):
    """A port without lanes, which `config load` would make of such a name, is none (sonic-port.yang: mandatory)."""
    missing = [netdev for netdev in tables["PORT"] if netdev not in have.get("PORT", {})]
    return [f"no port {', '.join(missing)}: break it out, or mend the names in faultbed_ports"] if missing else []


def _of_others(tables, have):
    for table in ("VLAN_MEMBER", "PORTCHANNEL_MEMBER"):
        for key in have.get(table, {}):
            whose, _, netdev = key.partition("|")
            if netdev in tables["INTERFACE"]:
                yield f"{netdev} is a member of {whose}: take it out of there, a port of the fabric is routed"


def _ranges(tables, have):
    """An entry for several queues or groups names ours, too (`Ethernet0|3-4`): which of the two counts is not said."""
    for table in ("QUEUE", "BUFFER_PG", "BUFFER_QUEUE"):
        for key in have.get(table, {}):
            netdevs, _, numbers = key.rpartition("|")
            first, _, last = numbers.partition("-")
            if not numbers.replace("-", "").isdigit() or (not last and "," not in netdevs):
                continue
            several = range(int(first), int(last or first) + 1)
            ours = [f"{netdev}|{number}" for netdev in netdevs.split(",") for number in several]
            if any(name in tables.get(table, {}) for name in ours):
                yield f"{table}|{key} is there: split it into an entry for each port and number"


def _other_bgp(have):
    """bgpcfgd and frrcfgd configure what ConfigDB has of BGP in every mode (docker-fpm-frr, supervisord.conf.j2)."""
    there = [table for table in ("BGP_NEIGHBOR", "BGP_PEER_RANGE", "BGP_GLOBALS") if have.get(table)]
    return [f"ConfigDB has {table}: SONiC would run it beside our BGP, take it out of there" for table in there]


def differences(tables, have):
    """What `config load` would change: (table, key, {field: value}), in the order of the tables."""
    differing = []
    for table, entries in tables.items():
        for key, fields in entries.items():
            old = have.get(table, {}).get(key)
            changed = {name: value for name, value in fields.items() if old is None or old.get(name) != value}
            if changed or old is None:
                differing.append((table, key, changed))
    return differing


def undo(differing, have):
    """The shell that gives back what was there before, last change first: an entry that was not there goes whole."""
    lines = []
    for table, key, changed in reversed(differing):
        name, old = f"{table}|{key}", have.get(table, {}).get(key)
        if old is None:
            lines.append([*DB, "DEL", name])
            continue
        for field, value in changed.items():
            if field in old:
                lines.append([*DB, "HSET", name, *_stored(field, old[field])])
            else:
                lines.append([*DB, "HDEL", name, _stored(field, value)[0]])
    return ["sh", "-ec", "\n".join(shlex.join(line) for line in lines)]


def _stored(field, value):
    """A field as redis has it: lists are joined by commas, and their names end in an at sign."""
    return (f"{field}@", ",".join(value)) if isinstance(value, list) else (field, value)


def _named(differing):
    """The tables in words, and a digest of what of them, so that each set of changes is written down by itself."""
    what = json.dumps(differing).encode()
    tables = ", ".join(dict.fromkeys(table for table, _, _ in differing))
    return f"{tables} ({len(differing)} entries, {hashlib.sha256(what).hexdigest()[:8]})"
