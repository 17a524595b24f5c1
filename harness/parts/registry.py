"""The parts of an experiment, in the order of their start and of their rows. Only this module imports them."""

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
from faultbed.harness.parts.bystander import bystander_part
from faultbed.harness.parts.capture import capture_part
from faultbed.harness.parts.command import command_part
from faultbed.harness.parts.part import Part
from faultbed.harness.parts.probes import probes_part
from faultbed.harness.parts.stops import stop_claims
from faultbed.harness.parts.telemetry import telemetry_part

__all__ = ["PARTS"]

PARTS: tuple[Part, ...] = tuple(
    module.PART
    for module in (
        capture_part,
        probes_part,
        bystander_part,
        control_claims,
        workload_claims,
        command_part,
        data_claims,
        emulation_claims,
        routing_claims,
        twin_claims,
        restart_claims,
        fault_claims,
        bound_claims,
        lab_claims,
        stop_claims,
        telemetry_part,
    )
)
