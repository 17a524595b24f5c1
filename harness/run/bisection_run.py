"""Measure the effective bisection of a lab, tier by tier: random permutations of all RNICs, and single flows.

If a routing scheme is given, the switches apply it during the measurement. Its receipt decides whether the result
counts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from faultbed.harness.analysis.links import emulation_headroom
from faultbed.harness.analysis.links.effective_bisection import Trial, bisection_of, ratio
from faultbed.harness.analysis.links.link_metrics import uplink_use
from faultbed.harness.bounds import VERDICTS
from faultbed.harness.confidence import Interval, level_for, tail_of
from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.ledger.statistics.decision import Look
from faultbed.harness.ledger.statistics.unpaired_runs import decide_runs
from faultbed.harness.live import emulation_limit
from faultbed.harness.live.measured_flows import run_flows
from faultbed.harness.live.routing import routing_scheme
from faultbed.harness.record.evidence.lab_evidence import LabEvidence
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.telemetry_evidence import TelemetryEvidence
from faultbed.harness.record.evidence.workload_evidence import WorkloadEvidence
from faultbed.harness.record.workload_series import silent_of
from faultbed.harness.run import ends
from faultbed.harness.verdict import LabState, RoutingReceipt, Verdict
from faultbed.inject.journal import Journal
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import Lab
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.observe import counters
from faultbed.testbed.tenancy import dirty
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows.flow_run import FlowSpec, FlowsResult
from faultbed.traffic.flows.permutations import Tier, permutation

__all__ = [
    "JOURNAL",
    "Bisection",
    "BisectionSpec",
    "TierBisection",
    "has_rates",
    "judge_tier",
    "measure",
    "uplink_utilisation",
]

Progress = Callable[[str], None]
QP = QpParams(timeout=20)
"""4.3 s until a packet is retransmitted: packets that only wait in the queue of a slow link must not be sent again."""
DEPTH = 1
"""Messages in flight on each queue pair. More would only make the queues longer."""
JOURNAL = "bisection.jsonl"
"""File in a lab's state folder that records when a routing scheme was applied and removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectionSpec:
    """Parameters of a measurement.

    Every flow has `qps` queue pairs. The flows of a permutation run for `seconds`, a single flow for half of that.
    `least` is the bound on the effective bisection of each tier; None: it is only measured. `fabric` is the routing
    scheme that the switches apply; None: BGP's ECMP.
    """

    tiers: tuple[Tier, ...]
    permutations: int
    seed: int
    seconds: float
    qps: int
    message_bytes: int
    least: float | None = None
    fabric: Fabric | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBisection:
    """Effective bisection across one tier. If `value` or `interval` is None, `detail` says why.

    `utilisation` is the mean utilisation of the uplinks that these flows cross, over all permutations. These are the
    uplinks of racks if flows stay in a zone, and those of the highest tier if they cross zones. None: these links have
    no rate, or no flow leaves its rack.
    """

    tier: Tier
    flows: int
    verdict: Verdict
    value: float | None
    interval: Interval | None
    utilisation: float | None
    detail: str
    trials: tuple[Trial, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, ready for JSON."""
        return {**asdict(self), "verdict": str(self.verdict), "ratios": [ratio(trial) for trial in self.trials]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """The result of a measurement.

    `lab_state` None: the lab was not used. `routing` is the receipt of the routing scheme; None: BGP's ECMP.
    """

    tiers: tuple[TierBisection, ...]
    lab_state: LabState | None = None
    routing: RoutingReceipt | None = None


def has_rates(inventory: Inventory) -> bool:
    """Return whether a lab's links have rates of their own: a rack's do, a soft lab's only if it is shaped."""
    return not traits_of(inventory.kind).is_emulated or bool(inventory.shapes)


def measure(lab: Lab, spec: BisectionSpec, progress: Progress) -> Bisection:
    """Measure every tier, and compare the lab with its state before.

    If the receipt of the routing scheme does not prove that the switches routed by it, every tier is INCONCLUSIVE.

    Raises:
        LabError: a flow failed, or a switch refused the routing scheme. The lab has been compared.
        DirtyLab: such an error, and the lab is not in its state before.
        Interrupted: Ctrl-C; the message says in which state the lab is.
    """
    lease_s = 0.0 if spec.fabric is None else routing_scheme.MAX_SCHEME_LIFETIME_S
    work = dirty.begin(lab, "bisection", lease_s=lease_s, progress=progress)
    receipts: list[RoutingReceipt] = []
    try:
        limit = _emulation_limit(lab, progress)
        with _routed(lab, None if limit else spec.fabric, receipts, progress):
            results = tuple(_measure_tier(lab, tier, spec, limit, progress) for tier in spec.tiers)
        outcome = ends.finish(lab, work, None, left=_leftovers(receipts))
    except BaseException as error:  # noqa: BLE001 (raised again, with the state of the lab)
        ends.reraise(error, lab, work, None, left=_leftovers(receipts))
    if outcome.state == "DIRTY":
        progress(outcome.sentence)
    receipt = receipts[0] if receipts else None
    if receipt is not None and receipt.unproven:
        why = f"routing scheme {receipt.scheme} is not proven: {'; '.join(receipt.unproven)}"
        results = tuple(replace(result, verdict=Verdict.INCONCLUSIVE, detail=why) for result in results)
    return Bisection(tiers=results, lab_state=outcome.state, routing=receipt)


@contextlib.contextmanager
def _routed(lab: Lab, fabric: Fabric | None, receipts: list[RoutingReceipt], progress: Progress) -> Iterator[None]:
    """Run the block under a routing scheme and add its receipt to `receipts`, also if the block or the scheme fails."""
    if fabric is None:
        yield
        return
    with Journal(lab.state_dir / JOURNAL) as journal:
        scheme = routing_scheme.scheme_of(lab, fabric, journal)
        try:
            with scheme.applied(journal):
                decisions = scheme.decisions
                progress(f"{fabric.routing}: the kernels agree in {decisions.agreed} of {decisions.queried} decisions")
                before, begin = counters.read(lab), time.monotonic()
                yield
                scheme.check_end(before, counters.read(lab), seconds=time.monotonic() - begin)
        finally:
            receipts.append(scheme.receipt())


def _leftovers(receipts: Sequence[RoutingReceipt]) -> tuple[str, ...]:
    """Return one sentence for each routing scheme that may still be on the switches."""
    return tuple(sentence for receipt in receipts for sentence in routing_scheme.not_removed(receipt))


def judge_tier(
    tier: Tier, trials: Sequence[Trial], utilisation: float | None, *, least: float | None, limit: str, level: float
) -> TierBisection:
    """Judge the trials of one tier. Pure.

    `limit` says why the emulation, not the links, limits the flows; empty: the links do.
    """
    value, interval = bisection_of(trials, level=level)
    silent = [name for trial in trials for name in trial.silent]
    verdict, detail = Verdict.PASS, "" if interval is None else str(interval)
    if limit:
        verdict, detail, value, interval = Verdict.INCONCLUSIVE, limit, None, None
    elif value is None:
        verdict, detail = Verdict.INCONCLUSIVE, "nothing came through in one of the permutations"
    elif silent:
        verdict, value, interval = Verdict.INCONCLUSIVE, None, None
        detail = f"nothing came through on {silent[0]} in its permutation ({len(silent)} such)"
    elif interval is None:
        verdict, detail = Verdict.INCONCLUSIVE, f"{len(trials)} permutations are too few for an interval; use more"
    elif least is not None:
        look = Look(runs=len(trials), tail=tail_of(level))
        verdict = VERDICTS[
            decide_runs("min", least, [ratio(trial) for trial in trials], looks=(look,), are_drawn=True).outcome
        ]
    return TierBisection(
        tier=tier, flows=trials[0].flows if trials else 0, verdict=verdict, value=value, interval=interval,
        utilisation=None if limit else utilisation, detail=detail, trials=tuple(trials),
    )  # fmt: skip


def _emulation_limit(lab: Lab, progress: Progress) -> str:
    """Return why a soft lab's emulation cannot carry the load of all RNICs; empty: it can, or the lab is a rack."""
    inventory = lab.inventory_model
    if inventory.rate_scale is None:
        return ""
    rnics = lab.topology.rnic_names
    offered_bps = emulation_headroom.link_limit_bps(rnics, rnics, lab.topology, inventory.rate_scale)
    if offered_bps is None:
        return (
            "the links of hosts have no rate (faultbed_tiers.host), so that the machine decides what a flow gets alone"
        )
    capacity_bps = None
    try:
        to_snapshot = functools.partial(_to_snapshot, lab, progress)
        capacity_bps = emulation_limit.capacity_of(lab, offered_bps, to_snapshot, progress).carried_bps
    except emulation_limit.NotMeasured as error:
        progress(str(error))
    if not emulation_headroom.exceeds_headroom(offered_bps, capacity_bps):
        return ""
    return emulation_headroom.describe_headroom(offered_bps, capacity_bps)


def _to_snapshot(lab: Lab, progress: Progress) -> None:
    backend_of(lab.kind).reset(lab.inventory_model, progress, lab=lab)


def _measure_tier(lab: Lab, tier: Tier, spec: BisectionSpec, limit: str, progress: Progress) -> TierBisection:
    level = level_for(len(spec.tiers) if spec.least is not None else 1)
    trials: list[Trial] = []
    utilisations: list[float] = []
    for number in range(0 if limit else spec.permutations):
        pairs = permutation(lab.topology, tier, seed=spec.seed, number=number)
        progress(f"{tier}: permutation {number + 1} of {spec.permutations}, {len(pairs)} flows")
        together, utilisation = _run_flows(lab, tier, _flows(pairs, spec, seconds=spec.seconds))
        solo_pair = pairs[number % len(pairs)]
        alone, _ = _run_flows(lab, tier, _flows([solo_pair], spec, seconds=spec.seconds / 2))
        trials.append(
            Trial(
                flows=len(pairs),
                aggregate_bps=together.goodput_bps,
                solo_bps=alone.goodput_bps,
                silent=silent_of(together),
            )
        )
        progress(f"{tier}: {together.goodput_bps / 1e6:.3g} Mb/s together, {alone.goodput_bps / 1e6:.3g} Mb/s alone")
        if utilisation is not None:
            utilisations.append(utilisation)
    mean = math.fsum(utilisations) / len(utilisations) if utilisations else None
    return judge_tier(tier, trials, mean, least=spec.least, limit=limit, level=level)


def _flows(pairs: Sequence[tuple[str, str]], spec: BisectionSpec, *, seconds: float) -> list[FlowSpec]:
    return [
        FlowSpec(
            src=src, dst=dst, qps=spec.qps, depth=DEPTH, message_bytes=spec.message_bytes, duration_s=seconds, qp=QP
        )
        for src, dst in pairs
    ]


def _run_flows(lab: Lab, tier: Tier, specs: Sequence[FlowSpec]) -> tuple[FlowsResult, float | None]:
    """Run flows across a tier. Return their result, and the utilisation of the tier's uplinks."""
    before = counters.read(lab)
    result, window = run_flows(lab, specs)
    after = counters.read(lab)
    run = RunEvidence(
        lab=LabEvidence(
            name=lab.name, kind=lab.kind, accelerator=lab.accelerator, topology=lab.topology, state="CLEAN",
            rate_scale=lab.inventory_model.rate_scale,
        ),
        workload=WorkloadEvidence(planned={}, t0_ns=window.start_ns, end_ns=window.end_ns),
        telemetry=TelemetryEvidence(
            counters_before={node: dict(values) for node, values in before.items()},
            counters_after={node: dict(values) for node, values in after.items()},
        ),
    )  # fmt: skip
    return result, uplink_utilisation(run, tier)


def uplink_utilisation(run: RunEvidence, tier: Tier) -> float | None:
    """Return the utilisation of the uplinks that flows across a tier cross; None: unknown, or they cross none. Pure."""
    if tier == "rack":
        return None
    value = uplink_use(run, "rtsw" if tier == "zone" else None).value
    return float(value) if isinstance(value, int | float) else None
