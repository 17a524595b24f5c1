"""Measures the effective bisection of a lab, tier by tier: random permutations of all RNICs, and flows alone.

With a routing scheme, the switches route by it meanwhile. Its receipt decides whether the result counts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.analysis.links import emulation_headroom
from harness.analysis.links.effective_bisection import Trial, bisection_of, ratio
from harness.analysis.links.link_metrics import uplink_use
from harness.confidence import Interval, decide, level_for
from harness.experiment.fabric_file import Fabric
from harness.record.measurements import Measurements
from harness.run import emulation_limit, ends
from harness.run.routing import routing_scheme
from harness.run.workload import run_flows
from harness.verdict import LabState, RoutingReceipt, Verdict
from inject.journal import Journal
from testbed.backends.lab_backend import backend_of
from testbed.inventory.lab_inventory import Inventory
from testbed.lab import Lab
from testbed.model.lab_kind import traits_of
from testbed.observe import counters
from testbed.tenancy import dirty
from traffic.engine.task_specs import QpParams
from traffic.flows.flow_run import FlowSpec
from traffic.flows.permutations import Tier, permutation

__all__ = ["JOURNAL", "Bisection", "BisectionSpec", "TierBisection", "has_rates", "judged", "measure", "used_uplinks"]

Progress = Callable[[str], None]
QP = QpParams(timeout=20)
"""4.3 s until a packet is sent again: what waits in the queue of a slow link is not lost."""
DEPTH = 1
"""Messages outstanding on a queue pair: the more, the longer the queues, and nothing else."""
JOURNAL = "bisection.jsonl"
"""File in a lab's state folder that records when a routing scheme was applied and removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectionSpec:
    """What is measured. Every flow has `qps` queue pairs, and runs for `seconds` (alone: for half of that).

    `fabric` is the routing scheme of the switches meanwhile; None: BGP's ECMP.
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
    """Effective bisection across one tier. `value` None, or without an `interval`: `detail` says why.

    `utilisation` is what the uplinks that these flows cross sent over what they can carry, in the same seconds, the
    mean of all permutations: uplinks of racks where flows stay in a zone, those of the highest tier where they cross
    zones. None: those links have no rate, or no flow leaves its rack.
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
    """Measure every tier, and compare the lab with what it was.

    If the receipt of the routing scheme does not prove that the switches routed by it, every tier is INCONCLUSIVE.

    Raises:
        LabError: a flow failed, or a switch refused the routing scheme. The lab has been compared.
        DirtyLab: the lab is not as it was after such an error.
        Interrupted: Ctrl-C, with what the lab is like.
    """
    lease_s = 0.0 if spec.fabric is None else routing_scheme.MAX_SCHEME_LIFETIME_S
    work = dirty.begin(lab, "bisection", lease_s=lease_s, progress=progress)
    receipts: list[RoutingReceipt] = []
    try:
        beyond = _beyond(lab, progress)
        with _routed(lab, None if beyond else spec.fabric, receipts, progress):
            results = tuple(_tier(lab, tier, spec, beyond, progress) for tier in spec.tiers)
    except BaseException as error:  # noqa: BLE001 (raised again, with what the lab is like)
        ends.reraise(error, lab, work, None, left=_left(receipts))
    outcome = ends.finish(lab, work, None, left=_left(receipts))
    if outcome.state == "DIRTY":
        progress(outcome.said)
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
                progress(f"{fabric.routing}: the kernels agree in {decisions.agreed} of {decisions.asked} decisions")
                before, begin = counters.read(lab), time.monotonic()
                yield
                scheme.check_end(before, counters.read(lab), seconds=time.monotonic() - begin)
        finally:
            receipts.append(scheme.receipt())


def _left(receipts: Sequence[RoutingReceipt]) -> tuple[str, ...]:
    """Return one sentence for each routing scheme that may still be on the switches."""
    return tuple(sentence for receipt in receipts for sentence in routing_scheme.not_removed(receipt))


def judged(
    tier: Tier, trials: Sequence[Trial], utilisation: float | None, *, least: float | None, beyond: str, level: float
) -> TierBisection:
    """Judge the trials of one tier. Pure.

    `beyond` says why the emulation decided them and not the links; empty: it did not.
    """
    value, interval = bisection_of(trials, level=level)
    verdict, detail = Verdict.PASS, "" if interval is None else str(interval)
    if beyond:
        verdict, detail, value, interval = Verdict.INCONCLUSIVE, beyond, None, None
    elif value is None:
        verdict, detail = Verdict.INCONCLUSIVE, "nothing came through in one of the permutations"
    elif interval is None:
        verdict, detail = Verdict.INCONCLUSIVE, f"{len(trials)} permutations; an interval needs three"
    elif least is not None:
        verdict = decide("min", least, interval)
    return TierBisection(
        tier=tier, flows=trials[0].flows if trials else 0, verdict=verdict, value=value, interval=interval,
        utilisation=None if beyond else utilisation, detail=detail, trials=tuple(trials),
    )  # fmt: skip


def _beyond(lab: Lab, progress: Progress) -> str:
    """Say why a soft lab's emulation cannot carry all of its RNICs at once; empty: it can, or it is a rack."""
    inventory = lab.inventory_model
    if inventory.rate_scale is None:
        return ""
    rnics = lab.topology.rnic_names
    offered = emulation_limit.offered_bps(rnics, rnics, lab.topology, inventory.rate_scale)
    if offered is None:
        return (
            "the links of hosts have no rate (faultbed_tiers.host), so that the machine decides what a flow gets alone"
        )
    capacity = None
    try:
        to_snapshot = functools.partial(_to_snapshot, lab, progress)
        capacity = emulation_limit.carried(lab, offered, to_snapshot, progress).carried_bps
    except emulation_limit.NotMeasured as error:
        progress(str(error))
    if not emulation_headroom.exceeds_headroom(offered, capacity):
        return ""
    return emulation_headroom.describe_headroom(offered, capacity)


def _to_snapshot(lab: Lab, progress: Progress) -> None:
    backend_of(lab.kind).reset(lab.inventory_model, progress, lab=lab)


def _tier(lab: Lab, tier: Tier, spec: BisectionSpec, beyond: str, progress: Progress) -> TierBisection:
    level = level_for(len(spec.tiers) if spec.least is not None else 1)
    trials: list[Trial] = []
    shares: list[float] = []
    for number in range(0 if beyond else spec.permutations):
        pairs = permutation(lab.topology, tier, seed=spec.seed, number=number)
        progress(f"{tier}: permutation {number + 1} of {spec.permutations}, {len(pairs)} flows")
        together, share = _goodput(lab, tier, _flows(pairs, spec, seconds=spec.seconds))
        alone, _ = _goodput(lab, tier, _flows(pairs[number % len(pairs) :][:1], spec, seconds=spec.seconds / 2))
        trials.append(Trial(flows=len(pairs), aggregate_bps=together, solo_bps=alone))
        progress(f"{tier}: {together / 1e6:.3g} Mb/s together, {alone / 1e6:.3g} Mb/s alone")
        shares += [] if share is None else [share]
    utilisation = math.fsum(shares) / len(shares) if shares else None
    return judged(tier, trials, utilisation, least=spec.least, beyond=beyond, level=level)


def _flows(pairs: Sequence[tuple[str, str]], spec: BisectionSpec, *, seconds: float) -> list[FlowSpec]:
    return [
        FlowSpec(
            src=src, dst=dst, qps=spec.qps, depth=DEPTH, message_bytes=spec.message_bytes, duration_s=seconds, qp=QP
        )
        for src, dst in pairs
    ]


def _goodput(lab: Lab, tier: Tier, specs: Sequence[FlowSpec]) -> tuple[float, float | None]:
    """Return what flows across a tier got together, and how far they used its uplinks."""
    before = counters.read(lab)
    result, window = run_flows(lab, specs)
    after = counters.read(lab)
    run = Measurements(
        lab=lab.name, lab_kind=lab.kind, accelerator=lab.accelerator, topology=lab.topology,
        rate_scale=lab.inventory_model.rate_scale, t0_ns=window.start_ns, end_ns=window.end_ns, workload={},
        ranks=(), series=(), lab_state="CLEAN",
        counters_before={node: dict(values) for node, values in before.items()},
        counters_after={node: dict(values) for node, values in after.items()},
    )  # fmt: skip
    return result.goodput_bps, used_uplinks(run, tier)


def used_uplinks(run: Measurements, tier: Tier) -> float | None:
    """Return how far the uplinks that flows across a tier use were used; None: unknown, or they use none. Pure."""
    if tier == "rack":
        return None
    value = uplink_use(run, "rtsw" if tier == "zone" else None).value
    return float(value) if isinstance(value, int | float) else None
