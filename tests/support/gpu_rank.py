"""A rank's work on a GPU, as a traffic engine has it, and what a test needs to know of the machine's GPUs."""

from __future__ import annotations

import json
import selectors

from faultbed.testbed.node.gpu import nvml
from faultbed.testbed.preflight.rack_formats import gpus
from faultbed.traffic.node.gpu_client import GpuClient

PATIENCE_S = 60.0
"""For an answer of the GPU: a driver that has to wake it up first needs seconds."""
WARM = 200
"""Units after which the clocks are up: a quarter of a second of work on an H100."""


def first_pcie():
    """Return the address of the first GPU, as an inventory names it: NVML writes the domain with eight digits."""
    reported = gpus(json.dumps(nvml.look()))
    assert reported.gpus, reported.why
    return reported.gpus[0].bus_id[-12:]


class Rank:
    """A process of its own computes: no process may be forked after it has begun with CUDA (CUDA C programming guide,
    "Initialization")."""

    def __init__(self, pcie):
        self.selector = selectors.DefaultSelector()
        self.client = GpuClient({"pcie": pcie, "number": 0}, self.selector)

    def start(self, units):
        """Request work; `finish` waits for it."""
        self.durations_ns = []
        self.client.compute(units, self.durations_ns.append)

    def finish(self):
        """Return the seconds that the GPU took for the work."""
        while not self.durations_ns:
            ready = self.selector.select(PATIENCE_S)
            assert ready, f"the work is not done after {PATIENCE_S} s"
            for key, _ in ready:
                key.data()
        assert self.durations_ns[0] is not None, self.client.error
        return self.durations_ns[0] / 1e9

    def took_s(self, units):
        """Compute, and return the seconds that the GPU took."""
        self.start(units)
        return self.finish()

    @property
    def pid(self):
        return self.client.process.pid

    def close(self):
        self.client.close()
        self.selector.close()
