"""Congestion: short queues, background load, colliding paths, slow or late receivers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from faultbed.inject.kinds.effect import Effect, always
from faultbed.inject.kinds.kind import Example, Param, Trait, described
from faultbed.inject.kinds.processes import CPU_LEFT, CPU_LIMIT_ARMED_BY, CPU_LIMIT_MUST_MOVE

__all__ = ["KINDS"]


def _background(params: Mapping[str, Any]) -> Effect:
    return Effect(load_bps=float(params["rate"]) * 1e6)


_SHALLOW = described(
    name="congestion.shallow-queue",
    summary="a switch port with a low rate and a queue of a few packets: packets beyond it are dropped",
    binding={"port": "unit", "rnic": "unit"},
    params=(
        Param(
            name="packets", type="integer", unit="packets", summary="length of the queue", low=1, high=10_000, default=8
        ),
        Param(
            name="rate",
            type="number",
            unit="Mbit/s",
            summary="rate of the port",
            low=0.1,
            high=100_000,
            default=20.0,
        ),
    ),
    fidelity={"soft": "emulated"},
    armed_by="the nftables table and its hook, and the netem queue of the detour, read back",
    must_move="out_of_seq_request, rcvd_seq_err, completer_retry_err or duplicate_request at an RNIC",
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.ONE_HOP, Trait.MARKS_ECT1, Trait.ROUTES}),
    example=Example(target="host1:rxe0"),
    colour="#bc6c25",
)

_BACKGROUND = described(
    name="congestion.background",
    summary="background elephant flows: UDP from a host of another rack, if there is one, to the port of this RNIC",
    binding={"rnic": "unit"},
    params=(
        Param(
            name="rate",
            type="number",
            unit="Mbit/s",
            summary="total rate of all flows",
            low=0.1,
            high=10_000,
            default=20,
        ),
        Param(
            name="flows",
            type="integer",
            unit="",
            summary="number of 5-tuples, which ECMP spreads",
            low=1,
            high=64,
            default=4,
        ),
    ),
    fidelity={"soft": "real"},
    armed_by="the sending process in /proc",
    must_move="InECT1Pkts of the receiver's IP layer: the datagrams are marked with ECT(1)",
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.MARKS_ECT1, Trait.ROUTES, Trait.SENDS}),
    example=Example(target="host1:rxe0"),
    colour="#dda15e",
    effect=_background,
)

_INCAST = described(
    name="congestion.incast",
    summary="many to one: all other switches send bursts of UDP at the same time to the port of this RNIC",
    binding={"rnic": "unit"},
    params=(
        Param(
            name="rate",
            type="number",
            unit="Mbit/s",
            summary="total rate of all senders during a burst",
            low=0.1,
            high=10_000,
            default=60,
        ),
        Param(
            name="period",
            type="number",
            unit="ms",
            summary="time from burst to burst",
            low=20,
            high=60_000,
            default=200,
        ),
        Param(
            name="duty",
            type="number",
            unit="",
            summary="share of each period in the burst",
            low=0.05,
            high=1,
            default=0.25,
        ),
    ),
    fidelity={"soft": "emulated"},
    armed_by="the sending process in /proc",
    must_move="InECT1Pkts of the receiver's IP layer: the datagrams are marked with ECT(1)",
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.MARKS_ECT1, Trait.ROUTES, Trait.SENDS}),
    example=Example(target="host1:rxe0"),
    colour="#c97b3d",
)

_COLLISION = described(
    name="congestion.hash-collision",
    summary="all traffic of a rack switch to other racks takes this one uplink, whatever its hash",
    binding={"port": "unit"},
    params=(),
    fidelity={"soft": "emulated"},
    armed_by="the routing rule and its table, and the uplinks that the kernel names for 16 source ports",
    must_move="packets sent on this uplink, while the switch has the rule",
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.ROUTES}),
    example=Example(target="rtsw1:ctsw1"),
    colour="#606c38",
    effect=always(Effect(attracts=True)),
)

_SLOW = described(
    name="congestion.slow-receiver",
    summary="the CPU of the host's rank is limited: it processes received data late",
    binding={"host": "unit"},
    params=(CPU_LEFT,),
    fidelity={"soft": "emulated"},
    armed_by=CPU_LIMIT_ARMED_BY,
    must_move=CPU_LIMIT_MUST_MOVE,
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.ROUTES}),
    example=Example(target="host1"),
    colour="#7f5539",
)

_LATE = described(
    name="congestion.late-receives",
    summary="the host's rank posts receives late: senders (sends, writes with immediate, collectives) find none (RNR)",
    binding={"host": "unit"},
    params=(
        Param(
            name="late",
            type="integer",
            unit="ms",
            summary="time from a message to the next posted receive; without it, none is posted while the fault is on",
            low=1,
            high=600_000,
        ),
    ),
    fidelity={"soft": "real"},
    armed_by="the file that the traffic engine reads, read back",
    must_move="rcvd_rnr_err of an RNIC of another host: it received an RNR NAK",
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.ROUTES}),
    example=Example(target="host1", params={"late": 200}),
    colour="#a68a64",
)

KINDS = (_SHALLOW, _BACKGROUND, _INCAST, _COLLISION, _SLOW, _LATE)
