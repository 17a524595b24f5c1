"""The parts of an experiment, in the order in which their rows are read. Only this module imports them."""

from __future__ import annotations

from faultbed.harness.parts import (
    bound_claims,
    control_claims,
    data_claims,
    emulation_claims,
    fault_claims,
    lab_claims,
    restart_claims,
    routing_claims,
    twin_claims,
    workload_claims,
)
from faultbed.harness.parts.part import Part
from faultbed.harness.parts.stops import stop_claims

__all__ = ["PARTS"]

PARTS: tuple[Part, ...] = tuple(
    module.PART
    for module in (
        control_claims,
        workload_claims,
        data_claims,
        emulation_claims,
        routing_claims,
        twin_claims,
        restart_claims,
        fault_claims,
        bound_claims,
        lab_claims,
        stop_claims,
    )
)
