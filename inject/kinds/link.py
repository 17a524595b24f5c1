"""Links: down, flapping, silent in one direction, slow, with a smaller MTU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from faultbed.inject.kinds.effect import CUT, Effect, always
from faultbed.inject.kinds.kind import Example, Param, Trait, described

__all__ = ["DIRECTION", "KINDS"]

DIRECTION = Param(
    name="direction",
    type="choice",
    unit="",
    summary="towards the target or coming from it",
    choices=("to", "from"),
    default="to",
)
_CARRIER = (
    "carrier_down_count of the other end (uplink), carrier_changes of the host (RNIC), retransmissions at a host "
    "(host port)"
)
_FLAGS = "interface flags read back in the switch (port), QMP's acknowledgement (RNIC)"


def _once_down(params: Mapping[str, Any]) -> Effect | None:
    """Return the effect of a flap that lasts for the whole window: in a train, routes converge again and again."""
    return CUT if params.get("period") is None else None


def _limited(params: Mapping[str, Any]) -> Effect:
    return Effect(rate_bps=float(params["rate"]) * 1e6, direction=params.get("direction") or "to")


_DOWN = described(
    name="link.down",
    summary="take a link down for the whole window",
    binding={"port": "unit", "rnic": "local"},
    params=(),
    fidelity={"soft": "emulated"},
    armed_by=_FLAGS,
    must_move=_CARRIER,
    must_not_move="rxe send_err (except that of the target RNIC)",
    reversible=True,
    traits=frozenset({Trait.LINK_STATE, Trait.CARRIER, Trait.ROUTES}),
    example=Example(target="host1:rxe0"),
    colour="#a63446",
    effect=always(CUT),
)

_FLAP = described(
    name="link.flap",
    summary="take a link down and up again: once for the whole window, or as a train of flaps",
    binding={"port": "unit", "rnic": "local"},
    params=(
        Param(name="period", type="number", unit="s", summary="time from one down to the next", low=0.05, high=3600),
        Param(
            name="duty",
            type="number",
            unit="",
            summary="share of each period spent down",
            low=0.01,
            high=0.99,
            default=0.5,
        ),
        Param(name="count", type="integer", unit="", summary="maximum number of flaps", low=1, high=100_000),
    ),
    fidelity={"soft": "emulated"},
    armed_by=_FLAGS,
    must_move=_CARRIER,
    must_not_move="rxe send_err (except that of the target RNIC)",
    reversible=True,
    traits=frozenset({Trait.LINK_STATE, Trait.CARRIER, Trait.ROUTES}),
    example=Example(target="rtsw1:ctsw1", params={"period": 1}),
    colour="#d1495b",
    effect=_once_down,
)

_ONEWAY = described(
    name="link.oneway",
    summary="a link that is up and silent in one direction: every packet is lost, the carrier stays",
    binding={"port": "fd", "rnic": "fd"},
    params=(DIRECTION,),
    fidelity={"soft": "emulated"},
    armed_by="the nftables table and its hook, listed back",
    must_move="retransmissions at an RNIC, or of the BGP sessions at both ends (uplink)",
    must_not_move="carrier_changes of both ends, rxe send_err",
    reversible=True,
    traits=frozenset({Trait.LINK_STATE, Trait.ONE_HOP, Trait.ROUTES}),
    example=Example(target="rtsw1:ctsw1"),
    colour="#e76f51",
    effect=always(CUT),  # the BGP session over the link goes down with one of its directions
)

_RATE = described(
    name="link.rate",
    summary="a link with less capacity: IPv4 traffic in one direction is limited to a rate",
    binding={"port": "unit", "rnic": "unit"},
    params=(
        Param(
            name="rate", type="number", unit="Mbit/s", summary="remaining rate", low=0.1, high=100_000, required=True
        ),
        DIRECTION,
    ),
    fidelity={"soft": "emulated"},
    armed_by="the nftables table and its hook, and the tbf queue of the detour, read back",
    must_move="overlimits of the queue, and packets marked with ECT(1) at the receiver's IP layer",
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.ONE_HOP, Trait.MARKS_ECT1, Trait.ROUTES}),
    example=Example(target="host1:rxe0", params={"rate": 10}),
    colour="#f4a261",
    effect=_limited,
)

_MTU = described(
    name="link.mtu",
    summary="an MTU mismatch: the switch receives packets that this port can no longer send",
    binding={"port": "unit", "rnic": "unit"},
    params=(
        Param(
            name="mtu", type="integer", unit="bytes", summary="MTU of the switch port", low=576, high=9000, default=1500
        ),
    ),
    fidelity={"soft": "real"},
    armed_by="the MTU of the port, read back by the holder and by the counters",
    must_move="FragFails of the switch: packets that are too big and must not be fragmented",
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.ROUTES, Trait.FRAGMENTS}),
    example=Example(target="host1:rxe0"),
    colour="#9c6644",
)

KINDS = (_DOWN, _FLAP, _ONEWAY, _RATE, _MTU)
