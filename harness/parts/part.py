"""What a part of an experiment has to provide, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from faultbed.harness.analysis.noise import NoiseFloor
from faultbed.harness.analysis.observe import Observed
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.experiment.stop import Condition
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.ledger.statistics.decision import Estimand, Reason, Rule, Sign
from faultbed.harness.record.measurements import FaultRun, Measurements
from faultbed.harness.record.sealed import Kind, Sealed

__all__ = ["Part", "Planned", "Row", "View"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What is known before a run, from `plan.json` and `experiment.toml`: claims are made from nothing else."""

    plan: Plan
    expectations: Sequence[Expectation]
    stops: Sequence[Condition] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The evidence of a run.

    Attributes:
        planned: what was known before the run.
        run: what it recorded.
        observed: what its records show.
        floor: how much fault-free runs on this lab differ, where that is known.
        faults: the faults of the run by id.
        sealed: the evidence of its parts.
    """

    planned: Planned
    run: Measurements
    observed: Observed
    floor: NoiseFloor | None
    faults: Mapping[str, FaultRun]
    sealed: Sealed


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a person reads about a claim: the finding, with the numbers behind it.

    `name` and `meaning` None: those of the claim. `unit` is the unit of `observed` and `bound`. `comparison`,
    `estimand`, `rule` and `why` are as in `faultbed.harness.verdict.Check`.
    """

    finding: Finding
    name: str | None = None
    meaning: str | None = None
    comparison: Sign | None = None
    estimand: Estimand = "fact"
    rule: Rule = field(default_factory=lambda: Rule(kind="value"))
    why: Reason | None = None
    observed: float | int | str | None = None
    bound: float | int | str | None = None
    unit: str = ""
    detail: str = ""


def _nothing(_known: Planned | View) -> Iterable[Claim]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of an experiment.

    Attributes:
        name: of the part, and of its files in `evidence/`.
        row: returns what the evidence says about a claim of this part; None: nothing.
        claims: yields what a run with this plan has to show.
        found: yields claims about what was not planned (a restart, a wrong element). Evidence removes no claim.
        evidence: the type of what the part seals in each pass that it takes part in.
    """

    name: str
    row: Callable[[Claim, View], Row | None]
    claims: Callable[[Planned], Iterable[Claim]] = _nothing
    found: Callable[[View], Iterable[Claim]] = _nothing
    evidence: Kind | None = None
