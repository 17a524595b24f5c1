"""Capacity check of an RNIC's completion queue. Pure.

All QPs on an RNIC share one completion queue. A QP that fails completes everything posted on it at once. A queue that
overruns is unusable from then on (IBV_EVENT_CQ_ERR). The queue therefore needs one entry per request of each QP.
"""

from __future__ import annotations

__all__ = ["CQ_ENTRIES", "NoRoom", "refuse_overrun"]

CQ_ENTRIES = 32_767
"""Largest queue that rdma_rxe creates (RXE_MAX_LOG_CQE in drivers/infiniband/sw/rxe/rxe_param.h); hardware allows
more."""


class NoRoom(Exception):  # named for the condition, as in testbed.errors
    """The completion queue could overrun."""


def refuse_overrun(rnic: str, held: int, wanted: int, *, entries: int = CQ_ENTRIES) -> None:
    """Reject a QP with `wanted` requests if the completion queue, with `held` requests of other QPs, could overrun.

    Raises:
        NoRoom: the queue is too small; the message gives both numbers and what to do.
    """
    if held + wanted > entries:
        raise NoRoom(
            f"{rnic}: its completion queue has {entries} entries, and a QP with {wanted} requests beside {held} of "
            "other QPs could overrun it when all QPs fail at once; use a smaller depth or fewer QPs"
        )
