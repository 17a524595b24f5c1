"""Settle every claim of a run, and fold them into its verdict. Pure.

1. An error of the harness itself is a check with verdict ERROR, and the run is an ERROR.
2. Each part of the experiment (`faultbed.harness.parts.registry`) makes claims from the plan. Evidence may add some,
   and removes none. A claim that no evidence settles is unknown, and the run INCONCLUSIVE.
3. A claim that depends on another one (a bound on the recovery from a fault, or under a routing scheme) is unknown
   unless that one holds. Wrong data depend on nothing: they are wrong even if no fault fired.
4. The verdict is the fold of all claims (`faultbed.harness.ledger.ledger.fold`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from faultbed.harness.analysis.noise import NoiseFloor
from faultbed.harness.analysis.observe import Observed, observe
from faultbed.harness.attribution.attribute import attribute
from faultbed.harness.confidence import LEVEL
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.ledger.claims import Claim, Reason, Status, Unknown
from faultbed.harness.ledger.ledger import Entry, Ledger, fold, planned, verdict_of
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.ledger.settle import Finding, settle
from faultbed.harness.parts.part import Planned, Row, View
from faultbed.harness.parts.registry import PARTS
from faultbed.harness.proof import why_unproven_in
from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.verdict import Check, Verdict, VerdictFile
from faultbed.inject.evidence.receipt import Armed, Cleared, Fired, Receipt
from faultbed.traffic.engine.flight_recorder import Flight
from faultbed.traffic.probes.rtt import Trip

__all__ = ["KINDS", "Judged", "judge", "observed_of", "planned_ledger"]


_NOTHING_SEALED = Sealed()
KINDS = {part.name: part.evidence for part in PARTS if part.evidence is not None}
"""The types of the evidence that parts seal, by the names of their files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A judged run: its ledger, and the verdict file that people read."""

    ledger: Ledger
    verdict: VerdictFile


def planned_ledger(before: Planned) -> Ledger:
    """Return the ledger of a run that has not begun: every claim that its plan makes is unknown."""
    supported = _supported(before)
    return planned(claim for part in PARTS for claim in part.claims(supported))


def _supported(before: Planned) -> Planned:
    """Return what is known before a run, with the claims of all parts on which a bound depends."""

    def supports(expectation: Expectation) -> tuple[str, ...]:
        # The first claim that does not hold is the reason that is printed: a fault says more than the scheme under it.
        return tuple(name for part in reversed(PARTS) for name in part.supports(before, expectation))

    return replace(before, supports=supports)


def observed_of(run: RunEvidence, sealed: Sealed, *, level: float = LEVEL) -> Observed:
    """Compute every metric of one run: those of its workload, and those of its parts.

    Noisy metrics have intervals of this `level`.
    """
    beside = {name: goodput for part in PARTS for name, goodput in part.beside(run, sealed)}
    goings_back = [pair for part in PARTS for pair in part.goings_back(sealed)]
    observed = observe(run, level=level, goings_back=goings_back, beside=beside)
    of_parts = {name: metric for part in PARTS for name, metric in part.metrics(run, sealed, level).items()}
    return replace(observed, metrics={**observed.metrics, **of_parts})


def judge(
    *,
    before: Planned,
    run: RunEvidence,
    observed: Observed,
    sealed: Sealed = _NOTHING_SEALED,
    floor: NoiseFloor | None = None,
    flights: Sequence[Flight] = (),
    trips: Sequence[Trip] = (),
) -> Judged:
    """Judge one run.

    `before` is what was known before it, and `sealed` the evidence of its parts. `floor` is how much fault-free runs on
    this lab differ, where that is known; `trips` are its probes, `flights` the flight recorders of a job that failed.
    """
    unproven = {fault.plan.id: why_unproven_in(run, fault) for fault in run.injected.faults}
    view = View(
        planned=_supported(before),
        run=run,
        observed=observed,
        floor=floor,
        faults={fault.plan.id: fault for fault in run.injected.faults},
        sealed=sealed,
    )
    statuses: dict[str, Status] = {}
    entries, checks = [], [_error_check(error) for error in run.lab.errors]
    for claim, row in _rows(view):
        status = settle(claim, row.finding if row is not None else None, statuses)
        statuses[claim.name] = status
        entries.append(Entry(claim=claim, status=status))
        checks.append(_check(claim, row or Row(finding=Finding(), detail="nothing is known about it"), status))
    ledger = Ledger(entries=tuple(entries), errors=run.lab.errors)
    verdict = VerdictFile(
        experiment=before.plan.experiment,
        seed=before.plan.seed,
        lab=run.lab.name,
        verdict=fold(ledger),
        checks=tuple(checks),
        faults=tuple(
            msgspec.structs.replace(fault.receipt or _empty_receipt(fault), unproven=unproven[fault.plan.id])
            for fault in run.injected.faults
        ),
        lab_state=run.lab.state,
        attribution=attribute(run, flights, trips),
        routing=run.routing or msgspec.UNSET,
    )
    return Judged(ledger=ledger, verdict=verdict)


def _rows(view: View) -> Iterator[tuple[Claim, Row | None]]:
    """Yield every claim of the plan, and those that the evidence adds, each with what is known about it."""
    for part in PARTS:
        claims = {claim.name: claim for claim in (*part.claims(view.planned), *part.found(view))}
        yield from ((claim, part.row(claim, view)) for claim in claims.values())


def _check(claim: Claim, row: Row, status: Status) -> Check:
    """Return the row of a claim in `verdict.json`. What it depends on comes after its own numbers."""
    doubts = [reason for reason in status.reasons if reason.code == "depends"] if isinstance(status, Unknown) else []
    return Check(
        name=row.name or claim.name,
        verdict=verdict_of(status),
        observed=row.observed,
        bound=row.bound,
        unit=row.unit,
        estimand=row.estimand,
        rule=row.rule,
        comparison=row.comparison,
        why=row.why,
        meaning=row.meaning or claim.says,
        detail="; ".join(filter(None, (row.detail, *map(_says_nothing, doubts[:1])))),
    )


def _says_nothing(reason: Reason) -> str:
    _, _, name = reason.subject.rpartition(".")
    return f"says nothing, because {name}: {reason.because}"


def _error_check(error: str) -> Check:
    return Check(
        name="harness",
        verdict=Verdict.ERROR,
        observed=None,
        bound=None,
        unit="",
        meaning="The harness itself did its work",
        detail=error,
    )


def _empty_receipt(fault: FaultRun) -> Receipt:
    """Return the receipt of a fault that was never prepared. It proves nothing."""
    return Receipt(
        id=fault.plan.id,
        kind=fault.plan.kind,
        target=fault.target,
        fidelity="modelled",
        armed=Armed(ok=False),
        fired=Fired(count=0, first_ns=None, last_ns=None, witness=None, must_move={}, must_not_move={}),
        cleared=Cleared(ok=False),
    )
