"""What a part of an experiment has to provide, and what it is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from faultbed.harness.analysis.noise import NoiseFloor
from faultbed.harness.analysis.observe import Observed
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.ledger.statistics.decision import Estimand, Reason, Rule, Sign
from faultbed.harness.record.measurements import FaultRun, Measurements

__all__ = ["Part", "Planned", "Row", "View"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What is known before a run: claims are made from nothing else."""

    plan: Plan
    expectations: Sequence[Expectation]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The evidence of a run.

    Attributes:
        planned: what was known before the run.
        run: what it recorded.
        observed: what its records show.
        floor: how much fault-free runs on this lab differ, where that is known.
        faults: the faults of the run by id.
    """

    planned: Planned
    run: Measurements
    observed: Observed
    floor: NoiseFloor | None
    faults: Mapping[str, FaultRun]


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


class Part(Protocol):
    """A part of an experiment; a module is one."""

    def claims(self, planned: Planned) -> Iterable[Claim]:
        """Yield what a run with this plan has to show."""
        ...

    def found(self, view: View) -> Iterable[Claim]:
        """Yield claims about what was not planned (a restart, a wrong element). Evidence removes no claim."""
        ...

    def row(self, claim: Claim, view: View) -> Row | None:
        """Return what the evidence says about a claim of this part; None: nothing."""
        ...
