"""Flows that measure a lab."""

from __future__ import annotations

from collections.abc import Sequence

from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.traffic.engine.run_results import Window
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec, FlowsResult

__all__ = ["GRACE_S", "run_flows"]

GRACE_S = 60.0
"""How much longer than planned traffic may take before it is ended."""


def run_flows(lab: Lab, specs: Sequence[FlowSpec]) -> tuple[FlowsResult, Window]:
    """Run flows of equal duration at once, and return their result and when they ran; their progress is a heartbeat.

    Raises:
        UsageError: the lab cannot carry them.
        LabError: they could not be started, were not over in time, or failed; nothing is left running.
    """
    with flow_run.start_all(lab, specs, on_event=lambda _event: lab.heartbeat()) as running:
        result = running.wait((specs[0].duration_s or 0) + GRACE_S)
    if result.outcome == "failed":
        more = f" and {len(specs) - 1} more" if len(specs) > 1 else ""
        raise LabError(f"{specs[0].src} to {specs[0].dst}{more}: {result.where}")
    return result, Window(start_ns=running.started_ns, end_ns=running.ended_ns)
