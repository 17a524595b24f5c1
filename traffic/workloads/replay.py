"""Replay a trace: each rank executes its operations in the trace's order, and groups run independently.

Batches (`faultbed.traffic.workloads.replay_batches`) run in sequence on the same engines, and every element is
verified.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from faultbed.testbed.errors import UsageError
from faultbed.traffic.engine.engine_client import Engines, TrafficLab
from faultbed.traffic.engine.run_results import Endpoint
from faultbed.traffic.engine.running_traffic import OnEvent, Running, begin
from faultbed.traffic.engine.task_specs import Plan
from faultbed.traffic.schedules import cost
from faultbed.traffic.traces import Trace
from faultbed.traffic.workloads.ranks import RanksSpec, check_completion_queues, place, rank_plan
from faultbed.traffic.workloads.replay_batches import CONVERTED_JOB_BYTES, Batch, ReplaySpec, batches, check, whole
from faultbed.traffic.workloads.replay_result import Execution, ReplayResult, RoundsResult, result, rounds

__all__ = ["execute", "run", "start", "start_trace", "timeout_s"]

Result = TypeVar("Result")

SPARE_S = 60.0


def run(
    lab: TrafficLab,
    spec: ReplaySpec,
    trace: Trace,
    on_event: OnEvent | None = None,
    *,
    engines: Engines | None = None,
) -> ReplayResult:
    """Replay a trace (`faultbed.traffic.traces.load`, `fitted`) and wait for its end. Rank i runs on the i-th RNIC.

    It starts new engines unless `engines` are given.

    Raises:
        UsageError: the trace does not fit this lab; nothing was started.
        LabError: the replay could not be started; nothing is left running.
    """
    return result(execute(lab, spec, trace, on_event, engines=engines))


def execute(
    lab: TrafficLab,
    spec: ReplaySpec,
    trace: Trace,
    on_event: OnEvent | None = None,
    *,
    engines: Engines | None = None,
) -> Execution:
    """Replay a trace as `run` does, and return the data of every rank instead of a summary."""
    check(spec)
    ranks = _ranks(lab, spec, trace)
    trace_batches = batches(trace, spec, cost.NETWORKS[lab.kind])
    plans = [_plan(spec, ranks, batch, number, len(trace_batches)) for number, batch in enumerate(trace_batches)]
    ended: list[tuple[int, Running[Any]]] = []
    times = 1 if len(trace_batches) == 1 else spec.repeat  # the engines repeat a single batch by themselves
    with contextlib.ExitStack() as stack:
        if engines is None:
            engines = stack.enter_context(Engines.start(lab, dict.fromkeys(rank.host for rank in ranks)))
        for number, plan in [pair for _ in range(times) for pair in enumerate(plans)]:
            with begin(lab, plan, _raw_data, on_event, engines) as running:
                ended.append((number, running.wait(timeout_s(running, spec.repeat))))
            if running.failure is not None:
                break
    return Execution(spec=spec, trace=trace, ranks=ranks, batches=trace_batches, runs=tuple(ended))


def _ranks(lab: TrafficLab, spec: ReplaySpec, trace: Trace) -> tuple[Endpoint, ...]:
    ranks = place(lab, spec)
    if trace.ranks > len(ranks):
        raise UsageError(
            f"{trace.source} has {trace.ranks} ranks, but there are {len(ranks)} RNICs; shrink it to the operations "
            f"among its first {len(ranks)} ranks"
        )
    return ranks[: trace.ranks]


def start_trace(
    lab: TrafficLab,
    spec: RanksSpec,
    trace: Trace,
    finish: Callable[[Execution], Result],
    *,
    repeat: int,
    on_event: OnEvent | None = None,
) -> Running[Result]:
    """Start a workload that was converted to a trace, on the RNICs that its spec selects. `finish` builds its result.

    Raises:
        UsageError: the trace does not fit this lab, or needs more than one batch; nothing was started.
        LabError: the workload could not be started; nothing is left running.
    """
    common = {field.name: getattr(spec, field.name) for field in fields(RanksSpec)}
    as_replay = ReplaySpec(**common, repeat=repeat, batch_bytes=CONVERTED_JOB_BYTES)
    check(as_replay)
    return _start_one_batch(lab, as_replay, place(lab, spec), trace, finish, on_event)


def start(lab: TrafficLab, spec: ReplaySpec, trace: Trace, on_event: OnEvent | None = None) -> Running[RoundsResult]:
    """Start a replay of a trace as one batch, for `spec.repeat` rounds. Rank i runs on the i-th RNIC.

    Raises:
        UsageError: the trace does not fit this lab, or needs more than one batch; nothing was started.
        LabError: the replay could not be started; nothing is left running.
    """
    check(spec)
    ranks = _ranks(lab, spec, trace)
    return _start_one_batch(lab, spec, ranks, trace, rounds, on_event)


def _start_one_batch(
    lab: TrafficLab,
    spec: ReplaySpec,
    ranks: tuple[Endpoint, ...],
    trace: Trace,
    finish: Callable[[Execution], Result],
    on_event: OnEvent | None,
) -> Running[Result]:
    batch = whole(trace, spec, cost.NETWORKS[lab.kind])

    def ended(running: Running[Result]) -> Result:
        return finish(Execution(spec=spec, trace=trace, ranks=ranks, batches=(batch,), runs=((0, running),)))

    return begin(lab, _plan(spec, ranks, batch, 0, 1), ended, on_event)


def timeout_s(running: Running[Any], rounds: int) -> float:
    """Return a timeout for `rounds` rounds of a running replay."""
    round_s: float = max(task.spec["deadline_ms"] for task in running.plan.tasks) / 1000
    return SPARE_S + running.plan.stall_deadline_s + rounds * round_s


def _deadline_s(spec: ReplaySpec, batch: Batch) -> float:
    """Return the deadline of a rank's whole batch: one `deadline_s` for each operation that the rank may wait for."""
    return spec.deadline_s * max(1, len(batch.operations)) + batch.pauses_ns / 1e9


def _raw_data(running: Running[Any]) -> Running[Any]:
    """Return the run itself: a result is computed later, from the runs of all batches."""
    return running


def _plan(spec: ReplaySpec, ranks: Sequence[Endpoint], batch: Batch, number: int, count: int) -> Plan:
    """Return the plan of batch `number` (from 0) of `count`.

    Raises:
        UsageError: its queue pairs can overrun the completion queue of an RNIC.
    """
    check_completion_queues(spec, ranks, batch.programs)
    with_deadlines = dataclasses.replace(
        spec,
        deadline_s=_deadline_s(spec, batch),
        stall_deadline_s=spec.stall_deadline_s + batch.pauses_ns / 1e9,
    )
    return rank_plan(
        f"replay of {len(batch.operations)} operations" + (f" (batch {number + 1} of {count})" if count > 1 else ""),
        with_deadlines,
        ranks,
        batch.programs,
        iterations=spec.repeat if count == 1 else 1,
    )
