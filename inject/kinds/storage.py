"""Storage: slow, stalled, or loaded by another job's checkpoints."""

from __future__ import annotations

from faultbed.inject.kinds.kind import Example, Param, described
from faultbed.inject.kinds.processes import CPU_LEFT, CPU_LIMIT_ARMED_BY, CPU_LIMIT_MUST_MOVE, STOPPED_MUST_MOVE

__all__ = ["KINDS"]

_SLOW = described(
    name="storage.slow",
    summary="the CPU of the job's storage on this host is limited: reads and checkpoints over the front end are slow",
    binding={"host": "unit"},
    params=(CPU_LEFT,),
    fidelity={"soft": "emulated"},
    armed_by=CPU_LIMIT_ARMED_BY,
    must_move=CPU_LIMIT_MUST_MOVE,
    must_not_move="rxe send_err",
    reversible=True,
    example=Example(target="host4"),
    colour="#8a6d3b",
)

_STALL = described(
    name="storage.stall",
    summary="the job's storage on this host hangs (SIGSTOP): connections stay open without answers",
    binding={"host": "unit"},
    params=(),
    fidelity={"soft": "emulated"},
    armed_by="the state of its process in /proc, by the holder and by the counters",
    must_move=STOPPED_MUST_MOVE,
    must_not_move="rxe send_err",
    reversible=True,
    example=Example(target="host4"),
    colour="#6b4f1d",
)

_BURST = described(
    name="storage.burst",
    summary="checkpoints of another job collide with the job's: several writers at the same time, TCP to the job's "
    "storage (from its own host, so that its front-end link is not loaded)",
    binding={"host": "unit"},
    params=(
        Param(
            name="writers",
            type="integer",
            unit="",
            summary="number of ranks of the other job",
            low=1,
            high=64,
            default=4,
        ),
        Param(
            name="size", type="integer", unit="MiB", summary="data that each rank writes", low=1, high=4096, default=8
        ),
        Param(
            name="period", type="number", unit="s", summary="time from burst to burst", low=0.1, high=3600, default=1.0
        ),
    ),
    fidelity={"soft": "emulated"},
    armed_by="the writing process in /proc",
    must_move="PassiveOpens of the host's TCP layer: new clients of the storage; the hits are "
    "checkpoints that it has verified and answered",
    must_not_move="rxe send_err",
    reversible=True,
    example=Example(target="host4"),
    colour="#a68a64",
)

KINDS = (_SLOW, _STALL, _BURST)
