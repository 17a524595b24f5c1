"""PFC, DSCP map and trust of a port set by iproute2's dcb, on drivers with DCB (mlx5, mlxsw).

mlx5 trusts DSCP as soon as the map has an entry, and PCP again after the last one is removed (Linux,
drivers/net/ethernet/mellanox/mlx5/core/en_dcbnl.c, mlx5e_dcbnl_ieee_setapp). Not yet run on hardware.
"""

import re

from faultbed_state import StateError, run

__all__ = ["bring_dscp", "bring_pcp", "bring_pfc"]

PRIORITIES = 8


def bring_pfc(saved, netdev, priorities, *, otherwise):
    """Set which priorities pause (dcb-pfc(8)); `otherwise` advises what to do if the driver has no DCB."""
    have = _pairs(run(["dcb", "pfc", "show", "dev", netdev, "prio-pfc"]))
    if len(have) != PRIORITIES:
        raise StateError(f"dcb does not report which priorities pause on {netdev}: its driver has no DCB, {otherwise}")
    want = {str(number): "on" if number in priorities else "off" for number in range(PRIORITIES)}
    tool = ["dcb", "pfc", "set", "dev", netdev, "prio-pfc"]
    do, undo = ([*tool, *(f"{number}:{value}" for number, value in each.items())] for each in (want, have))
    saved.command(f"{netdev} PFC", have=have, want=want, do=do, undo=undo)


def bring_dscp(saved, netdev, dscp_map):
    """Set the inventory's lines of the DSCP map (dcb-app(8)); other entries stay."""
    have = _map(netdev)
    tool = ["dcb", "app"]
    for line in dscp_map:
        number, want = str(line["dscp"]), str(line["priority"])
        old = have.get(number)
        tail = ["dev", netdev, "dscp-prio"]
        undo = [*tool, "replace", *tail, f"{number}:{old}"] if old else [*tool, "del", *tail, f"{number}:{want}"]
        do = [*tool, "replace", *tail, f"{number}:{want}"]
        saved.command(f"{netdev} DSCP {number}", have=old, want=want, do=do, undo=undo)


def bring_pcp(saved, netdev):
    """Remove the whole DSCP map, so that the port uses the priority of the VLAN tag."""
    have, tail = _map(netdev), ["dev", netdev, "dscp-prio"]
    pairs = [f"{number}:{priority}" for number, priority in have.items()]
    undo = ["dcb", "app", "add", *tail, *pairs]
    saved.command(
        f"{netdev} trust", have="dscp" if have else "pcp", want="pcp", do=["dcb", "app", "flush", *tail], undo=undo
    )


def _map(netdev):
    return _pairs(run(["dcb", "-N", "app", "show", "dev", netdev, "dscp-prio"]))


def _pairs(output):
    """Parse `prio-pfc 0:off 3:on` as {"0": "off", "3": "on"}."""
    return dict(word.split(":", 1) for word in output.split() if re.fullmatch(r"[0-9]+:\w+", word))
