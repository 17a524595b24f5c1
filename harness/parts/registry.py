"""The parts of an experiment, in the order in which their rows are read. Only this module imports them."""

from __future__ import annotations

from faultbed.harness.parts import (
    bound_claims,
    data_claims,
    emulation_claims,
    fault_claims,
    lab_claims,
    restart_claims,
    routing_claims,
    workload_claims,
)
from faultbed.harness.parts.part import Part

__all__ = ["PARTS"]

PARTS: tuple[Part, ...] = (
    workload_claims,
    data_claims,
    emulation_claims,
    routing_claims,
    restart_claims,
    fault_claims,
    bound_claims,
    lab_claims,
)
