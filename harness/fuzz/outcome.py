"""Outcome of one run of a case: failed checks, excused checks, and unproven faults. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from faultbed.harness.fuzz.case import Case
from faultbed.harness.verdict import Verdict, VerdictFile
from faultbed.inject.kinds.catalogue import CATALOGUE

__all__ = ["CaseRun", "Failure", "Outcome", "Unproven", "outcome_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unproven:
    """A fault whose receipt does not prove that it happened, and the first reason."""

    kind: str
    target: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a run.

    `failures` maps each check that failed to its detail. `excused` are checks that one of the faults may fail.
    """

    verdict: str
    failures: Mapping[str, str]
    excused: tuple[str, ...] = ()
    unproven: tuple[Unproven, ...] = ()
    run_dir: Path | None = None

    @property
    def failed(self) -> frozenset[str]:
        """Names of the checks that failed."""
        return frozenset(self.failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRun:
    """One run of a case."""

    case: Case
    outcome: Outcome
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One kind of failure: the failed checks, the first case with them, and the smallest case found.

    `is_smallest` is False if the budget ended before shrinking did. `fails_again` is whether the smallest case failed
    in a second run; None: there was no second run. `runs` counts the runs from the first failure on.
    """

    checks: tuple[str, ...]
    first: Case
    smallest: Case
    outcome: Outcome
    is_smallest: bool
    fails_again: bool | None
    runs: int


def outcome_of(case: Case, verdict: VerdictFile, *, run_dir: Path | None = None) -> Outcome:
    """Judge the verdict of a run.

    A check that is FAIL or ERROR is a failure, and so is a DIRTY lab. INCONCLUSIVE is no failure: an
    unproven fault is reported separately. A fault excuses the checks that its kind may fail, if it was armed or fired.
    """
    failed_checks = {
        check.name: check.detail for check in verdict.checks if check.verdict in (Verdict.FAIL, Verdict.ERROR)
    }
    if verdict.lab_state == "DIRTY":
        failed_checks["lab_restored"] = next(
            (check.detail for check in verdict.checks if check.name == "lab_restored"), "the lab is DIRTY"
        )
    idle = Counter(receipt.kind for receipt in verdict.faults if not receipt.armed.ok and receipt.fired.count <= 0)
    acted = Counter(fault.kind for fault in case.faults) - idle
    expected = {
        name
        for fault in case.faults
        if fault.kind in acted
        for name in CATALOGUE[fault.kind].may_fail_with(fault.params)
    }
    return Outcome(
        verdict=verdict.verdict,
        failures={name: detail for name, detail in failed_checks.items() if name not in expected},
        excused=tuple(sorted(failed_checks.keys() & expected)),
        unproven=tuple(
            Unproven(kind=receipt.kind, target=receipt.target, reason=receipt.unproven[0])
            for receipt in verdict.faults
            if receipt.unproven
        ),
        run_dir=run_dir,
    )
