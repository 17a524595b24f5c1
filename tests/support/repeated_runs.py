"""Synthetic measurements of runs without faults."""

from __future__ import annotations

import msgspec
from synthetic_run import changed


def without_faults(run, factor=1.0):
    """Return a run without faults, made from its twin, with all times multiplied by `factor`."""
    series = tuple(
        msgspec.structs.replace(
            rank,
            iterations=tuple(
                msgspec.structs.replace(
                    step,
                    start_ns=round(step.start_ns * factor),
                    compute_ns=round(step.compute_ns * factor),
                    wait_ns=round(step.wait_ns * factor),
                    comm_ns=round(step.comm_ns * factor),
                )
                for step in rank.iterations
            ),
        )
        for rank in run.fault_free
    )
    return changed(run, faults=(), twin=None, series=series)
