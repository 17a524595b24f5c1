"""Room in the completion queue of an RNIC. Pure.

All QPs on an RNIC share one completion queue. A QP that dies completes everything that is posted on it at once, and a
queue that overruns is broken for good (IBV_EVENT_CQ_ERR). So there is one entry for each request of each QP.
"""

from __future__ import annotations

__all__ = ["CQ_ENTRIES", "NoRoom", "refuse_overrun"]

CQ_ENTRIES = 32_767
"""The most that rdma_rxe makes (RXE_MAX_LOG_CQE in drivers/infiniband/sw/rxe/rxe_param.h); hardware has more."""


class NoRoom(Exception):  # named for what is so, like testbed.errors
    """The completion queue could overrun."""


def refuse_overrun(rnic: str, held: int, wanted: int, *, entries: int = CQ_ENTRIES) -> None:
    """Refuse a QP with `wanted` requests beside those with `held` ones, if the completion queue cannot take them all.

    Raises:
        NoRoom: with both numbers and what to do.
    """
    if held + wanted > entries:
        raise NoRoom(
            f"{rnic}: its completion queue has {entries} entries, and a QP with {wanted} requests beside {held} of "
            "other QPs could overrun it when they die at once; take a smaller depth or fewer QPs"
        )
