"""Runs of every workload and fault family, as the run loop would have recorded them; made from synthetic runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import msgspec
from judged_runs import PLAN, served
from synthetic_run import T0, S, changed, synthetic_run

from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.experiment.run_plan import Plan, PlannedExpectation, PlannedFabric, PlannedStop
from faultbed.harness.experiment.stop import METRICS as LIVE
from faultbed.harness.experiment.stop import Condition
from faultbed.harness.parts.bystander.bystander_evidence import BystanderEvidence
from faultbed.harness.parts.capture.packet_summary import PacketSummary
from faultbed.harness.parts.probes.probes_part import ProbesEvidence
from faultbed.harness.parts.stops.stop_guard import Guard
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import ReaderRun, ResilienceRun, Sample
from faultbed.harness.verdict import RoutingDecisions, RoutingReceipt, SchemeArmed, SchemeCleared
from faultbed.testbed.observe.telemetry import Change, Machine
from faultbed.traffic.workloads.elastic.elastic_results import RankState, Restart

BASE = synthetic_run()
EVERY_METRIC = tuple(
    expectation
    for name, metric in METRICS.items()
    for expectation in (
        [PlannedExpectation(metric=name, equals="host2")]
        if metric.unit == "host"
        else [PlannedExpectation(metric=name, maximum=limit) for limit in (1e9, -1.0)]
    )
)
"""A bound that every value keeps, and one that every value breaks."""
LOST = Condition(metric=LIVE["qp_errors"], bound=2)
TARGETS = {
    "link.down": "rtsw1:ctsw1",
    "packet.corrupt": "host3:rxe0",
    "congestion.ecn-mark": "rtsw1:ctsw1",
    "host.reboot": "host3",
    "rnic.rate": "host2:rxe0",
    "switch.reboot": "ctsw1",
    "gpu.throttle": "host2:gpu0",
    "storage.slow": "host4",
    "data.bit-flip": "host1:rxe0",
}


@dataclass(frozen=True)
class Recorded:
    run: RunEvidence
    plan: Plan
    sealed: tuple[msgspec.Struct, ...] = ()


def recorded(run=BASE, *sealed, stops=None, control=False, **planned):
    """Return a run whose plan bounds every metric. `stops`: a guard that evaluated the plan's stop conditions."""
    plan = changed(
        PLAN,
        faults=tuple(fault.plan for fault in run.injected.faults),
        workload=run.workload.planned,
        expect=EVERY_METRIC,
        control=control or msgspec.UNSET,
        **planned,
    )
    if stops is None:
        return Recorded(run, plan, sealed)
    conditions = tuple(
        PlannedStop(metric=one.metric.name, bound=one.bound, for_ns=one.for_ns, verdict=one.verdict)
        for one in stops.conditions
    )
    return Recorded(run, changed(plan, stop=conditions), (*sealed, stops.sealed(t0_ns=run.workload.t0_ns)))


def watched(*values, refused=None):
    """Return a guard with a look at the number of lost queue pairs every half second."""
    guard = Guard([LOST])
    for at, value in enumerate(values):
        guard.evaluate(T0 + 10 * S + at * S // 2, {"qp_errors": value})
    guard.refused = refused
    return guard


def bystander():
    samples = tuple(Sample(T0 + number * S // 10, 4096) for number in range(520))
    return BystanderEvidence(src="host1:rxe1", dst="host3:rxe1", samples=samples)


def routed():
    receipt = RoutingReceipt(
        scheme="ecmp", fidelity="real", armed=SchemeArmed(ok=True, at_ns=T0, switches=4, rules=4, routes=8),
        decisions=RoutingDecisions(queried=8, agreed=8), carried_packets=900,
        cleared=SchemeCleared(ok=True, at_ns=T0 + 60 * S),
    )  # fmt: skip
    return changed(BASE, routing=receipt)


def restarted():
    at = T0 + 20 * S
    restart = Restart(
        number=1, reason="host3: no message", cause="host", hosts=("host3",), before=("host3:rxe0",),
        after=("host4:rxe0",), connections=2, progress_ns=at, noticed_ns=at + 4 * S, diagnosed_ns=at + 5 * S,
        rescheduled_ns=at + 6 * S, initialised_ns=at + 7 * S, restored_ns=at + 8 * S, caught_up_ns=at + 9 * S,
        iterations=45, restored_iterations=40,
    )  # fmt: skip
    states = tuple(RankState(rank=rank, iterations=98, elements=64, wrong=0, sha256="ab") for rank in range(4))
    resilience = ResilienceRun(
        restarts=(restart,), states=states, repeated_iterations=5, initialised_ns=2 * S, connections=4
    )
    return changed(BASE, resilience=resilience, workload={**BASE.workload.planned, "resilience": {"spares": 1}})


def _offering(offered_bps):
    return {"emulation": {"offered_bps": offered_bps}}


def with_fault(kind, target):
    """Return a run whose first fault has another kind and target."""
    first, *_ = BASE.injected.faults
    plan = dataclasses.replace(first.plan, kind=kind, target=target, params={})
    receipt = changed(first.receipt, kind=kind, target=target)
    return changed(BASE, faults=(changed(first, plan=plan, receipt=receipt),))


def flows(**fields):
    workload = {"flow": "send", "transport": "rc", "size_bytes": 4096, "qps": 1, "check": "checked_bytes" in fields}
    series = tuple(changed(rank, iterations=()) for rank in BASE.workload.series)
    return changed(
        BASE, workload=workload, series=series, twin=None, silent_flows=(), faults=BASE.injected.faults[:2], **fields
    )


def wrong_twin():
    first, *others = BASE.fault_free
    step, *later = first.iterations
    return changed(BASE, twin=(changed(first, iterations=(changed(step, wrong=4), *later)), *others))


LOGGED = Machine(name="fabric", samples=100, busy_ns=1, clock_error_ns=0)
RUNS = {
    "collective": recorded(),
    "not fired": recorded(synthetic_run(fired=False)),
    "dirty": recorded(synthetic_run(lab_state="DIRTY")),
    "control": recorded(changed(BASE, faults=()), control=True),
    "watched": recorded(stops=watched(0, 0, 1, 1)),
    "stopped": recorded(stops=watched(0, 1, 3)),
    "refused": recorded(changed(BASE, faults=()), stops=watched(refused="2 queue pairs were lost")),
    "error": recorded(changed(BASE, errors=("the fabric did not answer",))),
    "failed job": recorded(changed(BASE, failure="rank 2: a queue pair failed")),
    "wrong twin": recorded(wrong_twin()),
    "failed twin": recorded(changed(BASE, twin=None, twin_failure="rank 1", series=(), faults=())),
    "flows": recorded(flows(checked_bytes=1 << 20, latencies_ns=((1000, 1200, 1100) * 40,))),
    "wrong flows": recorded(flows(checked_bytes=1 << 20, wrong_bytes=3)),
    "inference": recorded(served(*[0.1 + 0.001 * at for at in range(60)])),
    "restarts": recorded(restarted()),
    "readers": recorded(changed(BASE, readers=(ReaderRun(host="host4", reads_ns=((T0 + S, T0 + S, T0 + 2 * S),)),))),
    "bystander": recorded(BASE, bystander()),
    "captured": recorded(BASE, PacketSummary(frames=9, missed=0, broken=0, goings_back=((T0 + 20 * S, T0 + 21 * S),))),
    "probed": recorded(BASE, ProbesEvidence(trips=0, unknown=3, trouble=None)),
    "routed": recorded(routed(), fabric=PlannedFabric(routing="ecmp", fidelity="real")),
    "not routed": recorded(fabric=PlannedFabric(routing="ecmp", fidelity="real")),
    "overloaded": recorded(changed(BASE, offered_bps=90e6, carried_bps=100e6), parts=_offering(90e6)),
    "carried": recorded(changed(BASE, offered_bps=40e6, carried_bps=100e6), parts=_offering(40e6)),
    "routes": recorded(
        changed(
            BASE,
            watched=(LOGGED,),
            changes=(Change(at_ns=T0 + 10 * S, node="rtsw1", subject="route 10.0.0.0/31", text="dev ctsw2"),),
        )
    ),
    **{f"fault {kind}": recorded(with_fault(kind, target)) for kind, target in TARGETS.items()},
}
