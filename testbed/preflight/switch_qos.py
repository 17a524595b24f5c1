"""Check that the switches' ports treat RoCE by the lab's QoS profile: the other end of the check `qos`. Pure.

It reads ConfigDB by `sonic-cfggen -d --print-data` (SONiC: PORT_QOS_MAP with each port's maps and `pfc_enable`,
DSCP_TO_TC_MAP with traffic classes, which have the numbers of priorities here, as the role sonic_switch writes them).
That is the switch's configuration; no table shows what its ASIC does. Not yet run on hardware.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.inventory.schema import QosVars
from faultbed.testbed.model.topology import Switch
from faultbed.testbed.preflight.collect import Facts
from faultbed.testbed.preflight.rack_formats import complaint

__all__ = ["problems", "undetermined"]

_GLOBAL = "global"
"""The row of PORT_QOS_MAP for the whole switch; newer releases have dscp_to_tc_map there."""


def problems(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str, str]]:
    """Yield (where, observed, expected) for each difference of a switch port from the QoS profile."""
    if inventory.qos is None:
        return
    for switch, tables in _config(inventory, state):
        if tables is None:
            continue
        ports, classes = tables
        for link in inventory.topology.links_of(switch.name):
            netdev = link.end(switch.name).netdev
            row = {**ports.get(_GLOBAL, {}), **ports.get(netdev, {})}
            for observed, expected in _port(row, classes, inventory.qos, inventory.priority_of_dscp):
                yield f"{switch.name}:{netdev}", observed, expected


def undetermined(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str]]:
    """Yield (where, why) for switches without a readable ConfigDB."""
    if inventory.qos is None:
        yield inventory.name, "the inventory has no faultbed_qos to compare with"
        return
    for switch, tables in _config(inventory, state):
        if switch.nos in ("frr", "cumulus"):
            yield switch.name, f"{switch.nos} has no ConfigDB; use `dcb pfc show` and `dcb app show` there"
        elif tables is None:
            yield switch.name, complaint("sonic-cfggen", state[switch.name].raw.get("configdb", ""))


_Table = Mapping[str, Mapping[str, str]]


def _config(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[Switch, tuple[_Table, _Table] | None]]:
    """Yield each switch with its port rows and its class maps; None: unknown."""
    for switch in inventory.topology.switches:
        try:
            config: Any = json.loads(state[switch.name].raw.get("configdb", ""))
        except ValueError:
            config = None
        is_whole = isinstance(config, dict) and {"PORT_QOS_MAP", "DSCP_TO_TC_MAP"} <= set(config)
        yield switch, (_rows(config["PORT_QOS_MAP"]), _rows(config["DSCP_TO_TC_MAP"])) if is_whole else None


def _rows(table: Any) -> _Table:
    """Return the rows of a table by name; one row may be for several ports (`Ethernet0,Ethernet4`)."""
    rows = table.items() if isinstance(table, dict) else ()
    return {name: row for key, row in rows if isinstance(row, dict) for name in str(key).split(",")}


def _port(
    row: Mapping[str, str], classes: _Table, profile: QosVars, priority_of: Mapping[int, int]
) -> Iterator[tuple[str, str]]:
    paused = sorted(int(word) for word in str(row.get("pfc_enable", "")).split(",") if word.strip().isdigit())
    if paused != sorted(profile.pfc_priorities):
        yield f"PFC on {paused or 'no priority'}", str(sorted(profile.pfc_priorities) or "no priority")
    if profile.trust != "dscp":
        return
    # Until 2021 a reference was written `[DSCP_TO_TC_MAP|NAME]`.
    name = str(row.get("dscp_to_tc_map", "")).strip("[]").rpartition("|")[2]
    if name not in classes:
        yield f"no map of DSCPs{f' {name}' if name else ''}: it does not trust them", "trust dscp"
        return
    for dscp, priority in priority_of.items():
        traffic_class = str(classes[name].get(str(dscp), "0"))
        if traffic_class != str(priority):
            yield f"DSCP {dscp} in traffic class {traffic_class} ({name})", str(priority)
