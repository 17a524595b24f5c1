"""PFC, DSCP map and trust of a port, set by iproute2's dcb on drivers with DCB (mlx5, mlxsw).

mlx5 trusts DSCP as soon as the map has an entry, and PCP again after the last one is removed (Linux,
drivers/net/ethernet/mellanox/mlx5/core/en_dcbnl.c, mlx5e_dcbnl_ieee_setapp). Not yet run on hardware.
"""

import re

from faultbed_state import StateError, run

__all__ = ["configure_dscp", "configure_pcp", "configure_pfc"]

PRIORITIES = 8


def configure_pfc(saved, netdev, priorities, *, otherwise):
    """Set the priorities that pause (dcb-pfc(8)); `otherwise` says what the user can do if the driver has no DCB."""
    current = _pairs(run(["dcb", "pfc", "show", "dev", netdev, "prio-pfc"]))
    if len(current) != PRIORITIES:
        raise StateError(f"{netdev}: dcb reports no PFC priorities, its driver has no DCB; {otherwise}")
    desired = {str(number): "on" if number in priorities else "off" for number in range(PRIORITIES)}
    tool = ["dcb", "pfc", "set", "dev", netdev, "prio-pfc"]
    do, undo = ([*tool, *(f"{number}:{value}" for number, value in state.items())] for state in (desired, current))
    saved.command(f"{netdev} PFC", current=current, desired=desired, do=do, undo=undo)


def configure_dscp(saved, netdev, dscp_map):
    """Set the inventory's lines of the DSCP map (dcb-app(8)); other entries stay."""
    current = _map(netdev)
    tool = ["dcb", "app"]
    for line in dscp_map:
        dscp, priority = str(line["dscp"]), str(line["priority"])
        old = current.get(dscp)
        tail = ["dev", netdev, "dscp-prio"]
        undo = [*tool, "replace", *tail, f"{dscp}:{old}"] if old else [*tool, "del", *tail, f"{dscp}:{priority}"]
        do = [*tool, "replace", *tail, f"{dscp}:{priority}"]
        saved.command(f"{netdev} DSCP {dscp}", current=old, desired=priority, do=do, undo=undo)


def configure_pcp(saved, netdev):
    """Remove the whole DSCP map, so that the port uses the priority of the VLAN tag."""
    dscp_map, tail = _map(netdev), ["dev", netdev, "dscp-prio"]
    pairs = [f"{dscp}:{priority}" for dscp, priority in dscp_map.items()]
    saved.command(
        f"{netdev} trust",
        current="dscp" if dscp_map else "pcp",
        desired="pcp",
        do=["dcb", "app", "flush", *tail],
        undo=["dcb", "app", "add", *tail, *pairs],
    )


def _map(netdev):
    """Return the DSCP map of a port: DSCP -> priority, both as text."""
    return _pairs(run(["dcb", "-N", "app", "show", "dev", netdev, "dscp-prio"]))


def _pairs(output):
    """Return the pairs in dcb's output: {"0": "off", "3": "on"} for `prio-pfc 0:off 3:on`."""
    return dict(word.split(":", 1) for word in output.split() if re.fullmatch(r"[0-9]+:\w+", word))
