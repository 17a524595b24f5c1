"""Capacity check of an RNIC's completion queue. Pure.

All QPs on an RNIC share one completion queue. A QP that fails completes everything posted on it at once. A queue that
overruns is unusable from then on (IBV_EVENT_CQ_ERR). The queue therefore needs one entry per request of each QP.
"""

from __future__ import annotations

__all__ = ["CQ_ENTRIES", "CompletionQueueFull", "reject_overrun"]

CQ_ENTRIES = 32_767
"""Largest queue that rdma_rxe creates (RXE_MAX_LOG_CQE in drivers/infiniband/sw/rxe/rxe_param.h); hardware allows
more."""


class CompletionQueueFull(Exception):  # named for the condition, as in faultbed.testbed.errors
    """The completion queue could overrun."""


def reject_overrun(rnic: str, in_use: int, requested: int, *, entries: int = CQ_ENTRIES) -> None:
    """Reject a QP if its requests and those of other QPs could overrun the completion queue.

    `requested` requests are for the new QP, `in_use` for the other QPs of the RNIC.

    Raises:
        CompletionQueueFull: the queue is too small; the message gives both numbers and what to do.
    """
    if in_use + requested > entries:
        raise CompletionQueueFull(
            f"{rnic}: its completion queue has {entries} entries, and a QP with {requested} requests beside "
            f"{in_use} of other QPs could overrun it when all QPs fail at once; use a smaller depth or fewer QPs"
        )
