"""Expectations, measurements and receipts in; checks and a verdict out. Pure.

The rules, in the order in which they are applied:

1. An error of the harness itself is a check with verdict ERROR, and the run is an ERROR.
2. A job with `[workload.resilience]` has a check for each restart, and one of its final state. Wrong data are a FAIL
   whether or not an expectation names them.
3. Every planned fault is a check of its own. It is PASS when the fault provably fired: armed by readback, fired count
   above 0, at least one `must_move` counter moved, no `must_not_move` counter moved, cleared by readback, first fired
   while the workload ran, and on for as long as planned (`faultbed.harness.proof`). Everything else, including no
   receipt at all, is INCONCLUSIVE: the effect of the fault was not tested.
   A routing scheme that the experiment chose is such a check, too (`faultbed.harness.run.routing.routing_scheme`):
   without proof that it routed the workload the run is INCONCLUSIVE.
4. Every expectation is a check. No value: INCONCLUSIVE. A performance is decided by its interval
   (`faultbed.harness.confidence`), and is INCONCLUSIVE without one. Several noisy checks share a risk of 1 % of a
   wrong FAIL (Bonferroni). A count, a name, and a share whose minimum is its largest possible value need no interval:
   PASS inside the bound, FAIL outside, INCONCLUSIVE if errors of measurement leave both possible. A censored value is
   a lower bound of the true one: it fails a maximum that it already exceeds, else it is INCONCLUSIVE.
5. A check whose metric is *about faults* is INCONCLUSIVE, whatever its value, unless the faults it is about provably
   fired. Other checks stand: wrong data is wrong even if no fault fired.
6. A DIRTY lab is a check with verdict INCONCLUSIVE, so the run is never a PASS on it. So is a soft lab whose offered
   load is more than half of what its emulation can forward.
7. The run's verdict is the worst of its checks (`verdict.worst`); a run without any check is INCONCLUSIVE.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from faultbed.harness.analysis.links import emulation_headroom
from faultbed.harness.analysis.noise import NoiseFloor, allow_for
from faultbed.harness.analysis.observations import Observation, Value, faster_than_twin
from faultbed.harness.analysis.observe import Observed
from faultbed.harness.analysis.restarts import why_state_unknown
from faultbed.harness.attribution.attribute import attribute
from faultbed.harness.confidence import Interval, decide, tail_of
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import PER_FAULT_PREFIXES, Metric
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.proof import why_unproven_in
from faultbed.harness.record.measurements import FaultRun, Measurements
from faultbed.harness.verdict import (
    Check,
    LabState,
    RoutingDecisions,
    RoutingReceipt,
    Verdict,
    VerdictFile,
    worst,
)
from faultbed.inject.evidence import firing_times
from faultbed.inject.evidence.receipt import Armed, Cleared, Fired, Receipt
from faultbed.traffic.engine.flight_recorder import Flight
from faultbed.traffic.probes.rtt import Trip
from faultbed.traffic.workloads.elastic.elastic_results import Restart

__all__ = ["COMPARISONS", "NO_INTERVAL", "bounds_of", "check_expectation", "is_noisy", "judge", "noisy_checks", "risk"]

NO_INTERVAL = (
    "too few independent values, or values whose level moves, to know how much of it is noise: a longer run on a quiet "
    "machine has an interval, and so have several runs (run --repeat, run --until-decided)"
)

_LATE_NS = 500_000_000
_ELEMENTS = "wrong_elements"


def judge(
    *,
    plan: Plan,
    expectations: Sequence[Expectation],
    run: Measurements,
    observed: Observed,
    floor: NoiseFloor | None = None,
    flights: Sequence[Flight] = (),
    trips: Sequence[Trip] = (),
) -> VerdictFile:
    """Judge one run.

    `floor` is how much fault-free runs on this lab differ, where that is known; `trips` are its probes, `flights` the
    flight recorders of a job that failed.
    """
    observed = allow_for(observed, floor)
    noisy = noisy_checks(expectations)
    problems = {fault.plan.id: why_unproven_in(run, fault) for fault in run.faults}
    checks = [
        *_error_checks(run.errors),
        *_workload_checks(run),
        *_content_checks(run, observed, {expectation.metric.name for expectation in expectations}),
        *_emulation_checks(run),
        *_routing_checks(plan, run.routing),
        *_restart_checks(observed, failed=run.failure is not None),
        *_state_checks(run),
        *(_fault_check(fault, problems[fault.plan.id], run.t0_ns) for fault in run.faults),
        *(
            check
            for expectation in expectations
            for check in check_expectation(
                expectation,
                observed.metrics.get(expectation.metric.name),
                _unproven_for(expectation.metric, problems),
                noisy=noisy,
            )
        ),
        *_lab_checks(run.lab_state, run.lab_diff),
    ]
    return VerdictFile(
        experiment=plan.experiment,
        seed=plan.seed,
        lab=run.lab,
        verdict=worst(check.verdict for check in checks),
        checks=tuple(checks),
        faults=tuple(
            msgspec.structs.replace(fault.receipt or _empty_receipt(fault), unproven=problems[fault.plan.id])
            for fault in run.faults
        ),
        lab_state=run.lab_state,
        attribution=attribute(run, flights, trips),
        routing=run.routing or msgspec.UNSET,
    )


def noisy_checks(expectations: Sequence[Expectation]) -> int:
    """Return how many checks of a run are decided by an interval, so that chance alone can make each of them wrong.

    `faultbed.harness.confidence.level_for` turns it into the level that each interval needs.
    """
    return sum(
        is_noisy(expectation.metric, sign, bound)
        for expectation in expectations
        for sign, bound in bounds_of(expectation)
    )


def is_noisy(metric: Metric, sign: str, bound: float | str) -> bool:
    """Return whether a check is decided by an interval; a share whose minimum is its largest possible value is not."""
    return metric.is_noisy and not (sign == "min" and metric.most is not None and bound == metric.most)


def check_expectation(
    expectation: Expectation, observation: Observation | None, problems: Sequence[str], *, noisy: int = 1
) -> tuple[Check, ...]:
    """Return a check for each bound of an expectation.

    `problems` say why the faults it is about are not proven; they matter only for metrics about faults. `noisy` is how
    many noisy checks the run has in all.
    """
    return tuple(
        _bound_check(expectation.metric, sign, bound, observation, problems, noisy)
        for sign, bound in bounds_of(expectation)
    )


def bounds_of(expectation: Expectation) -> list[tuple[str, float | int | str]]:
    """Return the bounds of an expectation, each with its sign: min, max or equals."""
    bounds = ("min", expectation.minimum), ("max", expectation.maximum), ("equals", expectation.equals)
    return [(sign, bound) for sign, bound in bounds if bound is not None]


COMPARISONS = {"min": "observed >= bound", "max": "observed <= bound", "equals": "observed = bound"}


def _bound_check(
    metric: Metric,
    sign: str,
    bound: float | str,
    observation: Observation | None,
    problems: Sequence[str],
    noisy: int,
) -> Check:
    """Return the check of one bound: the comparison, unless something makes the value no evidence."""
    comparison = _compare_bound(metric, sign, bound, observation, noisy)
    verdict, detail = comparison.verdict, comparison.detail
    if observation is not None and (reason := faster_than_twin(metric.name, observation)) is not None:
        verdict = Verdict.INCONCLUSIVE
        detail = f"{detail}; {reason}"
    if metric.about_faults and problems:
        verdict = Verdict.INCONCLUSIVE
        detail = f"{detail}; says nothing, because {problems[0]}"
    return Check(
        name=metric.name,
        verdict=verdict,
        observed=comparison.value,
        bound=bound,
        unit=metric.unit,
        rule=f"{comparison.rule}. {metric.meaning}",
        detail=detail,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """A value compared with a bound. `value` None: there is no value to compare."""

    value: Value | None
    verdict: Verdict
    rule: str
    detail: str


def _compare_bound(
    metric: Metric, sign: str, bound: float | str, observation: Observation | None, noisy: int
) -> _Comparison:
    """Compare an observation with a bound: by its interval if it is noisy, otherwise by its value."""
    rule = COMPARISONS[sign]
    if observation is None or observation.value is None:
        detail = "not measured in this run" if observation is None else observation.detail
        return _Comparison(value=None, verdict=Verdict.INCONCLUSIVE, rule=rule, detail=detail)
    value, detail = observation.value, observation.detail
    if isinstance(value, float) and not math.isfinite(value):
        detail = f"{value} is no value; {detail}"
        return _Comparison(value=None, verdict=Verdict.INCONCLUSIVE, rule=rule, detail=detail)
    if metric.is_noisy and not is_noisy(metric, sign, bound):
        verdict = _compare_ends(sign, value, bound, observation)
    elif (interval := _deciding(sign, observation)) is not None and not isinstance(bound, str):
        verdict = decide("max" if sign == "max" else "min", bound, interval)
        rule, detail = f"{rule}, {interval.rule}{risk(interval.level, noisy)}", f"{detail}; {interval}"
    elif metric.is_noisy and observation.interval is None:
        verdict = Verdict.INCONCLUSIVE
        detail = f"{detail}; {NO_INTERVAL}"
    else:
        verdict = _compare_ends(sign, value, bound, observation)
        if observation.censored and verdict is Verdict.FAIL and _is_within(bound, observation.interval):
            verdict = Verdict.INCONCLUSIVE
            detail = f"{detail}; some of it may be by chance: {observation.interval}"
    return _Comparison(value=value, verdict=verdict, rule=rule, detail=detail)


def risk(level: float, noisy: int) -> str:
    """Return what a rule says about its risk, which all noisy checks of a run share; empty if `level` is 1."""
    if level == 1:
        return ""
    tail = 100 * tail_of(level)
    of_all = f"{tail:.3g} % for each of {noisy} noisy checks" if noisy > 1 else f"{tail:.3g} %"
    return f"; wrong FAIL at most {of_all}"


def _deciding(sign: str, observation: Observation) -> Interval | None:
    """Return the interval that decides; None: the value is exact, a name, or censored at its upper end."""
    return None if sign == "equals" or observation.censored else observation.interval


def _is_within(bound: float | str, interval: Interval | None) -> bool:
    """Return whether a censored value may be below its maximum: the lower end of its interval is."""
    return interval is not None and not isinstance(bound, str) and interval.low <= bound


def _compare_ends(sign: str, value: float | str, bound: float | str, observation: Observation) -> Verdict:
    """Compare every value that errors of measurement leave open; INCONCLUSIVE where they disagree."""
    ends = observation.between or (value,)
    verdicts = {_compare(sign, end, bound, censored=observation.censored) for end in ends}
    return verdicts.pop() if len(verdicts) == 1 else Verdict.INCONCLUSIVE


def _compare(sign: str, value: float | str, bound: float | str, *, censored: bool) -> Verdict:
    if sign == "equals":
        good = value == bound
        return Verdict.INCONCLUSIVE if censored else Verdict.PASS if good else Verdict.FAIL
    if isinstance(value, str) or isinstance(bound, str):
        return Verdict.INCONCLUSIVE
    if sign == "max":
        if value > bound:
            return Verdict.FAIL
        return Verdict.INCONCLUSIVE if censored else Verdict.PASS
    if value >= bound:
        return Verdict.PASS
    return Verdict.INCONCLUSIVE if censored else Verdict.FAIL


def _unproven_for(metric: Metric, problems: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return what is unproven about the faults that `metric` is about: one for `recovery.<id>`, else all."""
    for prefix in PER_FAULT_PREFIXES:
        fault_id = metric.name.removeprefix(prefix)
        if metric.name.startswith(prefix) and fault_id in problems:
            return tuple(f"{fault_id}: {problem}" for problem in problems[fault_id])
    return tuple(
        f"{fault_id}: {problem}" for fault_id, problems_of_fault in problems.items() for problem in problems_of_fault
    )


def _fault_check(fault: FaultRun, problems: Sequence[str], t0_ns: int) -> Check:
    receipt = fault.receipt
    evidence = list(problems) or [f"witness: {receipt.fired.witness if receipt else None}", *_on_for(receipt)]
    armed_ns = receipt.armed.at_ns if receipt else None
    late_ns = armed_ns - t0_ns - fault.plan.at_ns if isinstance(armed_ns, int) else 0
    if late_ns > _LATE_NS:
        evidence.append(f"armed {late_ns / 1e9:.1f} s later than planned, because the lab was busy")
    return Check(
        name=f"fired.{fault.plan.id}",
        verdict=Verdict.INCONCLUSIVE if problems else Verdict.PASS,
        observed=0 if receipt is None else receipt.fired.count,
        bound=1,
        unit="count",
        rule="observed >= bound. Armed, fired, seen by a counter or a reading, nothing moved that must not, cleared, "
        f"{firing_times.RULE}",
        detail="; ".join(evidence),
    )


def _routing_checks(plan: Plan, receipt: RoutingReceipt | None) -> list[Check]:
    """Return checks that the experiment's routing scheme routed the workload, by kernels, marks and counters."""
    scheme = receipt.scheme if receipt is not None else plan.fabric.routing if plan.fabric else ""
    if not scheme:
        return []
    problems = receipt.unproven if receipt is not None else ("it was never applied",)
    decisions = receipt.decisions if receipt is not None else RoutingDecisions(queried=0, agreed=0)
    evidence = [*problems]
    if receipt is not None and not problems:
        marked = "" if receipt.marked is None else f", {sum(receipt.marked.values())} packets marked"
        copied = receipt.cleared.copied
        followed = f", {copied} next hops were changed after BGP" if copied else ""
        evidence = [f"{receipt.carried_packets} packets left by ports among which the scheme chooses{marked}{followed}"]
        if by := sorted({deviation.fault for deviation in receipt.deviations if deviation.fault}):
            evidence.append(f"BGP lost next hops because of {', '.join(by)}")
    return [
        Check(
            name=f"routing.{scheme}",
            verdict=Verdict.INCONCLUSIVE if problems else Verdict.PASS,
            observed=decisions.agreed,
            bound=decisions.queried,
            unit="count",
            rule="observed = bound. Applied, the switches' kernels decide as the scheme does, packets seen, not "
            "changed while the workload ran, removed",
            detail="; ".join(evidence),
        )
    ]


def _on_for(receipt: Receipt | None) -> list[str]:
    if receipt is None or (on_time := receipt.on_time) is None:
        return []
    if on_time.complete:
        return ["complete: it hit as often as planned"]
    on_s, planned_s, off_s = (ns / 1e9 for ns in (on_time.measured_ns, on_time.planned_ns, on_time.tolerance_ns))
    switching = f"switching took {on_time.changing_ns / 1e9:.2f} s"
    return [f"on for {on_s:.2f} s of {planned_s:.2f} s (tolerance {off_s:.2f} s), {switching}"]


def _worded_check(name: str, verdict: Verdict, rule: str, detail: str) -> Check:
    """Return a check without a number, whose result is described in words."""
    return Check(name=name, verdict=verdict, observed=None, bound=None, unit="", rule=rule, detail=detail)


def _error_checks(errors: Sequence[str]) -> list[Check]:
    return [_worded_check("harness", Verdict.ERROR, "The harness itself did its work", sentence) for sentence in errors]


def _workload_checks(run: Measurements) -> list[Check]:
    """Return checks that the workload moved data and did not fail. A failed job is a FAIL, not an ERROR.

    A workload that moved no data does not show what the faults do to it, although a bound on errors would hold. Of
    several flows, each has to move some.
    """
    if run.failure is not None:
        return [_worded_check("workload", Verdict.FAIL, "The workload ran to its end", f"it failed: {run.failure}")]
    has_moved = any(any(sample.bytes for sample in series.samples) or series.iterations for series in run.series)
    if run.errors or run.serving is not None:
        return []
    silent = _silent_flows(run)
    if has_moved and not silent:
        return []
    detail = (
        f"nothing arrived on {silent[0]} from beginning to end ({len(silent)} such flows), so the effect of the faults "
        "on it is unknown"
        if has_moved
        else "no data arrived and no iteration finished, so the effect of the faults is unknown"
    )
    return [_worded_check("workload", Verdict.INCONCLUSIVE, "The workload moves data", detail)]


def _content_checks(run: Measurements, observed: Observed, expected: Collection[str]) -> Iterator[Check]:
    """Yield checks of the data that arrived, whether or not an expectation names them.

    Wrong data are a FAIL, unless an expectation says how many elements may be wrong. Those of the fault-free twin
    always are. A flow whose bytes were to be checked, and of which none was, shows nothing about them.
    """
    if run.checked_bytes is not None:
        unchecked = f", but none of {run.unchecked_flows[0]}" if run.unchecked_flows else ""
        right = Verdict.PASS if run.checked_bytes and not unchecked else Verdict.INCONCLUSIVE
        yield Check(
            name="wrong_bytes",
            verdict=Verdict.FAIL if run.wrong_bytes else right,
            observed=run.wrong_bytes,
            bound=0,
            unit="count",
            rule="observed = bound. Bytes of the flows' messages that differ from those that were sent",
            detail=f"{run.checked_bytes:,} bytes compared{unchecked}",
        )
    wrong = observed.metrics.get(_ELEMENTS)
    if _ELEMENTS not in expected and wrong is not None and wrong.value:
        yield Check(
            name=_ELEMENTS,
            verdict=Verdict.FAIL,
            observed=wrong.value,
            bound=0,
            unit="count",
            rule="observed = bound. Elements of the results that were wrong; the experiment has no bound for them",
            detail=wrong.detail,
        )
    if wrong_in_twin := sum(step.wrong for rank in run.twin or () for step in rank.iterations):
        yield Check(
            name="twin_wrong_elements",
            verdict=Verdict.FAIL,
            observed=wrong_in_twin,
            bound=0,
            unit="count",
            rule="observed = bound. Elements of the fault-free twin's results that were wrong",
            detail="no fault was there to cause them",
        )


def _silent_flows(run: Measurements) -> list[str]:
    """Return the flows of which no byte arrived.

    Older runs name none. There they are the flows at whose counting end no byte was seen: over RC their source has the
    ACKs, else their sink.
    """
    if "flow" not in run.workload:
        return []
    if run.silent_flows is not None:
        return sorted(run.silent_flows)
    names = {rank.rank: f"{rank.host}:{rank.rnic}" for rank in run.ranks}
    carried = {names[series.rank] for series in run.series if any(sample.bytes for sample in series.samples)}
    is_acknowledged = run.workload.get("transport", "rc") == "rc"
    flows = {(connection.src, connection.dst) for connection in run.connections}
    return sorted(f"{src} > {dst}" for src, dst in flows if (src if is_acknowledged else dst) not in carried)


def _emulation_checks(run: Measurements) -> tuple[Check, ...]:
    """Return a check that the emulation can forward the load. Otherwise the run measures the machine."""
    if run.offered_bps is None:
        return ()
    capacity_bps = run.carried_bps
    bound_bps = None if capacity_bps is None else emulation_headroom.MAX_LOAD_FRACTION * capacity_bps
    beyond = emulation_headroom.exceeds_headroom(run.offered_bps, capacity_bps)
    return (
        Check(
            name="emulation",
            verdict=Verdict.INCONCLUSIVE if beyond else Verdict.PASS,
            observed=round(run.offered_bps / 1e6, 3),
            bound=None if bound_bps is None else round(bound_bps / 1e6, 3),
            unit="Mb/s",
            rule=emulation_headroom.CHECK_RULE,
            detail=emulation_headroom.describe_headroom(run.offered_bps, capacity_bps),
        ),
    )


def _restart_checks(observed: Observed, *, failed: bool) -> list[Check]:
    """Return one check for each restart of a job. A restart that the job's end cut short proves nothing."""
    return [
        Check(
            name=f"restart.{timed.restart.number}",
            verdict=_restart_verdict(timed.restart, is_last=timed is observed.restarts[-1], failed=failed),
            observed=None if timed.restart.caught_up_ns is None else timed.length_ns / 1e9,
            bound=None,
            unit="s",
            rule="The job caught up after this restart, or another loss interrupted it",
            detail=timed.describe(),
        )
        for timed in observed.restarts
    ]


def _restart_verdict(restart: Restart, *, is_last: bool, failed: bool) -> Verdict:
    if not is_last:
        return Verdict.PASS
    if failed:
        return Verdict.FAIL
    return Verdict.INCONCLUSIVE if restart.caught_up_ns is None else Verdict.PASS


def _state_checks(run: Measurements) -> list[Check]:
    """Check the final state of a job with restarts, whether or not an expectation names it.

    Wrong elements are a FAIL. Otherwise the check is INCONCLUSIVE if a rank of the final placement reported no state,
    or if that is not the state after all iterations.
    """
    if run.resilience is None or (run.failure is not None and not run.resilience.states):
        return []  # a job that did not end has failed, which is a check of its own
    wrong, why = sum(state.wrong for state in run.resilience.states), why_state_unknown(run)
    unknown = f"; {why}" if why else ""
    complete = Verdict.INCONCLUSIVE if why else Verdict.PASS
    return [
        Check(
            name="state",
            verdict=Verdict.FAIL if wrong else complete,
            observed=wrong if run.resilience.states else None,
            bound=0,
            unit="count",
            rule="observed = bound. Elements of the final state that differ from those of an uninterrupted job",
            detail=f"{sum(state.elements for state in run.resilience.states)} elements on {len(run.resilience.states)} "
            f"ranks compared{unknown}",
        )
    ]


def _lab_checks(state: LabState, diff: Sequence[str]) -> tuple[Check, ...]:
    clean = state == "CLEAN"
    detail = (
        "the same as before the run"
        if clean
        else "; ".join(diff) or "the comparison with the state before the run failed"
    )
    return (
        Check(
            name="lab_restored",
            verdict=Verdict.PASS if clean else Verdict.INCONCLUSIVE,
            observed=state,
            bound="CLEAN",
            unit="",
            rule="observed = bound. Fingerprint of every node after the run against the one before",
            detail=detail,
        ),
    )


def _empty_receipt(fault: FaultRun) -> Receipt:
    """Return the receipt of a fault that was never prepared. It proves nothing."""
    return Receipt(
        id=fault.plan.id,
        kind=fault.plan.kind,
        target=fault.plan.target,
        fidelity="modelled",
        armed=Armed(ok=False),
        fired=Fired(count=0, first_ns=None, last_ns=None, witness=None, must_move={}, must_not_move={}),
        cleared=Cleared(ok=False),
    )
