"""Packet faults, selected by headers: drop, mark, corrupt, delay, duplicate, reorder; and forged packets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from faultbed.inject.kinds.effect import Effect
from faultbed.inject.kinds.kind import Binding, Example, FaultKind, Param, Trait, described
from faultbed.inject.kinds.link import DIRECTION

__all__ = ["FILTERS", "KINDS"]

FILTERS = (
    Param(name="share", type="number", unit="", summary="share of packets, chosen by the seed", low=0.000001, high=1),
    Param(name="every", type="integer", unit="", summary="every n-th packet", low=1, high=1_000_000_000),
    Param(
        name="psn",
        type="psn",
        unit="",
        summary="PSN of the one packet; +N: a PSN at least N ahead of the one that passes the hop",
    ),
    Param(
        name="round",
        type="integer",
        unit="",
        summary="with psn: which transmission of the packet, 1 for the first",
        low=1,
        high=1_000_000,
        default=1,
    ),
    Param(
        name="qp",
        type="qpn",
        unit="",
        summary="destination QP number; any: the lowest connected one; any[2]: the third by number",
    ),
    Param(
        name="opcode",
        type="choice",
        unit="",
        summary="class of packets by BTH opcode and AETH syndrome; data-first to data-only: by the place in a message",
        choices=(
            *("any", "data", "data-first", "data-middle", "data-last", "data-only"),
            *("ack", "nak", "rnr-nak", "cnp", "read-request", "read-response", "atomic"),
        ),
        default="any",
    ),
    Param(name="src", type="rnic", unit="", summary="only packets that this RNIC has sent"),
    Param(name="dst", type="rnic", unit="", summary="only packets to this RNIC"),
    DIRECTION,
)
_RULE = "the nftables table and its hook, listed back"
_DETOUR = "the nftables table and its hook, and the netem queue of the detour, read back"
_LOSS = "out_of_seq_request, rcvd_seq_err, completer_retry_err or duplicate_request at an RNIC"


def _lost(params: Mapping[str, Any]) -> Effect | None:
    """Return the loss of packets that are taken independently of their contents; else it is not known."""
    chosen = ("psn", "qp", "burst", "src", "dst")
    if any(params.get(name) is not None for name in chosen) or params.get("opcode", "any") != "any":
        return None
    share = params.get("share") or (1 / params["every"] if params.get("every") else None)
    return None if share is None else Effect(lost=float(share), direction=params.get("direction") or "to")


def _packet(name: str, summary: str, *own: Param, **rest: Any) -> FaultKind:
    binding: Binding = "fd" if rest["armed_by"] == _RULE else "unit"
    return described(
        name=f"packet.{name}",
        summary=summary,
        binding={"port": binding, "rnic": binding},
        params=(*own, *FILTERS),
        fidelity={"soft": "real"},
        must_not_move="rxe send_err",
        reversible=True,
        **rest,
    )


_DROP = _packet(
    "drop",
    "lose RoCEv2 packets in the fabric: a share chosen by the seed (or bursts), every n-th, or one by QP and PSN",
    Param(
        name="burst",
        type="number",
        unit="packets",
        summary="with share: mean length of the bad state of a Gilbert-Elliott channel",
        low=1,
        high=10_000,
    ),
    Param(
        name="loss_bad",
        type="number",
        unit="",
        summary="with burst: share of packets lost in the bad state (default 1: Gilbert's channel)",
        low=0.000001,
        high=1,
    ),
    Param(
        name="loss_good",
        type="number",
        unit="",
        summary="with burst: share of packets lost in the good state (default 0)",
        low=0,
        high=0.999999,
    ),
    armed_by=_RULE,
    must_move=_LOSS,
    traits=frozenset({Trait.ONE_HOP, Trait.MARKS_ECT1, Trait.NEEDS_SELECTION, Trait.LOSES}),
    example=Example(target="host1:rxe0", params={"share": 0.1}),
    colour="#edae49",
    effect=_lost,
)

_MARK = _packet(
    "mark",
    "mark packets with ECN CE, as a congested switch would; rxe does not react",
    armed_by=_RULE,
    must_move="InCEPkts of the receiver's IP layer",
    traits=frozenset({Trait.NO_PACKET, Trait.ONE_HOP, Trait.MARKS_CE}),
    example=Example(target="host1:rxe0", params={"every": 7}),
    colour="#66a182",
)

_CORRUPT = _packet(
    "corrupt",
    "break the ICRC and nothing else: the IP identification, which only the ICRC covers, is overwritten",
    armed_by=_RULE,
    must_move=_LOSS,
    traits=frozenset({Trait.ONE_HOP, Trait.NEEDS_SELECTION, Trait.LOSES}),
    example=Example(target="host1:rxe0", params={"share": 0.1}),
    colour="#b56576",
    effect=_lost,
)

_DELAY = _packet(
    "delay",
    "hold packets back for a time; with jitter they are reordered",
    Param(name="delay", type="number", unit="ms", summary="delay of each packet", low=0.1, high=10_000, required=True),
    Param(
        name="jitter",
        type="number",
        unit="ms",
        summary="largest deviation from the delay, uniformly distributed",
        low=0.1,
        high=10_000,
    ),
    armed_by=_DETOUR,
    must_move="InECT1Pkts of the receiver's IP layer: delayed packets are marked with ECT(1)",
    traits=frozenset({Trait.ONE_HOP, Trait.MARKS_ECT1}),
    example=Example(target="rtsw1:ctsw1", params={"delay": 20, "direction": "from"}),
    colour="#457b9d",
)

_REORDER = _packet(
    "reorder",
    "delay some packets so that later ones overtake them",
    Param(
        name="late", type="number", unit="ms", summary="delay of the chosen packets", low=0.1, high=10_000, default=10.0
    ),
    armed_by=_DETOUR,
    must_move="out_of_seq_request, rcvd_seq_err or duplicate_request at an RNIC",
    traits=frozenset({Trait.ONE_HOP, Trait.MARKS_ECT1, Trait.NEEDS_SELECTION}),
    example=Example(target="host1:rxe0", params={"share": 0.1}),
    colour="#5e60ce",
)

_DUPLICATE = _packet(
    "duplicate",
    "deliver packets twice",
    armed_by=_DETOUR,
    must_move="InECT1Pkts of the receiver's IP layer: duplicated packets are marked with ECT(1)",
    traits=frozenset({Trait.ONE_HOP, Trait.MARKS_ECT1}),
    example=Example(target="host1:rxe0"),
    colour="#2a9d8f",
)

_FORGE = described(
    name="packet.forge",
    summary="send forged packets to the target, made from live ones, with a correct ICRC",
    binding={"port": "fd", "rnic": "fd"},
    params=(
        Param(
            name="what",
            type="choice",
            unit="",
            summary="cnp: rxe ignores it; nak: of the next PSN; ack: the last one again; replay: a data packet again; "
            "stray: to a QP that does not exist; malformed: with a wrong transport version",
            choices=("cnp", "nak", "ack", "replay", "stray", "malformed"),
            required=True,
        ),
        Param(name="qp", type="qpn", unit="", summary="destination QP number of the live packet", default="any"),
        Param(
            name="count",
            type="integer",
            unit="packets",
            summary="maximum number of packets",
            low=1,
            high=10_000,
            default=10,
        ),
    ),
    fidelity={"soft": "real"},
    armed_by="the socket at the port, by the holder",
    must_move="InECT1Pkts of the receiver's IP layer (forged packets are marked with ECT(1)); for a NAK also "
    "completer_retry_err or rcvd_seq_err of the target RNIC, for a data packet again its duplicate_request",
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.ONE_HOP, Trait.MARKS_ECT1}),
    example=Example(target="host1:rxe0", params={"what": "nak"}),
    colour="#3a86ff",
)

_SILENT = described(
    name="data.corrupt",
    summary="one bit of the last element of a data packet is flipped and the ICRC is recomputed: only a check of "
    "the payload detects it",
    binding={"port": "unit", "rnic": "unit"},
    params=tuple(param for param in FILTERS if param.name in ("share", "every", "psn", "round", "qp")),
    fidelity={"soft": "emulated"},
    armed_by="the nftables table and its hook, and the device that the packets are taken from, read back",
    must_move="InECT1Pkts of the receiver's IP layer (changed packets are marked with ECT(1)), and "
    "duplicate_request of the target RNIC: the receiver gets the changed packet and its retransmission. "
    "wrong_elements shows the effect on the payload",
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.ONE_HOP, Trait.MARKS_ECT1, Trait.NEEDS_SELECTION}),
    may_fail=("workload", "wrong_elements", "wrong_bytes"),
    example=Example(target="host1:rxe0", params={"every": 50}),
    colour="#ff006e",
)
"""Silent data corruption, which no checksum of the network detects."""

KINDS = (_DROP, _MARK, _CORRUPT, _DELAY, _REORDER, _DUPLICATE, _FORGE, _SILENT)
