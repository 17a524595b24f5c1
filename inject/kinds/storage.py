"""Storage: slow, stalled, or written to by somebody else at the same time."""

from __future__ import annotations

from inject.kinds.kind import Param, described
from inject.kinds.processes import CPU_LEFT, LIMIT_SEEN, LIMITED_BY, STOP_SEEN

__all__ = ["KINDS"]

_SLOW = described(
    name="storage.slow",
    summary="the storage of the job on this host gets little CPU: data and checkpoints take long, over the front end",
    binding={"host": "unit"},
    params=(CPU_LEFT,),
    fidelity={"soft": "emulated"},
    armed_by=LIMITED_BY,
    must_move=LIMIT_SEEN,
    must_not_move="rxe send_err",
    reversible=True,
    colour="#8a6d3b",
)

_STALL = described(
    name="storage.stall",
    summary="the storage of the job on this host hangs (SIGSTOP): connections stay, nothing is answered",
    binding={"host": "unit"},
    params=(),
    fidelity={"soft": "emulated"},
    armed_by="the state of its process in /proc, by the holder and by the counters",
    must_move=STOP_SEEN,
    must_not_move="rxe send_err",
    reversible=True,
    colour="#6b4f1d",
)

_BURST = described(
    name="storage.burst",
    summary="checkpoints of somebody else collide with the job's: several writers at one moment, TCP to the job's "
    "storage (from its own host, so that its front-end link is not loaded)",
    binding={"host": "unit"},
    params=(
        Param(name="writers", type="integer", unit="", summary="ranks of the other job", low=1, high=64, default=4),
        Param(name="size", type="integer", unit="MiB", summary="that each writes", low=1, high=4096, default=8),
        Param(name="period", type="number", unit="s", summary="from burst to burst", low=0.1, high=3600, default=1.0),
    ),
    fidelity={"soft": "emulated"},
    armed_by="the writing process in /proc",
    must_move="PassiveOpens of the host's TCP layer: the storage has taken so many new clients; the count is of "
    "checkpoints that it has checked and answered",
    must_not_move="rxe send_err",
    reversible=True,
    colour="#a68a64",
)

KINDS = (_SLOW, _STALL, _BURST)
