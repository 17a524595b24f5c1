"""The parts of an experiment, in the order of their start and of their rows. Only this module imports them.

Parts end and are released in the opposite order. The routing scheme is therefore there before all others and until
they are gone, and the machines' counters are read when everything beside the workload sends.
"""

from __future__ import annotations

from faultbed.harness.parts import (
    bound_claims,
    control_claims,
    data_claims,
    lab_claims,
    restart_claims,
    workload_claims,
)
from faultbed.harness.parts.bystander import bystander_part
from faultbed.harness.parts.capture import capture_part
from faultbed.harness.parts.command import command_part
from faultbed.harness.parts.emulation import emulation_part
from faultbed.harness.parts.faults import faults_part
from faultbed.harness.parts.part import Part
from faultbed.harness.parts.probes import probes_part
from faultbed.harness.parts.routing import routing_part
from faultbed.harness.parts.slow_ranks import slow_ranks_part
from faultbed.harness.parts.stops import stops_part
from faultbed.harness.parts.telemetry import telemetry_part
from faultbed.harness.parts.twin import twin_part

__all__ = ["PARTS"]

PARTS: tuple[Part, ...] = tuple(
    module.PART
    for module in (
        control_claims,
        workload_claims,
        command_part,
        data_claims,
        emulation_part,
        routing_part,
        twin_part,
        restart_claims,
        faults_part,
        capture_part,
        probes_part,
        bystander_part,
        slow_ranks_part,
        bound_claims,
        lab_claims,
        stops_part,
        telemetry_part,
    )
)
