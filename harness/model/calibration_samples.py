"""The samples of a calibration: fault-free series of recorded runs, with the features of their iterations. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faultbed.harness.model.calibration import Calibration, Sample
from faultbed.harness.model.experiment_prediction import default_parameters, lab_arrays
from faultbed.harness.model.step_times import Features, StepParameters, iteration_cost
from faultbed.harness.model.workload_traffic import RankTraffic, rank_traffic, recorded_paths, workload_in
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import RankSeries
from faultbed.testbed.errors import UsageError
from faultbed.traffic.engine.engine_client import FabricModel

__all__ = ["iteration_seconds", "run_features", "samples_of", "traffic_of"]


def samples_of(name: str, run: RunEvidence) -> dict[str, Sample]:
    """Return the fault-free series of a run: the run itself if it had no faults, and its twin.

    Raises:
        UsageError: the model has no such workload, or the run did not record its paths.
    """
    undisturbed = not run.injected.faults and not run.lab.errors and run.workload.failure is None
    series = {name: run.workload.series if undisturbed else (), f"{name} (twin)": run.fault_free or ()}
    times = {part: seconds for part, ranks in series.items() if (seconds := iteration_seconds(ranks)) is not None}
    if not times:
        return {}
    traffic = traffic_of(run)
    if traffic is None:
        raise UsageError(f"{name}: the model has no such workload; it is calibrated by collectives and jobs")
    try:
        features = run_features(run, traffic, default_parameters(run.lab.kind))
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    return {
        part: Sample(
            features=features,
            seconds=seconds,
            ranks=len(traffic.ranks),
            size_bytes=traffic.size_bytes,
            qps=traffic.qps,
            algorithm=str(run.workload.planned.get("algorithm", "")),
        )
        for part, seconds in times.items()
    }


def traffic_of(run: RunEvidence) -> RankTraffic | None:
    """Return what the ranks of a run send in an iteration; None if the model has no such workload."""
    workload = workload_in(run.workload.planned)
    if workload is None:
        return None
    try:
        return rank_traffic(workload, FabricModel(kind=run.lab.kind, topology=run.lab.topology))
    except UsageError:
        return None


def run_features(run: RunEvidence, traffic: RankTraffic, parameters: StepParameters | Calibration) -> Features:
    """Return the features of an iteration of a run, on the paths that its queue pairs had.

    Raises:
        UsageError: the run did not record a path.
    """
    arrays = lab_arrays(run.lab.topology, run.lab.kind, run.lab.rate_scale)
    nodes: dict[tuple[str, str], list[Sequence[str]]] = {}
    for connection in run.workload.connections:
        nodes.setdefault((connection.src, connection.dst), []).append(connection.path)
    return iteration_cost(
        traffic.programs,
        recorded_paths(traffic, run.lab.topology, arrays, nodes),
        arrays.capacity,
        parameters.parameters if isinstance(parameters, Calibration) else parameters,
        item_bytes=traffic.item_bytes,
        balances=traffic.balances,
        compute_units=float(traffic.compute_units),
    ).features


def iteration_seconds(ranks: Sequence[RankSeries]) -> float | None:
    """Return the median time between the ends of consecutive iterations, in s; an iteration ends on its slowest rank.

    Return None if fewer than two iterations finished on all ranks.
    """
    by_rank = [sorted(rank.iterations, key=lambda step: step.index) for rank in ranks]
    count = min((len(steps) for steps in by_rank), default=0)
    if count < 2:  # noqa: PLR2004 - the first iteration has no end before it
        return None
    ends = np.array([[step.end_ns for step in steps[:count]] for steps in by_rank]).max(axis=0)
    return float(np.median(np.diff(ends))) / 1e9
