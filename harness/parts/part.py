"""What a part of an experiment has to provide, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from faultbed.harness.analysis.noise import NoiseFloor
from faultbed.harness.analysis.observations import Observation
from faultbed.harness.analysis.observe import Observed
from faultbed.harness.analysis.timeline import Goodput
from faultbed.harness.experiment.declare.lab_names import LabNames
from faultbed.harness.experiment.experiment_file import Expectation, Experiment
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.experiment.stop import Condition
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.sealed import Evidence, Kind, Phase, Sealed
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.ledger.statistics.decision import Estimand, Reason, Rule, Sign
from faultbed.harness.parts.passes import Active, Calibration, Pass
from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.topology import Topology

__all__ = ["Fitting", "Part", "Planned", "Row", "Sending", "View", "planned_by"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """What a workload, or a part beside it, sends: from which RNICs to which, and how much.

    `paced_bps` is its payload rate in bits/s; 0: it is not paced.
    """

    sources: tuple[str, ...]
    sinks: tuple[str, ...]
    paced_bps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """An experiment that is bound to a lab, before its run is planned; `sending`: what it sends, the workload first."""

    experiment: Experiment
    inventory: Inventory
    sending: Sequence[Sending]


def _supported_by_nothing(_expectation: Expectation) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What is known before a run: claims are made from nothing else.

    `supports` returns the names of the claims without which the value of an expectation's metric means nothing.
    """

    plan: Plan
    expectations: Sequence[Expectation]
    stops: Sequence[Condition] = ()
    supports: Callable[[Expectation], tuple[str, ...]] = _supported_by_nothing


def planned_by(plan: Plan) -> Planned:
    """Return what `plan.json` says about a run.

    Raises:
        ValueError: the plan bounds a metric that does not exist.
    """
    return Planned(plan=plan, expectations=plan.expectations, stops=plan.stops)


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
    run: RunEvidence
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


def _no_row(_claim: Claim, _view: View) -> None:
    return None


def _not_there(_run: Pass) -> None:
    return None


def _not_fitted(_fitting: Fitting) -> None:
    return None


def _ends_with_the_run(_experiment: Experiment) -> float:
    return 0.0


def _not_calibrated(_lab: Calibration) -> None:
    return None


def _as_it_is(_names: LabNames, experiment: Experiment, _endpoints: Sequence[str]) -> Experiment:
    return experiment


def _refuses_none(
    _experiment: Experiment, _faults: Sequence[PlannedFault], _places: Mapping[str, str], _topology: Topology
) -> None:
    return None


def _says_nothing(_experiment: Experiment) -> Iterable[str]:
    return ()


def _uses_none(_experiment: Experiment, _hosts: Sequence[str]) -> Iterable[str]:
    return ()


def _sends_nothing(_experiment: Experiment) -> None:
    return None


def _no_pass(_planned: Planned) -> Mapping[Phase, str]:
    return {}


def _supports_nothing(_planned: Planned, _expectation: Expectation) -> Iterable[str]:
    return ()


def _no_metrics(_run: RunEvidence, _sealed: Sealed, _level: float) -> Mapping[str, Observation]:
    return {}


def _saw_none(_sealed: Sealed) -> Iterable[tuple[int, int]]:
    return ()


def _nothing_beside(_run: RunEvidence, _sealed: Sealed) -> Iterable[tuple[str, Goodput | None]]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of an experiment.

    Attributes:
        name: of the part, and of its files in `evidence/`.
        row: returns what the evidence says about a claim of this part; None: nothing.
        claims: yields what a run with this plan has to show.
        found: yields claims about what was not planned (a restart, a wrong element). Evidence removes no claim.
        supports: yields the claims of this part without which the metric of an expectation means nothing.
        evidence: the type of what the part seals in each pass that it takes part in.
        bind: returns an experiment with the names of a lab in its section, given the RNICs of the workload. It raises a
            ConfigError or Unsupported, with the place in the file, if the section does not fit the lab.
        refuse_faults: raises a ConfigError if a planned fault would act on the part itself. It is given the place of
            each fault in the file, by its name.
        says: returns lines about the part for `run --plan`.
        uses: returns those hosts of a lab that the part uses beside the RNICs of `sends`.
        sends: returns what the part sends beside the workload; None: nothing.
        fit: returns what `plan.json` says about this part beyond its section, in `parts`; None: nothing.
        passes: returns the passes that the part needs before the measured one, each with its progress line.
        outlives_s: returns for how many seconds the part may outlive the process of the run.
        calibrate: measures the lab before all passes, alone on it; returns the evidence, or None.
        active: returns the part as it is in a pass, without touching the lab; None: the experiment does not have it.
        metrics: returns the metrics of the part with intervals of a level.
        goings_back: returns when packets were seen to be sent again, each with the time of what caused it (ns).
        beside: yields names and goodput of what the part sent beside the workload, on the same links.
    """

    name: str
    row: Callable[[Claim, View], Row | None] = _no_row
    claims: Callable[[Planned], Iterable[Claim]] = _nothing
    found: Callable[[View], Iterable[Claim]] = _nothing
    supports: Callable[[Planned, Expectation], Iterable[str]] = _supports_nothing
    evidence: Kind | None = None
    bind: Callable[[LabNames, Experiment, Sequence[str]], Experiment] = _as_it_is
    refuse_faults: Callable[[Experiment, Sequence[PlannedFault], Mapping[str, str], Topology], None] = _refuses_none
    says: Callable[[Experiment], Iterable[str]] = _says_nothing
    uses: Callable[[Experiment, Sequence[str]], Iterable[str]] = _uses_none
    sends: Callable[[Experiment], Sending | None] = _sends_nothing
    fit: Callable[[Fitting], Evidence | None] = _not_fitted
    passes: Callable[[Planned], Mapping[Phase, str]] = _no_pass
    outlives_s: Callable[[Experiment], float] = _ends_with_the_run
    calibrate: Callable[[Calibration], Evidence | None] = _not_calibrated
    active: Callable[[Pass], Active | None] = _not_there
    metrics: Callable[[RunEvidence, Sealed, float], Mapping[str, Observation]] = _no_metrics
    goings_back: Callable[[Sealed], Iterable[tuple[int, int]]] = _saw_none
    beside: Callable[[RunEvidence, Sealed], Iterable[tuple[str, Goodput | None]]] = _nothing_beside
