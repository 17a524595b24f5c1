"""ConfigDB of a SONiC switch: merge our tables with it, list the changes, and build the commands and their revert.
Pure.

`config load` adds and changes entries; it removes nothing (sonic-utilities, config/main.py). Two things are therefore
deleted by sonic-db-cli: an entry for a range that includes one of ours, and a field whose absence is the setting.
"""

import json
import shlex
from typing import NamedTuple

__all__ = [
    "Change",
    "commands",
    "covered",
    "described",
    "differences",
    "loaded",
    "merged",
    "patch",
    "undo",
]

RANGED = ("QUEUE", "BUFFER_PG", "BUFFER_QUEUE")
"""Tables whose keys may be for several ports and numbers, as in SONiC's templates (`Ethernet0,Ethernet4|3-4`)."""
ABSENT_MEANS_OFF = {"PORT_QOS_MAP": ("pfc_enable", "pfcwd_sw_enable")}
"""Fields that are removed to turn them off. An empty value is invalid up to 202411 (sonic-port-qos-map.yang).

orchagent reads the whole row at each change, and turns PFC off if the field is gone (sonic-swss, qosorch.cpp,
handlePortQosMapTable).
"""
DB = ["sonic-db-cli", "CONFIG_DB"]
SHOWN_KEYS = 4
NOTHING = {"NULL": "NULL"}
"""What redis has in the place of an entry without fields (swsscommon, configdb.h)."""


class Change(NamedTuple):
    """The change of an entry: fields that are set, and fields that are removed. With neither, the entry is deleted.

    `old` has the entry's fields before the change; None: the entry does not exist yet.
    """

    table: str
    key: str
    old: "dict | None"
    new: dict
    removed: "tuple[str, ...]" = ()
    deleted: bool = False


def merged(tables, config_db):
    """Return our tables with what must remain of the switch's entries for ranges, and the keys of these entries.

    A range that includes an entry of ours is divided: our entry gets the range's fields below its own, the rest of the
    range keeps its fields.

    Returns:
        The tables, and the keys to delete: [(table, key)].
    """
    result = {table: dict(entries) for table, entries in tables.items()}
    dividing = []
    for table in RANGED:
        our_entries, switch_entries = tables.get(table, {}), config_db.get(table, {})
        for key, fields in switch_entries.items():
            members = covered(key)
            if key in our_entries or not any(f"{netdev}|{number}" in our_entries for netdev, number in members):
                continue
            dividing.append((table, key))
            for netdev, number in members:
                name = f"{netdev}|{number}"
                if name not in switch_entries:
                    result[table][name] = {**fields, **result[table].get(name, {})}
    return result, dividing


def covered(key):
    """Return the (port, number) pairs of a key; nothing for a key of another form, such as that of a VOQ."""
    netdevs, _, numbers = key.rpartition("|")
    first, _, last = numbers.partition("-")
    if "|" in netdevs or not first.isdigit() or not (last or first).isdigit():
        return []
    return [(netdev, number) for netdev in netdevs.split(",") for number in range(int(first), int(last or first) + 1)]


def differences(tables, config_db, dividing=()):
    """Return the changes from a switch's ConfigDB to our tables, in the order in which they are made."""
    changes = [Change(table, key, config_db[table][key], {}, deleted=True) for table, key in dividing]
    for table, entries in tables.items():
        for key, fields in entries.items():
            old = config_db.get(table, {}).get(key)
            new = {name: value for name, value in fields.items() if old is None or old.get(name) != value}
            off = ABSENT_MEANS_OFF.get(table, ())
            removed = tuple(name for name in off if name in (old or {}) and name not in fields)
            if new or removed or old is None:
                changes.append(Change(table, key, old, new, removed))
    return changes


def described(changes):
    """Return the changes as text, one line for all entries of a table in which the same values change."""
    keys = {}
    for change in changes:
        keys.setdefault((change.table, _values(change)), []).append(change.key)
    return [f"ConfigDB {table}|{_listed(names)}: {values}" for (table, values), names in keys.items()]


def _values(change):
    if change.deleted:
        return f"divided, was {_text(change.old)}"
    old = change.old or {}
    lines = [f"{name}={_value(value)} ({_was(old.get(name))})" for name, value in change.new.items()]
    if change.old is None:  # `new` once, not after each of 64 values
        lines = [f"new: {_text(change.new)}"]
    return ", ".join([*lines, *(f"{name} removed (was {_value(old[name])})" for name in change.removed)])


def _was(value):
    return "new" if value is None else f"was {_value(value)}"


def _text(fields):
    return " ".join(f"{name}={_value(value)}" for name, value in fields.items()) or "no fields"


def _value(value):
    return ",".join(value) if isinstance(value, list) else str(value)


def _listed(keys):
    more = f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
    return ", ".join(keys[:SHOWN_KEYS]) + more


def patch(changes, config_db):
    """Return the changes as a JSON patch (RFC 6902) of the ConfigDB for `config apply-patch`, as text."""
    steps, tables = [], set(config_db)
    for change in changes:
        place = f"/{change.table}/{_pointer(change.key)}"
        if change.deleted:
            continue
        if change.table not in tables:
            tables.add(change.table)
            steps.append({"op": "add", "path": f"/{change.table}", "value": {change.key: change.new}})
        elif change.old is None:
            steps.append({"op": "add", "path": place, "value": change.new})
        else:
            steps += [
                {"op": "add", "path": f"{place}/{_pointer(name)}", "value": value} for name, value in change.new.items()
            ]
            steps += [{"op": "remove", "path": f"{place}/{_pointer(name)}"} for name in change.removed]
    # Last, so that no table is empty in between: the switch refuses an empty one.
    steps += [
        {"op": "remove", "path": f"/{change.table}/{_pointer(change.key)}"} for change in changes if change.deleted
    ]
    return json.dumps(steps, indent=1) + "\n"


def _pointer(word):
    """Escape a word of a JSON pointer (RFC 6901)."""
    return word.replace("~", "~0").replace("/", "~1")


def loaded(changes):
    """Return the tables of the file for `config load` that sets the new values."""
    tables = {}
    for change in changes:
        if change.new or change.old is None:
            tables.setdefault(change.table, {})[change.key] = change.new
    return tables


def commands(changes, path):
    """Return the command that makes the changes, with those of `loaded` in the file `path`.

    It stops at the first step that fails.

    Ranges are deleted first: the deletion of `Ethernet0|3-4` would take away the profile of a newer `Ethernet0|3`.
    """
    lines = [[*DB, "DEL", f"{change.table}|{change.key}"] for change in changes if change.deleted]
    lines += [[*DB, "HDEL", f"{change.table}|{change.key}", *change.removed] for change in changes if change.removed]
    return _steps([*lines, ["config", "load", "-y", path]])


def undo(changes):
    """Return the command that reverts the changes, the last one first. New entries are deleted whole."""
    lines = []
    for change in reversed(changes):
        name, old = f"{change.table}|{change.key}", change.old
        if old is None:
            lines.append([*DB, "DEL", name])
            continue
        restored = old if change.deleted else [*(field for field in change.new if field in old), *change.removed]
        pairs = [_redis_field(field, old[field]) for field in restored]
        if change.deleted and not pairs:
            pairs = list(NOTHING.items())
        if pairs:
            lines.append([*DB, "HSET", name, *(word for pair in pairs for word in pair)])
        if added := [_redis_field(field, value)[0] for field, value in change.new.items() if field not in old]:
            lines.append([*DB, "HDEL", name, *added])
    return _steps(lines)


def _steps(lines):
    """Return a command that runs others in their order. Each is an argument, which Linux limits to 128 KiB each."""
    return ["sh", "-ec", 'for step; do eval "$step"; done', "steps", *(shlex.join(line) for line in lines)]


def _redis_field(field, value):
    """Return a field's name and value as stored in redis: lists are joined by commas, and their names end in `@`."""
    return (f"{field}@", ",".join(value)) if isinstance(value, list) else (field, value)
