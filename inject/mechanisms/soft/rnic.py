"""Faults of RNICs inside their host: reset and removal."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from faultbed.inject.mechanisms.mechanism import (
    Mechanism,
    Request,
    Step,
    Witness,
    holder_request,
    link_of,
    on_host,
    rnic_counters,
)
from faultbed.testbed.errors import UsageError

__all__ = ["BY_KIND"]


def _reset(request: Request) -> Mechanism:
    _, port = link_of(request)
    host, name = request.target.node, _name(request)
    return Mechanism(
        place=on_host(request),
        request=holder_request(request, "rnic_reset", {"device": port.netdev}, claims=f"{host}/{port.netdev}"),
        steps=(
            Step(
                do=f"ip link set dev {port.netdev} down",
                undo=f"ip link set dev {port.netdev} up; ip route replace <each previous route>",
            ),
        ),
        must_move=(Witness(any_of=(f"{host}/{name}.link_downed",)),),
        must_not_move=rnic_counters(request.topology, "send_err", but=host),
        restored=((f"{host}/{port.netdev}.up", 1), (f"{host}/{port.netdev}.carrier", 1)),
        shows={"device": port.netdev},
    )


def _remove(request: Request) -> Mechanism:
    _, port = link_of(request)
    host, name = request.target.node, _name(request)
    return Mechanism(
        place=on_host(request),
        request=holder_request(
            request, "rnic_remove", {"rnic": name, "netdev": port.netdev}, claims=f"{host}/{port.netdev}/{name}"
        ),
        steps=(Step(do=f"rdma link delete {name}", undo=f"rdma link add {name} type rxe netdev {port.netdev}"),),
        must_move=(),
        must_not_move=rnic_counters(request.topology, "send_err"),
        # A recreated device counts from 0.
        restored=((f"{host}/{name}.send_err", 0),),
        shows={"rnic": name, "netdev": port.netdev},
        while_on=((f"{host}/{name}.send_err", None),),
    )


def _name(request: Request) -> str:
    if request.target.rnic is None:
        raise UsageError(f"{request.where}.target: {request.target.text} is not an RNIC; name one, such as host1:rxe0")
    return request.target.rnic.name


BY_KIND: Mapping[str, Callable[[Request], Mechanism]] = {
    "rnic.reset": _reset,
    "rnic.remove": _remove,
}
