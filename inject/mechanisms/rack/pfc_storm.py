"""A storm of PFC pause frames, sent by a host's RNIC or by a port of a Linux switch. Not yet run on hardware.

The sender makes the frames itself (IEEE 802.1Qbb; as sonic-mgmt's pfc_gen.py does on a Linux fanout switch). Whether an
RNIC lets them out is for its firmware to say, so the witness is the count of the neighbour's port.

A storm is bounded in three ways: each burst is shorter than the 100 ms after which SONiC's PFC watchdog acts at the
earliest (sonic-pfcwd.yang), a neighbour sends again 65,535 quanta after the last frame, and the holder's window and
lease end the sender.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from faultbed.inject.mechanisms.mechanism import Mechanism, Place, Request, Step, Witness, holder_request, link_of
from faultbed.inject.mechanisms.rack.rack_mechanism import RackMechanism
from faultbed.testbed.errors import Unsupported, UsageError
from faultbed.testbed.model.topology import Port

__all__ = ["BY_KIND", "MECHANISMS"]

_LONGEST_S = 60.0
_GAP_MS = 20.0
"""Shortest time between two bursts, in which the paused queue sends: the watchdog then begins to count anew."""
_ARRIVED = 0.1
"""Share of the frames that the neighbour must count at least."""
_PAUSE_BITS = 65_535 * 512
"""Longest time that one frame pauses, in bit times of the link (IEEE 802.3, annex 31B and 31D)."""

MECHANISMS = (
    RackMechanism(
        kind="congestion.pfc-storm",
        fidelity="real",
        by="raw PFC frames in short bursts, from a host's RNIC or a port of a Linux switch; needs --confirm",
    ),
)


def _storm(request: Request) -> Mechanism:
    link, named = link_of(request)
    far, params = link.other(named.node), request.spec.params
    burst_ms, period_ms, priority = params["burst"], params["period"], params["priority"]
    if period_ms < burst_ms + _GAP_MS:
        raise UsageError(
            f"{request.where}.period: {period_ms:g} ms leaves less than {_GAP_MS:g} ms between bursts of "
            f"{burst_ms:g} ms, and a PFC watchdog may act on it; give at least {burst_ms + _GAP_MS:g} ms"
        )
    if request.spec.for_s > _LONGEST_S:
        raise UsageError(
            f"{request.where}.for: {request.spec.for_s:g} s is too long for a storm; at most {_LONGEST_S:g} s"
        )
    switch = request.topology.switch_by_name.get(named.node)
    if switch is not None and not switch.forwards_in_kernel:
        raise Unsupported(
            f"{request.where}: {request.spec.kind} is not supported on this lab: {switch.name} forwards in its ASIC, "
            "which sends pause frames by itself only; target the RNIC at the other end, or a Linux switch"
        )
    speed_gbps = named.speed_gbps or far.speed_gbps
    if speed_gbps is None:
        raise Unsupported(
            f"{request.where}.target: not supported on this lab: the inventory has no speed_gbps for this link, which "
            "says how long one frame pauses; add it"
        )
    pause_s = _PAUSE_BITS / (speed_gbps * 1e9)
    frames = request.spec.for_s * burst_ms / period_ms / pause_s
    args = {
        "device": named.netdev,
        "priority": priority,
        "burst_s": burst_ms / 1000,
        "period_s": period_ms / 1000,
        "pause_s": pause_s,
    }
    return Mechanism(
        place=Place(node=named.node),
        request=holder_request(request, "pause", args, claims=f"{named.node}/{named.netdev}/pause"),
        steps=(
            Step(
                do=f"PFC frames for priority {priority} out of {named.netdev}, {burst_ms:g} of every {period_ms:g} ms",
                undo="kill %1   # they also end with the holder, and the pause 65,535 quanta after the last frame",
            ),
        ),
        must_move=(Witness(any_of=(_count_of(request, far, priority),), at_least=max(1, round(frames * _ARRIVED))),),
        must_not_move=(),
        shows={"device": named.netdev, "priority": priority},
    )


def _count_of(request: Request, far: Port, priority: int) -> str:
    """Return the counter of received pause frames at the port that is to be paused.

    Raises:
        Unsupported: nothing there counts them.
    """
    switch = request.topology.switch_by_name.get(far.node)
    if switch is None:
        return f"{far.node}/{far.netdev}.rx_prio{priority}_pause"
    if switch.nos == "sonic":
        return f"{far.node}/{far.netdev}.asic_rx_pause"
    raise Unsupported(
        f"{request.where}: {request.spec.kind} is not supported on this lab: {far.node} does not count the pause "
        "frames that it receives; target a link to a SONiC switch, or a Linux switch's port that faces an RNIC"
    )


BY_KIND: Mapping[tuple[str, str], Callable[[Request], Mechanism]] = {
    ("congestion.pfc-storm", "rnic"): _storm,
    ("congestion.pfc-storm", "port"): _storm,
}
