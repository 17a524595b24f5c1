"""Texts shared by kinds that stop a program or limit its CPU."""

from __future__ import annotations

from inject.kinds.kind import Param

__all__ = ["CPU_LEFT", "LIMITED_BY", "LIMIT_SEEN", "STOP_SEEN"]

CPU_LEFT = Param(
    name="percent", type="number", unit="%", summary="share of a CPU that remains", low=1, high=90, default=10
)
LIMITED_BY = "cpu.max of a cgroup of its own, read back by the holder and by the counters"
LIMIT_SEEN = (
    "cpu.max of that cgroup, read while the fault is on, independently of the holder; its nr_throttled is the count"
)
STOP_SEEN = "stopped processes of the host, counted while the fault is on, independently of the holder"
