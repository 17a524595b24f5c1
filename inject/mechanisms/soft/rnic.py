"""Faults of RNICs, in their host: reset, removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inject.mechanisms.mechanism import Request, Shot, Step, Witness, held, link_of, on_host, rnic_counters
from testbed.errors import UsageError

__all__ = ["BY_KIND"]


def _reset(asked: Request) -> Shot:
    _, port = link_of(asked)
    host, name = asked.target.node, _name(asked)
    return Shot(
        place=on_host(asked),
        request=held(asked, "rnic_reset", {"device": port.netdev}, claims=f"{host}/{port.netdev}"),
        steps=(
            Step(
                do=f"ip link set dev {port.netdev} down",
                undo=f"ip link set dev {port.netdev} up; ip route replace <each route as it was>",
            ),
        ),
        must_move=(Witness(any_of=(f"{host}/{name}.link_downed",)),),
        must_not_move=rnic_counters(asked.topology, "send_err", but=host),
        restored=((f"{host}/{port.netdev}.up", 1), (f"{host}/{port.netdev}.carrier", 1)),
        shows={"device": port.netdev},
    )


def _remove(asked: Request) -> Shot:
    _, port = link_of(asked)
    host, name = asked.target.node, _name(asked)
    return Shot(
        place=on_host(asked),
        request=held(
            asked, "rnic_remove", {"rnic": name, "netdev": port.netdev}, claims=f"{host}/{port.netdev}/{name}"
        ),
        steps=(Step(do=f"rdma link delete {name}", undo=f"rdma link add {name} type rxe netdev {port.netdev}"),),
        must_move=(),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        # A device that has been made anew counts from 0.
        restored=((f"{host}/{name}.send_err", 0),),
        shows={"rnic": name, "netdev": port.netdev},
        while_on=((f"{host}/{name}.send_err", None),),
    )


def _name(asked: Request) -> str:
    if asked.target.rnic is None:
        raise UsageError(f"{asked.where}.target: {asked.target.text} is not an RNIC")
    return asked.target.rnic.name


BY_KIND: Mapping[str, Callable[[Request], Shot]] = {
    "rnic.reset": _reset,
    "rnic.remove": _remove,
}
