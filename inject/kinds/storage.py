"""Storage: slow, or stalled."""

from __future__ import annotations

from inject.kind import Param, described

__all__ = ["KINDS"]

_SLOW = described(
    name="storage.slow",
    summary="the storage of the job on this host gets little CPU: data and checkpoints take long, over the front end",
    binding={"host": "unit"},
    params=(
        Param(
            name="percent", type="number", unit="%", summary="of a CPU that is left to it", low=1, high=90, default=10
        ),
    ),
    fidelity={"soft": "emulated"},
    armed_by="cpu.max of a cgroup of its own, read back by the holder and by the counters",
    must_move="cpu.max of that cgroup, as a second look finds it while the fault is on; its nr_throttled is the count",
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
    must_move="stopped processes of the host, as a second look finds them while the fault is on",
    must_not_move="rxe send_err",
    reversible=True,
    colour="#6b4f1d",
)

KINDS = (_SLOW, _STALL)
