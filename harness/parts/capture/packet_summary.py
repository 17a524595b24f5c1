"""What a capture of the switch ports shows in short: `evidence/measured/capture.json`."""

from __future__ import annotations

import msgspec

from faultbed.harness.packets.congestion_signals import Answers

__all__ = ["PacketSummary"]


class PacketSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the captured packets; `packets.json` has the details.

    Attributes:
        frames: number of captured frames.
        missed: frames that the ports counted and the capture does not have.
        extra: frames that the capture has and the ports did not count.
        broken: violations of the rules of go-back-N.
        goings_back: pairs of controller times (ns): when the NAK passed or the timer expired, and when the packet
            passed again.
        doubts: reasons why there may be more violations than `broken`.
        cnp: how receivers answered marked packets; None: not checked.
    """

    frames: int
    missed: int
    extra: int = 0
    broken: int
    goings_back: tuple[tuple[int, int], ...] = ()
    doubts: tuple[str, ...] = ()
    cnp: tuple[Answers, ...] | None = None
