"""Benchmark program of an Open MPI rank: measure times of collectives, and print them as JSON on rank 0.

`python3 mpi_program.py '{"collectives": [...], "sizes": [[bytes, iterations], ...]}'`, with mpi4py and numpy. An
operation's time is the shortest of its ranks, as in faultbed's engine: the rank that enters last does not wait.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from mpi4py import MPI

WARM_UP = 2


def main() -> None:
    """Time each collective at each size, and print a row of JSON for each collective and size on rank 0."""
    request = json.loads(sys.argv[1])
    world = MPI.COMM_WORLD
    for name in request["collectives"]:
        for size_bytes, iterations in request["sizes"]:
            sent = np.ones(size_bytes // 4, dtype=np.float32)
            received = np.zeros_like(sent)
            times = []
            for number in range(WARM_UP + iterations):
                received[:] = 0
                world.Barrier()
                begun = time.monotonic_ns()
                if name == "all-reduce":
                    world.Allreduce(sent, received, op=MPI.SUM)
                else:
                    world.Alltoall(sent, received)
                time_ns = world.allreduce(time.monotonic_ns() - begun, op=MPI.MIN)
                if number >= WARM_UP:
                    times.append(time_ns)
            right = float(received[0]) == (world.size if name == "all-reduce" else 1.0)
            if world.rank == 0:
                row = {"collective": name, "size_bytes": size_bytes, "times_ns": times, "right": right}
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()


main()
