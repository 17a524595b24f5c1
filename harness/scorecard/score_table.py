"""The rows of a scorecard: what each program survived, how fast it was back, and whether it was as fast as before.

A run is known if its fault provably fired on what the program used and nothing else is unknown. Only such runs say
whether the program survived; every other one is counted as unknown, with the reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run.repeats.trials import trial_of
from faultbed.harness.run.sweeps.sweep_points import Point
from faultbed.harness.scorecard.score_points import FAULT
from faultbed.harness.verdict import Check, Verdict, VerdictFile

__all__ = ["METRICS", "Outcome", "ScoreFile", "ScoreRow", "ScoredRun", "deciding", "outcome_of", "row_of"]

Outcome = Literal["survived", "failed", "unknown"]
METRICS = ("recovery.total", "after_clear.total", "goodput.after_ratio", "wrong_elements")


class ScoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. A metric without a value is missing from `values`; `open` are those that are at least their value."""

    seed: int
    run_dir: str
    outcome: Outcome
    why: str = ""
    values: dict[str, float] = {}
    open: tuple[str, ...] = ()


class ScoreRow(msgspec.Struct, frozen=True, kw_only=True):
    """One program, setting and fault, and its finished runs of `planned` ones."""

    program: str
    setting: str
    fault: str
    planned: int
    runs: tuple[ScoredRun, ...]

    def count(self, outcome: Outcome) -> int:
        """Return how many runs have an outcome. A run that is missing is unknown."""
        missing = self.planned - len(self.runs) if outcome == "unknown" else 0
        return sum(run.outcome == outcome for run in self.runs) + missing

    def values(self, metric: str) -> list[float]:
        """Return a metric of the runs that survived."""
        return [run.values[metric] for run in self.runs if run.outcome == "survived" and metric in run.values]

    @property
    def survival(self) -> str:
        """How many of the known runs survived, and how many are unknown: `3 of 4, 1 unknown`."""
        known, unknown = self.planned - self.count("unknown"), self.count("unknown")
        counted = f"{self.count('survived')} of {known}" if known else ""
        return ", ".join(filter(None, (counted, f"{unknown} unknown" if unknown else "")))

    def cell(self, metric: str) -> str:
        """Return the median of a metric and its range; `≥`: in some run the end was not seen."""
        values = self.values(metric)
        if not values:
            return "—"
        is_open = any(metric in run.open for run in self.runs if run.outcome == "survived")
        low, high = min(values), max(values)
        spread = f" ({low:.2f} to {high:.2f})" if high - low >= 0.01 else ""  # noqa: PLR2004 (what is printed)
        return f"{'≥ ' if is_open else ''}{statistics.median(values):.2f}{spread}"

    @property
    def data(self) -> str:
        """Whether data were right in all runs that were checked."""
        wrong = [run.values["wrong_elements"] for run in self.runs if "wrong_elements" in run.values]
        return "not checked" if not wrong else "right" if not any(wrong) else f"{sum(wrong):g} wrong"

    @property
    def why(self) -> str:
        """The first reason why a run did not survive, or why that is unknown."""
        return next((run.why for run in self.runs if run.why), "" if len(self.runs) == self.planned else "not run yet")


class ScoreFile(msgspec.Struct, frozen=True, kw_only=True):
    """`scorecard.json`."""

    schema: Literal[1] = 1
    faultbed: str
    lab: str
    rows: tuple[ScoreRow, ...]
    about: dict[str, str]
    decides: dict[str, str]

    @property
    def is_known(self) -> bool:
        """Whether the outcome of every planned run is known."""
        return not any(row.count("unknown") for row in self.rows)


def row_of(point: Point, runs: Sequence[RunDir], folder: Path) -> ScoreRow:
    """Return the row of a point from its finished runs."""
    return ScoreRow(
        program=point.parameters["program"],
        setting=point.parameters["setting"],
        fault=point.parameters["fault"],
        planned=len(point.runs),
        runs=tuple(_scored(run, point, folder) for run in runs),
    )


def _scored(run: RunDir, point: Point, folder: Path) -> ScoredRun:
    verdict = run.read_verdict()
    outcome, why = outcome_of(verdict)
    observed = {} if verdict.verdict is Verdict.ERROR else trial_of(run, verdict, point.experiment.expectations).metrics
    numbers = {name: observed[name] for name in METRICS if name in observed}
    values = {
        name: float(one.value)
        for name, one in numbers.items()
        if isinstance(one.value, int | float) and (name != "wrong_elements" or _is_checked(point))
    }
    return ScoredRun(
        seed=verdict.seed,
        run_dir=str(run.path.relative_to(folder)),
        outcome=outcome,
        why=why,
        values=values,
        open=tuple(name for name in values if numbers[name].censored),
    )


def _is_checked(point: Point) -> bool:
    """Return whether the workload compares the data that arrive."""
    work = point.experiment.workload
    return bool(getattr(work, "check", False)) or getattr(work, "progress", "") in ("rping", "nccl-tests")


def outcome_of(verdict: VerdictFile) -> tuple[Outcome, str]:
    """Return what a run says about its program, and why. Pure.

    A program fails if a check is broken although the fault is proven. Whatever is unknown beside a broken check does
    not unsay it; a broken check with a fault that is not proven says nothing about the fault.
    """
    fired = [check for check in verdict.checks if check.name == f"fired.{FAULT}"]
    is_proven = bool(fired) and all(check.verdict is Verdict.PASS for check in fired)
    if verdict.verdict is Verdict.ERROR:
        return "unknown", _reason(verdict.checks, Verdict.ERROR)
    if verdict.lab_state != "CLEAN":
        return "unknown", f"the lab is {verdict.lab_state}"
    if not is_proven:
        return "unknown", _reason(fired or verdict.checks, Verdict.INCONCLUSIVE) or "nothing says that the fault fired"
    if verdict.verdict is Verdict.FAIL:
        return "failed", _reason(verdict.checks, Verdict.FAIL)
    if verdict.verdict is Verdict.INCONCLUSIVE:
        return "unknown", _reason(verdict.checks, Verdict.INCONCLUSIVE)
    return "survived", ""


def _reason(checks: Iterable[Check], of: Verdict) -> str:
    return next((f"{check.name}: {check.detail}" for check in checks if check.verdict is of), "")


def deciding(rows: Sequence[ScoreRow]) -> dict[str, str]:
    """Return, by program, for which faults it depends on the setting whether every known run survives.

    Only rows without an unknown run are compared.
    """
    found: dict[str, list[str]] = {}
    by_fault: dict[tuple[str, str], dict[str, bool]] = {}
    for row in rows:
        if not row.count("unknown"):
            by_fault.setdefault((row.program, row.fault), {})[row.setting] = not row.count("failed")
    for (program, fault), survives in by_fault.items():
        if len(set(survives.values())) > 1:
            found.setdefault(program, []).append(f"{fault}: only with {_names(survives)}")
    return {program: "; ".join(texts) for program, texts in found.items()}


def _names(survives: Mapping[str, bool]) -> str:
    return " or ".join(name for name, is_alive in survives.items() if is_alive)
