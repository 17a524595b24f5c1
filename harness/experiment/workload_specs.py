"""The workload of an experiment as the traffic package specifies it. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from faultbed.harness.experiment.flow_words import between
from faultbed.harness.experiment.workload_file import Collective, Flow, Job
from faultbed.traffic.flows.flow_run import FlowSpec
from faultbed.traffic.workloads.collective import CollectiveSpec
from faultbed.traffic.workloads.job import JobSpec

__all__ = ["collective_spec", "flow_specs", "job_spec"]


def flow_specs(work: Flow) -> list[FlowSpec]:
    """Return the `FlowSpec` of each flow of a workload; with `probe`, each is followed by that of its probe."""
    words, duration_s = _same_words(FlowSpec, work), work.duration_ns / 1e9
    flow_of_pair = FlowSpec(**words, message_bytes=work.size_bytes, verb=work.flow, duration_s=duration_s)
    return [spec for pair in work.pairs for spec in between(flow_of_pair, *pair, probe=work.probe)]


def job_spec(work: Job) -> JobSpec:
    """Return a job as the traffic package specifies it."""
    return JobSpec(**_same_words(JobSpec, work), redop=work.op)


def collective_spec(work: Collective) -> CollectiveSpec:
    """Return a collective as the traffic package specifies it."""
    duration_s = None if work.duration_ns is None else work.duration_ns / 1e9
    return CollectiveSpec(**_same_words(CollectiveSpec, work), redop=work.op, duration_s=duration_s)


def _same_words(spec: type, work: Any) -> dict[str, Any]:
    """Return the fields that a workload and its traffic spec have in common, by name."""
    of_spec = {field.name for field in dataclasses.fields(spec)}
    return {field.name: getattr(work, field.name) for field in dataclasses.fields(work) if field.name in of_spec}
