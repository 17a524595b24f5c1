"""Bring a SONiC switch to what its inventory says: ConfigDB by `config load`, eBGP by FRR's own file in split mode.

`config load` merges: what our tables do not name stays. What they change is read before (`sonic-cfggen -d
--print-data`) and written down entry by entry, so that a teardown gives back old values, and takes away what is ours
alone, by sonic-db-cli. Not yet run on hardware.
"""

import hashlib
import json
import shlex

from faultbed_fabric_bgp import fabric_bgpd_config
from faultbed_found import Found
from faultbed_state import StateError, answer, run

QP_FIELD = "RDMA_BTH_DEST_QP"
DB = ["sonic-db-cli", "CONFIG_DB"]
RESTART = ["systemctl", "restart", "bgp"]


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    found, tables = Found("sonic_switch", changes), wanted["tables"]
    left_out = _unable(tables) if wanted["load"] else []
    found.file(wanted["path"], json.dumps(tables, indent=2) + "\n")
    bgp = fabric_bgpd_config(wanted)
    found.file(wanted["bgp_path"], bgp)
    if not wanted["load"]:
        return {"loaded": False, "notes": ["ConfigDB and BGP are only written: sonic_switch_load puts them in force"]}
    have = json.loads(run(["sonic-cfggen", "-d", "--print-data"]))
    differing = differences(tables, have)
    if differing:
        _load(found, wanted["path"], differing, have)
    found.file(wanted["bgpd"], bgp, readers={"bgp": RESTART})
    found.after("bgp", RESTART)
    if wanted["save"]:
        found.after("save", ["config", "save", "-y"])
    return {"loaded": True, "notes": left_out}


def _load(found, path, differing, have):
    found.unread("save")
    if "DEVICE_METADATA" in {table for table, _, _ in differing}:
        found.unread("bgp", RESTART)
    found.command(
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
        raise StateError(f"this switch does not hash on {QP_FIELD}: set sonic_switch_hash_qp to false")
    if lacking:
        del tables["SWITCH_HASH"]
        return [f"SWITCH_HASH: the switch does not tell that it hashes on {', '.join(lacking)}"]
    return []


def capable(said):
    """Fields that the ASIC hashes on, of SWITCH_CAPABILITY as sonic-db-cli prints it (a dict of Python)."""
    _, _, tail = said.partition("'HASH|NATIVE_HASH_FIELD_LIST': '")
    return [word.strip() for word in tail.partition("'")[0].split(",") if word.strip()]


def differences(tables, have):
    """What `config load` would change: (table, key, {field: value}), in the order of the tables."""
    found = []
    for table, entries in tables.items():
        for key, fields in entries.items():
            old = have.get(table, {}).get(key)
            changed = {name: value for name, value in fields.items() if old is None or old.get(name) != value}
            if changed or old is None:
                found.append((table, key, changed))
    return found


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
