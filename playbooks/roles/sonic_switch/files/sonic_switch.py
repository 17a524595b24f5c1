"""Configure a SONiC switch as its inventory says: ConfigDB by `config load`, eBGP by FRR's own file in split mode.

The switch's ConfigDB is read first (`sonic-cfggen -d --print-data`). Our tables are merged with it, entry by entry and
range by range; entries that they do not name stay. The switch's own check (`config apply-patch --dry-run`) and a
checkpoint come before the load, and a check of its health after it. Old values are saved, so that a teardown restores
them and deletes our own entries. Not yet run on hardware.
"""

import contextlib
import hashlib
import json
import os
import tempfile

from faultbed_configdb import commands, covered, described, differences, loaded, merged, patch, undo
from faultbed_fabric_bgp import fabric_bgpd_config
from faultbed_saved import SavedState
from faultbed_saved import run as run_long
from faultbed_state import StateError, answer, run
from faultbed_switch_health import healthy_afterwards

QP_FIELD = "RDMA_BTH_DEST_QP"
MAP, WRED = "FAULTBED", "FAULTBED_ROCE"
PAUSE_GROUP_ASICS = ("mellanox", "barefoot")
NO_MARKING = {"ecn": "ecn_none"} | {f"wred_{colour}_enable": "false" for colour in ("green", "yellow", "red")}
LOSSY_GROUP_TABLE = "BUFFER_PG"
RESTART = ["systemctl", "restart", "bgp"]


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    saved, tables = SavedState("sonic_switch", changes), desired["tables"]
    notes, differing = [], []
    if desired["load"]:
        notes, differing, config_db = _differing(desired)
        if differing and desired["validate"]:
            _dry_run(patch(differing, config_db))
    saved.file(desired["path"], json.dumps(tables, indent=2) + "\n")
    if desired["bgp"]:
        saved.file(desired["bgp_path"], fabric_bgpd_config(desired))
    if not desired["load"]:
        note = "ConfigDB and BGP are written to files and not in force: inspect them and set sonic_switch_load"
        return {"loaded": False, "notes": [note]}
    with _watched(saved, desired, notes):
        if differing:
            notes += _load(saved, differing, checkpoint=desired["validate"])
        if desired["bgp"]:
            saved.file(desired["bgpd"], fabric_bgpd_config(desired), readers={"bgp": RESTART})
            # In split mode the bgp container removes frr.conf when it starts (dockers/docker-fpm-frr/docker_init.sh).
            # On a switch in split-unified mode that file is the only copy of the administrator's routing configuration.
            saved.file(os.path.join(os.path.dirname(desired["bgpd"]), "frr.conf"), None)
            saved.after("bgp", RESTART)
    if desired["save"]:
        saved.after("save", ["config", "save", "-y"])
    return {"loaded": True, "notes": notes}


def _differing(desired):
    """Return notes, the changes from the switch's ConfigDB to the inventory's, and the former.

    Raises:
        StateError: something on the switch conflicts with the inventory.
    """
    tables, config_db = desired["tables"], json.loads(run(["sonic-cfggen", "-d", "--print-data"]))
    notes = _remove_unsupported(tables)
    if problems := [*conflicts(desired, config_db), *fit_pools(tables, config_db)]:
        raise StateError("; ".join(problems))
    pause_groups(tables, _asic())
    # Left by an earlier profile with ECN: its queues would continue to mark packets.
    if WRED in config_db.get("WRED_PROFILE", {}):
        tables.setdefault("WRED_PROFILE", {WRED: NO_MARKING})
    merged_tables, dividing = merged(tables, config_db)
    if problems := unbuffered(merged_tables, config_db, dividing):
        raise StateError("; ".join(problems))
    return notes, differences(merged_tables, config_db, dividing), config_db


def _watched(saved, desired, notes):
    """Return a context that requires the switch to be as healthy after its changes as before."""
    if not desired["health"]:
        return contextlib.nullcontext()
    return healthy_afterwards(
        saved, [port["netdev"] for port in desired["ports"]], notes, sonic=True, unless="sonic_switch_health: false"
    )


def _load(saved, differing, *, checkpoint):
    """Load the changes, after a checkpoint; return notes. In check mode they are only listed."""
    digest = hashlib.sha256(json.dumps(differing).encode()).hexdigest()[:8]
    notes = []
    if checkpoint:
        name = f"faultbed-{digest}"
        saved.command(
            f"checkpoint {name}",
            current="none",
            desired="the ConfigDB before this run",
            do=["config", "checkpoint", name],
            undo=["config", "delete-checkpoint", name],
        )
        notes.append(f"`sudo config rollback {name}` returns to the ConfigDB before this run")
    saved.unread("save")
    if "DEVICE_METADATA" in {change.table for change in differing}:
        saved.unread("bgp", RESTART)
    for line in described(differing):
        saved.changes.should_make(line)
    with _json_file(json.dumps(loaded(differing))) as path:
        try:
            saved.command(
                f"ConfigDB {digest}",
                current=f"{len(differing)} differing entries",
                desired="loaded",
                do=commands(differing, path),
                undo=undo(differing),
            )
        except StateError as error:
            run_long(undo(differing))
            raise StateError(f"{error}; the changes are reverted") from None
    return notes


@contextlib.contextmanager
def _json_file(text):
    """Write a text to a file for `config`, and remove the file afterwards; yield its path."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        yield file.name


def _dry_run(text):
    """Let the switch check the changes against its YANG models and its rules, without making them.

    Raises:
        StateError: the switch rejects them.
    """
    with _json_file(text) as path:
        try:
            run_long(["config", "apply-patch", "--dry-run", "--ignore-non-yang-tables", path])
        except StateError as error:
            raise StateError(
                f"the switch rejects the changes before they are made: {error}; correct the inventory, or set "
                "sonic_switch_validate to false if its checker is wrong"
            ) from None


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
    paused = sorted(
        {word for row in tables.get("PORT_QOS_MAP", {}).values() for word in row.get("pfc_enable", "")} - {","}
    )
    if asic in PAUSE_GROUP_ASICS and paused:
        port_maps = tables.pop("PORT_QOS_MAP")
        tables["PFC_PRIORITY_TO_PRIORITY_GROUP_MAP"] = {MAP: {number: number for number in paused}}
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


def unbuffered(tables, config_db, dividing):
    """Return what our maps use and has no buffer on the switch, as text: nothing may be stored there.

    A switch has buffers after `config qos reload` (sonic-buildimage, buffers_config.j2). Lossless groups without an
    entry get theirs from buffermgrd, by port speed and cable length, so only a group that is not paused is checked.
    """
    maps = tables.get("TC_TO_PRIORITY_GROUP_MAP", {}).get(MAP)
    if maps is None:
        return []
    if not config_db.get("BUFFER_POOL"):
        return ["ConfigDB has no BUFFER_POOL: run `config qos reload` on the switch, which makes its buffers"]
    rows = {**config_db.get(LOSSY_GROUP_TABLE, {}), **tables.get(LOSSY_GROUP_TABLE, {})}
    there = {name for key in rows if (LOSSY_GROUP_TABLE, key) not in dividing for name in covered(key)}
    problems = {}
    for netdev, row in tables["PORT_QOS_MAP"].items():
        for group in sorted(set(maps.values()) - set(row.get("pfc_enable", "").split(","))):
            if (netdev, int(group)) not in there:
                problems.setdefault(group, []).append(netdev)
    return [
        f"priority group {group} has no buffer at {', '.join(netdevs)}: run `config qos reload`, or give it a profile "
        f"in {LOSSY_GROUP_TABLE}"
        for group, netdevs in problems.items()
    ]


def conflicts(desired, config_db):
    """Return the parts of a switch's ConfigDB that conflict with our tables, as text that says what to do."""
    tables = desired["tables"]
    problems = [*_missing_ports(tables, config_db), *_member_ports(tables, config_db)]
    if desired["bgp"]:
        problems += [*_other_bgp(config_db), *_factory_addresses(desired["ports"], config_db)]
    return problems


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


def _other_bgp(config_db):
    """Report BGP in ConfigDB: bgpcfgd and frrcfgd apply it in every mode (docker-fpm-frr, supervisord.conf.j2)."""
    tables = [table for table in ("BGP_NEIGHBOR", "BGP_PEER_RANGE", "BGP_GLOBALS") if config_db.get(table)]
    return [
        f"ConfigDB has {table}: SONiC would run it beside our BGP, so remove it, or set sonic_switch_bgp to false to "
        "keep the fabric's own BGP"
        for table in tables
    ]


def _factory_addresses(ports, config_db):
    """Report IPv4 addresses on uplinks whose session is to be unnumbered.

    SONiC's factory configuration has them. FRR starts a session of an interface with a /30 or /31 towards that subnet's
    other address, and not towards the neighbour's link-local one (bgpd, bgp_peer_conf_if_to_su_update_v4). It stays in
    Connect for ever if the other end has no such address.
    """
    for port in ports:
        if port.get("rnic") is None and not port.get("address"):
            for key in config_db.get("INTERFACE", {}):
                netdev, _, address = key.partition("|")
                if netdev == port["netdev"] and "." in address:
                    yield (
                        f"{netdev} has the address {address}, which stops an unnumbered BGP session: remove it "
                        f"(`config interface ip remove {netdev} {address}`), or write it into the inventory as this "
                        "port's address, for a numbered session"
                    )
