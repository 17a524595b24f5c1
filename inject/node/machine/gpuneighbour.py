"""Others that compute on a GPU: processes that give it work without a pause. Not yet run on hardware.

The driver shares a GPU out by time slices between processes (CUDA C programming guide, compute modes). Each process has
the name of all busy processes of faults, and NVML lists it among those that compute there.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

from inject.node.actuator import Refused
from inject.node.child import Child
from inject.node.command import still_alive
from inject.node.machine.hog import NAME, end_all, named
from testbed.node import nvml
from testbed.node.cuda import CudaWork, NoCuda

__all__ = ["GpuNeighbourActuator"]

# A driver that has to wake its GPUs up first (no persistence) needs seconds for a context.
_BEGIN_S = 20.0
_QUEUED = 8
"""Kernels that a process gives the GPU at a time, 16 ms of work: with one alone it would leave the rest of its time
slice (2 ms or more, nvidia-smi compute-policy) to those whom it is to disturb."""


class GpuNeighbourActuator:
    """Has `count` processes compute on the GPU at the PCIe address `pcie`; counted in kernels that they have done."""

    poll_s = 0.2
    patience_s = _BEGIN_S

    def __init__(self, *, pcie: str, count: int) -> None:
        self._pcie = pcie
        self._others = [Child() for _ in range(count)]

    def prepare(self) -> dict[str, Any]:
        """Refuse a GPU that is not there or has room for one process alone, and neighbours of an earlier fault."""
        try:
            mode = nvml.compute_mode(self._pcie)
        except nvml.NoNvml as error:
            raise Refused(f"no NVIDIA GPU at {self._pcie}: {error}") from None
        if mode != "Default":
            raise Refused(f"GPU {self._pcie} takes no neighbours: its compute mode is {mode} (nvidia-smi -c)")
        if left := named():
            raise Refused(f"{len(left)} busy processes of an earlier fault are there: run `faultbed heal`")
        return self.read()

    def revert_script(self) -> str:
        """End every one; they also end by themselves when the holder is gone."""
        return end_all()

    def on(self) -> None:
        """Start them, and wait until each has done something."""
        before = [other.count for other in self._others]
        for other in self._others:
            other.start(functools.partial(self._compute, other))
        deadline = time.monotonic() + _BEGIN_S
        while (idle := sum(o.count == was for o, was in zip(self._others, before))) and self._all_there():  # noqa: B905
            if time.monotonic() > deadline:
                break
            still_alive()
            time.sleep(0.01)
        if idle:
            raise OSError(f"{idle} of {len(self._others)} processes did not begin to compute on GPU {self._pcie}")

    def off(self) -> None:
        """End them."""
        for other in self._others:
            other.stop()

    def read(self) -> dict[str, Any]:
        """How many there are, by /proc, and how many of them compute on the GPU, by NVML.

        Raises:
            OSError: NVML does not tell.
        """
        there = named()
        try:
            computing = len(there & nvml.computing(self._pcie)) if there else 0
        except nvml.NoNvml as error:
            raise OSError(str(error)) from None
        return {"applied": bool(there), "gpu": self._pcie, "processes": len(there), "computing": computing}

    def hits(self) -> int:
        """Kernels done so far."""
        return _QUEUED * sum(other.count for other in self._others)

    def close(self) -> None:
        """Nothing is held open."""

    def _all_there(self) -> bool:
        return all(other.is_there() for other in self._others)

    def _compute(self, other: Child) -> None:
        with open("/proc/self/comm", "w", encoding="ascii") as comm:  # noqa: PTH123 - as the other busy processes
            comm.write(NAME)
        # The holder's precedence is for its own turns; a neighbour's CPU time is like anybody's.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        try:
            work = CudaWork(pcie=self._pcie, number=0)
            while other.wanted():
                work.compute(_QUEUED)
                other.add()
        except NoCuda as error:
            print(error, file=sys.stderr, flush=True)
