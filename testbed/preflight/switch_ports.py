"""Check that SONiC's ports have the lanes, breakout, FEC, autonegotiation and cable length of the inventory. Pure.

ConfigDB (sonic-yang-models, sonic-port.yang, sonic-breakout_cfg.yang, sonic-cable-length.yang): PORT has `lanes`
(`1,2,3,4`), `fec` (rs, fc, none, auto) and `autoneg` (on, off); BREAKOUT_CFG the mode of the port's first interface;
CABLE_LENGTH, from which buffermgrd computes headroom, a length such as `5m`. Only what the inventory gives is compared.
Not yet run on hardware.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.topology import Port
from faultbed.testbed.preflight.collect import Facts
from faultbed.testbed.preflight.rack_formats import complaint

__all__ = ["problems", "undetermined"]


def problems(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str, str]]:
    """Yield (where, observed, expected) for each value of a port that differs from the inventory's."""
    for where, port, config in _ports(inventory, state):
        if config is None:
            continue
        for name, observed, expected in _values(port, config):
            if observed != expected:
                yield where, f"{name} {observed or 'not set'}", expected


def undetermined(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str]]:
    """Yield (where, why) for each port with values to compare whose switch does not report them."""
    for where, port, config in _ports(inventory, state):
        if config is None and [*_values(port, {})]:
            raw = state[port.node].raw.get("configdb", "")
            yield where, complaint("sonic-cfggen", raw)


def _ports(
    inventory: Inventory, state: Mapping[str, Facts]
) -> Iterator[tuple[str, Port, Mapping[str, Mapping[str, Any]] | None]]:
    """Yield each switch port of the fabric with its switch's ConfigDB; None: not readable."""
    for switch in inventory.topology.switches:
        try:
            config = json.loads(state[switch.name].raw.get("configdb", ""))
        except ValueError:
            config = None
        if not isinstance(config, dict) or not isinstance(config.get("PORT"), dict):
            config = None
        for link in inventory.topology.links_of(switch.name):
            port = link.end(switch.name)
            yield f"{switch.name}:{port.netdev}", port, config


def _values(port: Port, config: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, observed, expected) for each value that the inventory gives for a port."""
    row = config.get("PORT", {}).get(port.netdev, {})
    if port.lanes is not None:
        lanes = row.get("lanes", "")
        yield "lanes", ",".join(lanes) if isinstance(lanes, list) else str(lanes), ",".join(map(str, port.lanes))
    if port.breakout is not None:
        modes = config.get("BREAKOUT_CFG", {}).get(port.netdev, {})
        yield "breakout", str(modes.get("brkout_mode", "")), port.breakout
    if port.fec is not None:
        yield "FEC", str(row.get("fec", "")), port.fec
    if port.autoneg is not None:
        yield "autonegotiation", str(row.get("autoneg", "off")), "on" if port.autoneg else "off"
    if port.cable_m is not None:
        lengths = [rows[port.netdev] for rows in config.get("CABLE_LENGTH", {}).values() if port.netdev in rows]
        yield "cable length", str(lengths[0]) if lengths else "", f"{port.cable_m}m"
