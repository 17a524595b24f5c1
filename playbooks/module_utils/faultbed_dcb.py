"""PFC, DSCP map and trust of a port by iproute2's dcb: the kernel's own way, where the driver has DCB (mlx5, mlxsw).

mlx5 trusts DSCP from the first entry of the map on, and again PCP when the last is gone (Linux,
drivers/net/ethernet/mellanox/mlx5/core/en_dcbnl.c, mlx5e_dcbnl_ieee_setapp). Not yet run on hardware.
"""

import re

from faultbed_state import StateError, run

__all__ = ["bring_dscp", "bring_pcp", "bring_pfc"]

PRIORITIES = 8


def bring_pfc(found, netdev, priorities, *, otherwise):
    """Which priorities pause (dcb-pfc(8)); `otherwise` is what to do where the driver has no DCB."""
    have = _pairs(run(["dcb", "pfc", "show", "dev", netdev, "prio-pfc"]))
    if len(have) != PRIORITIES:
        raise StateError(f"dcb does not report which priorities pause on {netdev}: its driver has no DCB, {otherwise}")
    want = {str(number): "on" if number in priorities else "off" for number in range(PRIORITIES)}
    tool = ["dcb", "pfc", "set", "dev", netdev, "prio-pfc"]
    do, undo = ([*tool, *(f"{number}:{value}" for number, value in each.items())] for each in (want, have))
    found.command(f"{netdev} PFC", have=have, want=want, do=do, undo=undo)


def bring_dscp(found, netdev, dscp_map):
    """The inventory's lines of the DSCP map (dcb-app(8)); what they do not name stays."""
    have = _map(netdev)
    tool = ["dcb", "app"]
    for line in dscp_map:
        number, want = str(line["dscp"]), str(line["priority"])
        old = have.get(number)
        tail = ["dev", netdev, "dscp-prio"]
        undo = [*tool, "replace", *tail, f"{number}:{old}"] if old else [*tool, "del", *tail, f"{number}:{want}"]
        do = [*tool, "replace", *tail, f"{number}:{want}"]
        found.command(f"{netdev} DSCP {number}", have=old, want=want, do=do, undo=undo)


def bring_pcp(found, netdev):
    """No DSCP map at all, so that the port goes by the VLAN tag's priority."""
    have, tail = _map(netdev), ["dev", netdev, "dscp-prio"]
    pairs = [f"{number}:{priority}" for number, priority in have.items()]
    undo = ["dcb", "app", "add", *tail, *pairs]
    found.command(
        f"{netdev} trust", have="dscp" if have else "pcp", want="pcp", do=["dcb", "app", "flush", *tail], undo=undo
    )


def _map(netdev):
    return _pairs(run(["dcb", "-N", "app", "show", "dev", netdev, "dscp-prio"]))


def _pairs(said):
    """`prio-pfc 0:off 3:on` as {"0": "off", "3": "on"}."""
    return dict(word.split(":", 1) for word in said.split() if re.fullmatch(r"[0-9]+:\w+", word))
