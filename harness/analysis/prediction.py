"""Compare theory with measurements: if they disagree, one of them is wrong. Pure.

**Collective.** The alpha-beta time of the schedule (`faultbed.traffic.schedules.cost`), compared with the median of
the run's collectives.

**Iteration.** The time of a fault-free iteration by the model (`faultbed.harness.model`), on the paths that the queue
pairs had, with the lab's calibration if there is one. It is compared with the median of the run's iterations, or of
those of its fault-free twin if the run had faults.

**Uplinks.** Maximum over mean of the queue pairs on the uplinks of an RTSW if each took one at random (simulated),
compared with the paths reported by the switches' kernels.

**QP error.** A requester sends a packet retry_cnt + 1 times and waits each time for at least 4.096 us x 2^timeout, at
most four times that (InfiniBand specification, volume 1, transport timer). The sum is compared with the time of the
first completion with an error.

**Losses.** The seed decides which of the packets that pass a hop are hit (`faultbed.inject.selection`). The minimum
and maximum number of packets that passed therefore give a range of hits, which is compared with the hop's own count.

**Goodput under loss.** A sender that goes back n packets for each lost one keeps (1 - p) / (1 - p + n p) of its
goodput, with n packets in flight per queue pair (rxe: 64 at most). Waiting for NAKs and timers comes on top, so this is
an upper bound. It is compared with the mean during the fault over that of the fault-free start.

**Training time.** Time lost to faults and storage, by `faultbed.harness.analysis.ettr`, compared with the finished
iterations.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from faultbed.harness.analysis.intervals import operation_times
from faultbed.harness.analysis.links.queue_wait import RXE_PACKETS
from faultbed.harness.analysis.observe import Observed
from faultbed.harness.analysis.resolutions import Firing
from faultbed.harness.model.calibration import Calibration, outside
from faultbed.harness.model.calibration_samples import iteration_seconds, run_features, traffic_of
from faultbed.harness.model.experiment_prediction import default_parameters
from faultbed.harness.model.fault_effects import goodput_share
from faultbed.harness.quantities import format_duration
from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.inject.evidence.receipt import Receipt
from faultbed.inject.kinds.catalogue import Trait, has_trait
from faultbed.inject.selection import by_share
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.packets.bth import timeout_ns
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.schedules import build, cost
from faultbed.traffic.workloads.collective import AUTO

__all__ = ["Prediction", "goodput_under_loss", "losses", "max_over_mean", "predictions", "qp_error_ns"]

DRAWS = 4000
_SLACK = 4
"""A timer may take up to four times its nominal time."""
_BETWEEN_COUNTERS = 1
"""Packets that may be between the counter of passed packets and the counter of hits when both are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One comparison, in words. `holds` None: the model only gives the scale and cannot be violated."""

    what: str
    model: str
    predicted: str
    measured: str
    holds: bool | None


def predictions(run: RunEvidence, observed: Observed, calibration: Calibration | None = None) -> tuple[Prediction, ...]:
    """Return all predictions that apply to a run; `calibration` is that of its lab, None: the lab has none."""
    return (
        *_collective(run),
        *_iteration(run, calibration),
        *_uplinks(run),
        *_qp_errors(run, observed),
        *_losses(run),
        *_goodput_under_loss(run, observed),
        *_training(observed),
    )


def max_over_mean(flows: int, links: int, *, seed: int = 0) -> tuple[float, float, float]:
    """Return the 5th, 50th and 95th percentile of maximum over mean, if each flow takes a random link."""
    loads = np.random.default_rng(seed).multinomial(flows, [1 / links] * links, size=DRAWS)
    low, middle, high = np.percentile(loads.max(axis=1) / (flows / links), [5, 50, 95])
    return float(low), float(middle), float(high)


def qp_error_ns(params: QpParams) -> int:
    """Return the minimum time from the first lost packet to the completion with an error."""
    return round((params.retry_cnt + 1) * timeout_ns(params.timeout))


def losses(share: float, seed: int, least: int, most: int) -> tuple[int, int]:
    """Return the range of packets that a fault with this share and seed hits, out of `least` to `most` packets."""
    if share >= 1:
        return least, most
    selection = by_share(share, seed)
    return max(0, selection.selected_among(least) - _BETWEEN_COUNTERS), selection.selected_among(
        most
    ) + _BETWEEN_COUNTERS


def _losing(run: RunEvidence) -> Iterator[tuple[FaultRun, Receipt, float]]:
    """Yield each fault that loses a share of all packets, with its receipt and that share."""
    for fault in run.injected.faults:
        parameters = fault.plan.params
        share = parameters.get("share")
        every_packet = (
            parameters.get("qp") is None
            and parameters.get("opcode", "any") == "any"
            and parameters.get("burst") is None
        )
        if (
            fault.receipt is not None
            and has_trait(fault.plan.kind, Trait.LOSES)
            and every_packet
            and isinstance(share, int | float)
        ):
            yield fault, fault.receipt, float(share)


def _losses(run: RunEvidence) -> Iterator[Prediction]:
    for fault, receipt, share in _losing(run):
        exact = receipt.fired.passed
        passed = fault.passed if exact is None else (exact, exact)
        if passed is None:
            continue
        low, high = losses(share, fault.plan.seed, *passed)
        yield Prediction(
            what=f"packets that {fault.plan.id} hit",
            model=f"{share:g} of the {passed[0]:,} to {passed[1]:,} packets that passed its hop, selected by its seed",
            predicted=f"{low:,} to {high:,}",
            measured=f"{receipt.fired.count:,}",
            holds=low <= receipt.fired.count <= high,
        )


def goodput_under_loss(run: RunEvidence) -> float | None:
    """Return the upper bound of `goodput_mean_ratio` in a run of flows whose faults all lose packets; else None."""
    in_flight = _in_flight(run)
    shares = [share for _, _, share in _losing(run)]
    return (
        goodput_share(max(shares), in_flight)
        if shares and in_flight and len(run.injected.faults) == len(shares)
        else None
    )


def _in_flight(run: RunEvidence) -> int:
    """Return how many packets each queue pair of a run's flows keeps in flight; 0: not known."""
    spec = run.workload.planned
    if "flow" not in spec or not spec.get("depth"):
        return 0
    packets = int(spec["depth"]) * max(1, math.ceil(int(spec["size_bytes"]) / _qp_of(run).mtu))
    return min(packets, RXE_PACKETS) if traits_of(run.lab.kind).is_emulated else packets


def _goodput_under_loss(run: RunEvidence, observed: Observed) -> Iterator[Prediction]:
    whole, base, in_flight = observed.goodput, observed.baseline, _in_flight(run)
    if not in_flight or whole is None or base is None or not base.mean:
        return
    for fault, _, share in _losing(run):
        impact = observed.impacts.get(fault.plan.id)
        if impact is None:
            continue
        rates = whole.bytes_per_s[whole.bin_of(impact.fired_ns) : whole.bin_of(impact.cleared_ns)]
        if not len(rates):
            continue
        yield Prediction(
            what=f"goodput under {fault.plan.id}, relative to the fault-free start",
            model=f"go-back-N: share {share:g} lost, {in_flight} packets resent for each lost one, no waiting",
            predicted=f"{goodput_share(share, in_flight):.2f} at most",
            measured=f"{float(np.mean(rates)) / base.mean:.2f}",
            holds=None,
        )


def _training(observed: Observed) -> Iterator[Prediction]:
    training = observed.training
    if training is None:
        return
    if (formula := training.formula) is not None:
        yield Prediction(
            what="effective training time ratio of a job with restarts (HPCA 2025)",
            model=f"{formula.interruptions} interruptions of {format_duration(formula.recovery_ns)}; a checkpoint "
            f"every {format_duration(formula.interval_ns)} that costs {formula.checkpoint_share:.1%}",
            predicted=str(formula),
            measured=f"{training.ratio:.3f}",
            holds=formula.holds(training.ratio),
        )
        return
    if training.predicted is None:
        return
    yield Prediction(
        what="effective training time ratio",
        model=f"{format_duration(training.lost_ns)} of {format_duration(training.wall_ns)} lost to low goodput; "
        f"each iteration waits {format_duration(training.storage_ns)} for storage",
        predicted=f"{training.predicted:.3f}",
        measured=f"{training.ratio:.3f}",
        holds=None,
    )


def _collective(run: RunEvidence) -> tuple[Prediction, ...]:
    spec, times = run.workload.planned, operation_times(run.workload.series)
    if "collective" not in spec or not len(times):
        return ()
    size, network = int(spec["size_bytes"]), cost.NETWORKS[run.lab.kind]
    shape = cost.shape_for(len(run.workload.ranks), size, root=int(spec.get("root") or 0))
    try:
        name = str(spec["algorithm"])
        if name == AUTO:
            name = cost.best_algorithm(str(spec["collective"]), shape, size, network)
        predicted_ns = cost.predict_ns(build(str(spec["collective"]), name, shape), size, network)
    except UsageError:
        return ()
    measured_ns = float(np.median(times))
    return (
        Prediction(
            what=f"{name} {spec['collective']} over {len(run.workload.ranks)} ranks",
            model="alpha-beta, without congestion and without other work on the machine",
            predicted=format_duration(predicted_ns),
            measured=f"{format_duration(measured_ns)}, {measured_ns / predicted_ns:.1f} times that",
            holds=None,
        ),
    )


def _iteration(run: RunEvidence, calibration: Calibration | None) -> tuple[Prediction, ...]:
    seconds = iteration_seconds((run.fault_free or ()) if run.injected.faults else run.workload.series)
    traffic = None if seconds is None else traffic_of(run)
    if seconds is None or traffic is None:
        return ()
    parameters = default_parameters(run.lab.kind) if calibration is None else calibration.parameters
    try:
        predicted_s = run_features(run, traffic, parameters).seconds(parameters)
    except UsageError:  # the run did not record its paths
        return ()
    reasons: tuple[str, ...] = ()
    if calibration is not None:
        reasons = outside(
            calibration,
            ranks=len(traffic.ranks),
            size_bytes=traffic.size_bytes,
            qps=traffic.qps,
            compute_units=traffic.compute_units,
        )
    elif traffic.compute_units:
        reasons = (f"without the {traffic.compute_units} units of compute",)
    origin = "not calibrated" if calibration is None else f"calibrated by {calibration.runs} runs"
    band = "" if calibration is None or reasons else f" ±{calibration.band:.0%}"
    which = "of the fault-free twin" if run.injected.faults else "of this run"
    return (
        Prediction(
            what="time of an iteration without faults (modelled)",
            model="; ".join(("max-min rates on the recorded paths, a latency each step", origin, *reasons)),
            predicted=f"{format_duration(predicted_s * 1e9)}{band}",
            measured=f"{format_duration(seconds * 1e9)} {which}, {seconds / predicted_s:.2f} times that",
            holds=None,
        ),
    )


_DRAWN_EVENLY = frozenset({"ecmp", "e-ecmp", "resilient"})
"""Routing schemes that draw the uplink of each queue pair by a hash, all uplinks with equal chances."""


def _uplinks(run: RunEvidence) -> tuple[Prediction, ...]:
    if run.routing is not None and run.routing.scheme not in _DRAWN_EVENLY:
        return ()
    predictions_found = []
    for switch in run.lab.topology.switches:
        uplinks = [link for link in run.lab.topology.links_of(switch.name) if link.is_uplink]
        if switch.role != "rtsw" or len(uplinks) < 2:  # noqa: PLR2004 - one uplink leaves no choice
            continue
        qps_by_uplink = Counter(
            far
            for connection in run.workload.connections
            for near, far in itertools.pairwise(connection.path)
            if near == switch.name and far in run.lab.topology.switch_by_name
        )
        flows = sum(qps_by_uplink.values())
        if flows < 2:  # noqa: PLR2004 - one flow is always the maximum
            continue
        low, middle, high = max_over_mean(flows, len(uplinks))
        measured = max(qps_by_uplink.values()) / (flows / len(uplinks))
        counts = ", ".join(f"{name} {count}" for name, count in sorted(qps_by_uplink.items()))
        predictions_found.append(
            Prediction(
                what=f"queue pairs on the {len(uplinks)} uplinks of {switch.name}: maximum over mean",
                model=f"{flows} queue pairs, each on a link at random",
                predicted=f"{middle:.2f} ({low:.2f} to {high:.2f} in 90 % of cases)",
                measured=f"{measured:.2f} ({counts})",
                holds=low <= measured <= high,
            )
        )
    return tuple(predictions_found)


def _qp_of(run: RunEvidence) -> QpParams:
    """Return the QP parameters of a run. Runs recorded before the field existed get the defaults."""
    recorded = run.workload.planned.get("qp") or {}
    return QpParams.of({name: value for name, value in recorded.items() if name in QpParams.__slots__})


def _qp_errors(run: RunEvidence, observed: Observed) -> tuple[Prediction, ...]:
    """Return the first error after each fault, for faults that caused one before their removal or soon after."""
    params = _qp_of(run)
    least_ns = qp_error_ns(params)
    predictions_found: list[Prediction] = []
    for fault_id, impact in observed.impacts.items():
        until_ns = impact.cleared_ns + _SLACK * least_ns
        early_ns = observed.firing.get(fault_id, Firing()).early_ns
        after = [
            lost.time_ns for lost in run.workload.qps_lost if impact.fired_ns - early_ns <= lost.time_ns < until_ns
        ]
        if after:
            took_ns = max(0, min(after) - impact.fired_ns)
            predictions_found.append(
                Prediction(
                    what=f"first queue pair in error after {fault_id} fired",
                    model=f"{params.retry_cnt + 1} transmissions, timeout {params.timeout}",
                    predicted=f"{format_duration(least_ns)} to {format_duration(_SLACK * least_ns)} after the loss",
                    measured=format_duration(took_ns),
                    holds=took_ns + early_ns >= least_ns - run.workload.clock_error_ns,
                )
            )
    return tuple(predictions_found)
