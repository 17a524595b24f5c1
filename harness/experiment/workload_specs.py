"""The workload of an experiment as the traffic package specifies it. Pure."""

from __future__ import annotations

from faultbed.harness.experiment.rank_fields import same_fields
from faultbed.harness.experiment.workload_file import Collective, Flow, Job
from faultbed.traffic.flows.flow_run import FlowSpec
from faultbed.traffic.workloads.collective import CollectiveSpec
from faultbed.traffic.workloads.job import JobSpec

__all__ = ["between", "collective_spec", "flow_specs", "job_spec"]

_PROBE_BYTES = 64
_PROBES_PER_S = 100


def flow_specs(work: Flow) -> list[FlowSpec]:
    """Return the `FlowSpec` of each flow of a workload; with `probe`, each is followed by that of its probe."""
    return [spec for pair in work.pairs for spec in between(work.spec(*pair), probe=work.probe)]


def between(flow: FlowSpec, *, probe: bool) -> list[FlowSpec]:
    """Return a flow, followed by its probe if `probe`: small timed writes, one at a time."""
    beside = FlowSpec(
        src=flow.src,
        dst=flow.dst,
        message_bytes=_PROBE_BYTES,
        depth=1,
        chain=1,
        latency=True,
        rate_bps=_PROBES_PER_S * _PROBE_BYTES * 8,
        duration_s=flow.duration_s,
        qp=flow.qp,
    )
    return [flow, beside] if probe else [flow]


def job_spec(work: Job) -> JobSpec:
    """Return a job as the traffic package specifies it."""
    return JobSpec(**same_fields(JobSpec, work), redop=work.op)


def collective_spec(work: Collective) -> CollectiveSpec:
    """Return a collective as the traffic package specifies it."""
    duration_s = None if work.duration_ns is None else work.duration_ns / 1e9
    return CollectiveSpec(**same_fields(CollectiveSpec, work), redop=work.op, duration_s=duration_s)
