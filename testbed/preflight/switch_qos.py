"""Check that the switches' ports treat RoCE by the lab's QoS profile: the other end of the check `qos`. Pure.

It reads ConfigDB by `sonic-cfggen -d --print-data` (SONiC: PORT_QOS_MAP with each port's maps and `pfc_enable`,
DSCP_TO_TC_MAP with traffic classes, which have the numbers of priorities here, as the role sonic_switch writes them).
Buffers are also read from APPL_DB, because buffermgrd writes the lossless ones only there (sonic-swss, buffermgr.cpp).
That is the switch's configuration; no table shows what its ASIC does. Not yet run on hardware.

A packet's way through a port: DSCP, traffic class, then a priority group on input and a queue on output. What has no
buffer stores nothing. A class that PFC pauses needs a lossless group: its profile has headroom (`xoff`), or is NULL,
for which buffermgrd computes one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.inventory.schema import QosVars
from faultbed.testbed.preflight.collect import CONFIG_TABLES, Facts
from faultbed.testbed.preflight.rack_formats import complaint

__all__ = ["problems", "undetermined"]

_GLOBAL = "global"
"""The row of PORT_QOS_MAP for the whole switch; newer releases have dscp_to_tc_map there."""
_NO_BUFFERS = "ConfigDB has no BUFFER_POOL: its QoS was never loaded"
_COMPUTED = "NULL"
"""The profile of a lossless group whose headroom buffermgrd computes from port speed and cable length."""

_Table = Mapping[str, Mapping[str, str]]
_Slots = Mapping[tuple[str, int], Mapping[str, str]]
"""Rows by port and number, of entries that may be for several of both (`Ethernet0,Ethernet4|3-4`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SwitchConfig:
    """The QoS tables of a switch; `computed`: APPL_DB was read, too."""

    tables: Mapping[str, _Table]
    groups: _Slots
    queues: _Slots
    scheduled: _Slots
    profiles: _Table
    computed: bool

    def map_of(self, row: Mapping[str, str], field: str, table: str) -> Mapping[str, str] | None:
        """Return the map that a port's row names in `field`; until 2021 the reference was `[TABLE|NAME]`."""
        return self.tables[table].get(_reference(row.get(field, "")))


def problems(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str, str]]:
    """Yield (where, observed, expected) for each difference of a switch port from the QoS profile."""
    if inventory.qos is None:
        return
    for switch in inventory.topology.switches:
        config = _config(state[switch.name])
        if config is None:
            continue
        has_buffers = bool(config.tables["BUFFER_POOL"])
        if not has_buffers:
            yield switch.name, _NO_BUFFERS, "pools, profiles and queues: `config qos reload` on the switch"
        ports = config.tables["PORT_QOS_MAP"]
        for link in inventory.topology.links_of(switch.name):
            netdev = link.end(switch.name).netdev
            row = {**ports.get(_GLOBAL, {}), **ports.get(netdev, {})}
            wrong = [*_port(row, config.tables["DSCP_TO_TC_MAP"], inventory.qos, inventory.priority_of_dscp)]
            if has_buffers:
                wrong += _buffers(netdev, row, config)
                wrong += _cnp(netdev, row, config, inventory.qos.cnp_dscp)
            for observed, expected in wrong:
                yield f"{switch.name}:{netdev}", observed, expected


def undetermined(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str]]:
    """Yield (where, why) for switches without a readable ConfigDB or APPL_DB."""
    if inventory.qos is None:
        yield inventory.name, "the inventory has no faultbed_qos to compare with"
        return
    for switch in inventory.topology.switches:
        raw = state[switch.name].raw
        config = _config(state[switch.name])
        if switch.nos in ("frr", "cumulus"):
            yield switch.name, f"{switch.nos} has no ConfigDB; use `dcb pfc show` and `dcb app show` there"
        elif config is None:
            yield switch.name, complaint("sonic-cfggen", raw.get("configdb", ""))
        elif not config.computed:
            yield switch.name, f"{complaint('sonic-db-dump', raw.get('appldb', ''))}; buffers only from ConfigDB"


def _config(facts: Facts) -> _SwitchConfig | None:
    """Return a switch's QoS tables; None if they cannot be read."""
    config, computed = _object(facts.raw.get("configdb", "")), _object(facts.raw.get("appldb", ""))
    if config is None or not set(CONFIG_TABLES) <= set(config):
        return None
    applied: dict[str, dict[str, Any]] = {}
    for key, entry in (computed or {}).items():
        table, _, name = key.partition(":")
        value = entry.get("value", {}) if isinstance(entry, dict) else {}
        applied.setdefault(table, {})[name.replace(":", "|")] = value
    tables = {name: _rows(config[name]) for name in CONFIG_TABLES}
    return _SwitchConfig(
        tables=tables,
        groups=_slots(applied.get("BUFFER_PG_TABLE")) | _slots(config["BUFFER_PG"]),
        queues=_slots(applied.get("BUFFER_QUEUE_TABLE")) | _slots(config["BUFFER_QUEUE"]),
        scheduled=_slots(config["QUEUE"]),
        profiles={**_rows(applied.get("BUFFER_PROFILE_TABLE")), **tables["BUFFER_PROFILE"]},
        computed=computed is not None,
    )


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _rows(table: Any) -> _Table:
    """Return the rows of a table by name; one row may be for several ports (`Ethernet0,Ethernet4`)."""
    rows = table.items() if isinstance(table, dict) else ()
    return {name: row for key, row in rows if isinstance(row, dict) for name in str(key).split(",")}


def _slots(table: Any) -> dict[tuple[str, int], Mapping[str, str]]:
    """Return the rows of a table by port and number. A row for fewer numbers goes before one for more."""
    slots: dict[tuple[str, int], Mapping[str, str]] = {}
    rows = [(key, row) for key, row in table.items() if isinstance(row, dict)] if isinstance(table, dict) else []
    for key, row in sorted(rows, key=lambda item: "-" in item[0], reverse=True):
        netdevs, _, numbers = key.rpartition("|")
        first, _, last = numbers.partition("-")
        if first.isdigit() and (last or first).isdigit():
            for number in range(int(first), int(last or first) + 1):
                slots |= {(netdev, number): row for netdev in netdevs.split(",")}
    return slots


def _reference(value: object) -> str:
    return str(value).strip("[]").rpartition("|")[2]


def _paused(row: Mapping[str, str]) -> list[int]:
    return sorted(int(word) for word in str(row.get("pfc_enable", "")).split(",") if word.strip().isdigit())


def _port(
    row: Mapping[str, str], classes: _Table, profile: QosVars, priority_of: Mapping[int, int]
) -> Iterator[tuple[str, str]]:
    paused = _paused(row)
    if paused != sorted(profile.pfc_priorities):
        yield f"PFC on {paused or 'no priority'}", str(sorted(profile.pfc_priorities) or "no priority")
    name = _reference(row.get("dscp_to_tc_map", ""))
    if name not in classes:
        yield f"no map of DSCPs{f' {name}' if name else ''}: it does not trust them", "trust dscp"
        return
    for dscp, priority in priority_of.items():
        traffic_class = str(classes[name].get(str(dscp), "0"))
        if traffic_class != str(priority):
            yield f"DSCP {dscp} in traffic class {traffic_class} ({name})", str(priority)


def _buffers(netdev: str, row: Mapping[str, str], config: _SwitchConfig) -> Iterator[tuple[str, str]]:
    """Yield the groups and queues in use that have no buffer, and paused groups that are not lossless."""
    classes = config.map_of(row, "dscp_to_tc_map", "DSCP_TO_TC_MAP")
    if classes is None:
        return  # reported by _port
    in_use = sorted({*classes.values(), *map(str, _paused(row))})
    for field, table, slots, kind in (
        ("tc_to_pg_map", "TC_TO_PRIORITY_GROUP_MAP", config.groups, "priority group"),
        ("tc_to_queue_map", "TC_TO_QUEUE_MAP", config.queues, "queue"),
    ):
        mapped = config.map_of(row, field, table)
        if mapped is None:
            yield f"no {field}, so that it is unknown where traffic classes are stored", f"a map in {table}"
            continue
        bare: dict[str, list[str]] = {}
        for traffic_class in in_use:
            number = str(mapped.get(traffic_class, "0"))
            if config.computed and (not number.isdigit() or (netdev, int(number)) not in slots):
                bare.setdefault(number, []).append(traffic_class)
        for number, of in bare.items():
            yield (
                f"{kind} {number} has no buffer, and traffic class {', '.join(of)} is stored there",
                "a buffer profile",
            )
    yield from _lossless(netdev, row, config)


def _lossless(netdev: str, row: Mapping[str, str], config: _SwitchConfig) -> Iterator[tuple[str, str]]:
    groups = config.map_of(row, "tc_to_pg_map", "TC_TO_PRIORITY_GROUP_MAP") or {}
    for priority in _paused(row):
        number = str(groups.get(str(priority), ""))
        slot = config.groups.get((netdev, int(number))) if number.isdigit() else None
        if slot is None:
            continue  # reported by _buffers
        name = _reference(slot.get("profile", ""))
        if name != _COMPUTED and "xoff" not in config.profiles.get(name, {}):
            observed = (
                f"PFC pauses priority {priority}, but its group {number} has the profile {name}, without headroom"
            )
            yield observed, "a lossless profile (with xoff): packets are lost after a pause"


def _cnp(netdev: str, row: Mapping[str, str], config: _SwitchConfig, dscp: int) -> Iterator[tuple[str, str]]:
    """Yield how the queue of congestion notification packets is scheduled, if not strictly."""
    classes = config.map_of(row, "dscp_to_tc_map", "DSCP_TO_TC_MAP")
    queues = config.map_of(row, "tc_to_queue_map", "TC_TO_QUEUE_MAP")
    if classes is None or queues is None:
        return  # reported by _port and _buffers
    number = str(queues.get(str(classes.get(str(dscp), "0")), "0"))
    if not number.isdigit():
        return
    name = _reference(config.scheduled.get((netdev, int(number)), {}).get("scheduler", ""))
    how = config.tables["SCHEDULER"].get(name, {})
    if how.get("type") != "STRICT":
        weight = f" with weight {how['weight']}" if "weight" in how else ""
        yield (
            f"CNPs (DSCP {dscp}) in queue {number}, which has {how.get('type', 'no scheduler')}{weight}",
            "STRICT, so that they do not wait behind the data that they slow down",
        )
