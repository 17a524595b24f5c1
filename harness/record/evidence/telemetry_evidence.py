"""What the machines reported while the workload ran: `evidence/measured/telemetry.json`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from faultbed.testbed.inventory.schema import IgnoredMessageVars
from faultbed.testbed.observe import counters
from faultbed.testbed.observe.telemetry import Change as NetworkChange
from faultbed.testbed.observe.telemetry import Machine

__all__ = ["Deltas", "TelemetryEvidence", "counter_deltas"]

Deltas = Mapping[str, Mapping[str, int]]
"""Node to counter to growth."""


class TelemetryEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and changes of the machines. `telemetry.parquet` has the counters over time.

    Attributes:
        counters_before: counters by node. Those of an RNIC are named `rxe0.out_of_seq_request`.
        counters_after: the same counters after the workload.
        changes: changes of switches while the workload ran.
        kernel: errors and warnings that a machine's kernel wrote meanwhile, and crashes of a switch's daemons.
        ignored: entries of the inventory's `faultbed_ignored_messages` that held when the run ended.
        watched: each machine that was watched, and what that cost.
        reads: (begin, end) of each time (controller ns) at which the harness itself queried the lab while the workload
            ran. The baseline leaves them out.
    """

    counters_before: dict[str, dict[str, int]] = {}
    counters_after: dict[str, dict[str, int]] = {}
    changes: tuple[NetworkChange, ...] = ()
    kernel: tuple[NetworkChange, ...] = ()
    ignored: tuple[IgnoredMessageVars, ...] = ()
    watched: tuple[Machine, ...] = ()
    reads: tuple[tuple[int, int], ...] = ()


def counter_deltas(telemetry: TelemetryEvidence) -> dict[str, dict[str, int]]:
    """Return counter increments by node for counters read before and after. A counter that was reset began at 0."""
    return counters.deltas(telemetry.counters_before, telemetry.counters_after)
