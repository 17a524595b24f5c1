"""Descriptions shared by the fault kinds that stop a program or limit its CPU."""

from __future__ import annotations

from faultbed.inject.kinds.kind import Param

__all__ = ["CPU_LEFT", "CPU_LIMIT_ARMED_BY", "CPU_LIMIT_MUST_MOVE", "STOPPED_MUST_MOVE"]

CPU_LEFT = Param(
    name="percent", type="number", unit="%", summary="share of a CPU that remains", low=1, high=90, default=10
)
CPU_LIMIT_ARMED_BY = "cpu.max of the program's own cgroup, read back by the holder and by the counters"
CPU_LIMIT_MUST_MOVE = (
    "cpu.max of that cgroup, read while the fault is on, independently of the holder; its nr_throttled counts the hits"
)
STOPPED_MUST_MOVE = "stopped processes of the host, counted while the fault is on, independently of the holder"
