"""Storage: slow, or stalled."""

from __future__ import annotations

from inject.kind import described
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

KINDS = (_SLOW, _STALL)
