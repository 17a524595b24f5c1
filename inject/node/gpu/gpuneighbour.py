"""Other processes on a GPU, which give it work without pause.

The driver divides a GPU's time into slices between processes (CUDA C programming guide, compute modes). Each process is
renamed like the busy processes of other faults, and NVML lists it among the GPU's compute processes.

On an H100 two processes slow a rank down by three times, and end. That NVML lists them is not yet verified on hardware.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.child import Child
from faultbed.inject.node.command import heartbeat
from faultbed.inject.node.machine.hog import NAME, busy_processes, kill_script
from faultbed.testbed.node.gpu import nvml
from faultbed.testbed.node.gpu.cuda import CudaWork, NoCuda

__all__ = ["GpuNeighbourActuator"]

# Without persistence mode the driver must wake its GPUs first, and needs seconds for a context.
_BEGIN_S = 20.0
_QUEUED = 8
"""Kernels that a process queues at a time: 11 ms of work on an H100. With a single one, the process would leave the
rest of its time slice (2 ms or more, nvidia-smi compute-policy) to the processes that it has to disturb."""


class GpuNeighbourActuator(Actuator):
    """Runs `count` processes on the GPU at the PCIe address `pcie`; hits are the kernels that they completed."""

    poll_s = 0.2
    patience_s = _BEGIN_S

    def __init__(self, *, pcie: str, count: int) -> None:
        self._pcie = pcie
        self._neighbours = [Child() for _ in range(count)]

    def prepare(self) -> dict[str, Any]:
        """Refuse a missing GPU, a GPU that allows only one process, and busy processes of an earlier fault."""
        try:
            mode = nvml.compute_mode(self._pcie)
        except nvml.NoNvml as error:
            raise Refused(f"no NVIDIA GPU at {self._pcie}: {error}") from None
        if mode != "Default":
            raise Refused(
                f"GPU {self._pcie} does not share its time: its compute mode is {mode}; set it by `nvidia-smi -c 0`"
            )
        if left := busy_processes():
            raise Refused(f"{len(left)} busy processes of an earlier fault still run; run `faultbed heal`")
        return self.read()

    def revert_script(self) -> str:
        return kill_script()

    def on(self) -> None:
        """Start the processes, and wait until each has completed work."""
        before = {neighbour: neighbour.count for neighbour in self._neighbours}
        for neighbour in self._neighbours:
            neighbour.start(functools.partial(self._compute, neighbour))
        deadline = time.monotonic() + _BEGIN_S
        while idle := sum(neighbour.count == count for neighbour, count in before.items()):
            if time.monotonic() > deadline or not all(neighbour.is_running() for neighbour in self._neighbours):
                raise OSError(
                    f"{idle} of {len(self._neighbours)} processes did not begin to compute on GPU {self._pcie}"
                )
            heartbeat()
            time.sleep(0.01)

    def off(self) -> None:
        for neighbour in self._neighbours:
            neighbour.stop()

    def read(self) -> dict[str, Any]:
        """Count the processes by /proc, and those that compute on the GPU by NVML.

        Raises:
            OSError: NVML does not answer.
        """
        running = busy_processes()
        try:
            computing = len(running & nvml.computing(self._pcie)) if running else 0
        except nvml.NoNvml as error:
            raise OSError(str(error)) from None
        return {"applied": bool(running), "gpu": self._pcie, "processes": len(running), "computing": computing}

    def is_lost(self) -> bool:
        """Return whether any of the processes has ended, was stopped, or no longer computes on the GPU."""
        is_idle = int(self.read()["computing"]) < len(self._neighbours)
        return is_idle or not all(neighbour.is_running() for neighbour in self._neighbours)

    def hits(self) -> int:
        """Return the number of kernels completed so far."""
        return _QUEUED * sum(neighbour.count for neighbour in self._neighbours)

    def _compute(self, neighbour: Child) -> None:
        with open("/proc/self/comm", "w", encoding="ascii") as comm:  # noqa: PTH123 - as the other busy processes
            comm.write(NAME)
        # The holder's priority is for its own work; a neighbour competes like a normal process.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        try:
            work = CudaWork(pcie=self._pcie, number=0)
            while neighbour.is_wanted():
                work.compute(_QUEUED)
                neighbour.add()
        except NoCuda as error:
            print(error, file=sys.stderr, flush=True)
