"""Faults of RNICs: reset, removal, loss of the address, and an error of a queue pair."""

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
    on_switch,
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


def _address(request: Request) -> Mechanism:
    _, port = link_of(request)
    host, name, rnic = request.target.node, _name(request), request.target.rnic
    address = rnic.address if rnic is not None else ""
    return Mechanism(
        place=on_host(request),
        request=holder_request(
            request,
            "rnic_address",
            {"rnic": name, "netdev": port.netdev, "address": address},
            claims=f"{host}/{port.netdev}",
        ),
        steps=(
            Step(
                do=f"ip address delete {address} dev {port.netdev}",
                undo=f"ip address add {address} dev {port.netdev}; ip route replace <each previous route>",
            ),
        ),
        must_move=(),
        must_not_move=(f"{host}/{port.netdev}.carrier_changes",),
        restored=((f"{host}/{port.netdev}.addresses", 1), (f"{host}/{port.netdev}.carrier", 1)),
        shows={"rnic": name, "netdev": port.netdev, "gid_entries": []},
        while_on=((f"{host}/{port.netdev}.addresses", 0),),
    )


_FATAL = {"invalid-request": 0x61, "remote-access": 0x62, "remote-operational": 0x63}
"""NAK codes that end a connection (InfiniBand 9.7.5.2.8)."""
_NAKS = 5
"""NAKs that are sent at most, all to one queue pair: one may arrive after the acknowledgement of its request."""


def _qp_error(request: Request) -> Mechanism:
    link, _ = link_of(request)
    name, qp, code = _name(request), request.spec.params["qp"], request.spec.params["code"]
    if isinstance(qp, str) and qp != "any":
        raise UsageError(f"{request.where}.qp: the NAK is made from an answer to a QP number, or to any; not {qp}")
    place = on_switch(request, link.a.node)
    args = {
        "netns": place.netns,
        "device": link.a.netdev,
        "what": "nak",
        "qp": None if qp == "any" else qp,
        "count": _NAKS,
        "syndrome": _FATAL[code],
    }
    host = request.target.node
    others = (rnic.name for rnic in request.topology.host_by_name[host].rnics if rnic.name != name)
    to = "the first QP that gets an answer" if qp == "any" else f"QP {qp}"
    return Mechanism(
        place=place,
        request=holder_request(request, "forge", args, claims=f"{place.name}/forge/{request.id}"),
        steps=(
            Step(
                do=f"up to {_NAKS} times: send a NAK ({code}, {_FATAL[code]:#x}) out of {link.a.netdev} of "
                f"{place.name}, made from an acknowledgement to {to} (AF_PACKET)",
                undo="# nothing: a queue pair in the error state is made anew by its program",
            ),
        ),
        must_move=(
            Witness(any_of=(f"{host}/{name}.qps_ended",)),
            Witness(any_of=(f"{host}/ip.InECT1Pkts",)),
        ),
        must_not_move=tuple(f"{host}/{other}.qps_ended" for other in others),
        shows={"device": link.a.netdev, "what": "nak"},
        complete_after=1,
    )


def _name(request: Request) -> str:
    if request.target.rnic is None:
        raise UsageError(f"{request.where}.target: {request.target.text} is not an RNIC; name one, such as host1:rxe0")
    return request.target.rnic.name


BY_KIND: Mapping[str, Callable[[Request], Mechanism]] = {
    "rnic.reset": _reset,
    "rnic.remove": _remove,
    "rnic.address": _address,
    "rnic.qp-error": _qp_error,
}
