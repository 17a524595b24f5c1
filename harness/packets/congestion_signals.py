"""ECN and CNP: which marked packets were answered by a congestion notification, and how fast.

A receiver of a packet with congestion experienced (CE) sends a CNP to the packet's sender, at most one per interval and
flow (InfiniBand annex A17.9; DCQCN, SIGCOMM 2015: 50 us).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from faultbed.testbed.packets.bth import CNP

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from faultbed.harness.packets.flows import Flow
    from faultbed.testbed.packets.columns import Packets

    Indices = NDArray[np.int64]

__all__ = ["Congestion", "congestion"]

_CE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Congestion:
    """Congestion signals of a flow: packets marked CE, CNPs, and CNPs without a marked packet since the previous CNP.

    Times are in ns.
    """

    marked: int
    notified: int
    unprovoked: int
    delay_median_ns: int | None
    interval_min_ns: int | None


def congestion(packets: Packets, flow: Flow) -> Congestion | None:
    """Pair each CNP to a flow's sender with the first marked packet since the previous CNP; None without signals."""
    marked = flow.requests[packets.ecn[flow.requests] == _CE]
    if flow.reply_qpn is None:
        notified = np.zeros(0, dtype=np.int64)
    else:
        names = np.array(packets.addresses)
        is_notification = (packets.opcode == CNP) & (packets.port == flow.port) & (packets.dqpn == flow.reply_qpn)
        notified = np.flatnonzero(is_notification)
        belongs_to_flow = (names[packets.src[notified]] == flow.dst) & (names[packets.dst[notified]] == flow.src)
        notified = notified[belongs_to_flow]
        if flow.is_doubled:
            # All CNPs of a flow are identical. With two capture points, every second one is a copy.
            notified = notified[::2]
    if not len(marked) and not len(notified):
        return None
    before = np.concatenate([[-1], notified[:-1]])
    first = np.searchsorted(marked, before, side="right")
    provoked = (
        (first < len(marked)) & (marked[np.minimum(first, max(len(marked) - 1, 0))] < notified)
        if len(marked)
        else np.zeros(len(notified), dtype=np.bool_)
    )
    delays = packets.time_ns[notified[provoked]] - packets.time_ns[marked[first[provoked]]]
    gaps = np.diff(packets.time_ns[notified])
    return Congestion(
        marked=len(marked),
        notified=len(notified),
        unprovoked=int((~provoked).sum()),
        delay_median_ns=int(np.median(delays)) if len(delays) else None,
        interval_min_ns=int(gaps.min()) if len(gaps) else None,
    )
