"""A run in one or two plain sentences, for readers who read nothing else. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from faultbed.harness.analysis.observe import Observed
from faultbed.harness.conditions import unmet
from faultbed.harness.quantities import format_bytes, format_duration
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.verdict import Check, Verdict, VerdictFile

__all__ = ["describe_workload", "format_comparison", "format_observed", "format_value", "headline", "sentence"]

_MOST_DIGITS = 17
"""Significant digits that distinguish any two floating-point numbers."""

_HEADLINES = {
    Verdict.PASS: "The job survived",
    Verdict.FAIL: "The job broke its bounds",
    Verdict.INCONCLUSIVE: "This run proves nothing",
    Verdict.ERROR: "The harness failed",
}


def headline(verdict: VerdictFile) -> str:
    """Return a headline of a few words."""
    if verdict.verdict is Verdict.PASS and not verdict.faults:
        return "The job ran undisturbed"
    if verdict.verdict is Verdict.INCONCLUSIVE and verdict.lab_state == "CLEAN" and not unmet(verdict.checks):
        # All conditions of the run are met: only bounds are undecided.
        undecided = sum(check.verdict is Verdict.INCONCLUSIVE for check in verdict.checks)
        return f"{undecided} of {len(verdict.checks)} checks undecided"
    return _HEADLINES[verdict.verdict]


def format_value(value: float | str | None, unit: str) -> str:
    """Format a value or a bound with its unit; None is a dash.

    Examples: `1.3 s`, `1.09`, `61`, `host2`, `0.1 Gb/s`.
    """
    if value is None:
        return "—"
    if isinstance(value, str):
        return value
    if unit == "s":
        return format_duration(value * 1e9)
    if unit == "count":
        return f"{value:,g}" if abs(value) < 1_000_000 else f"{value:.4g}"  # noqa: PLR2004 - readable whole
    return f"{value:.3g}" + (f" {unit}" if unit not in ("ratio", "") else "")


def format_comparison(check: Check) -> str:
    """Return the sign in front of a check's bound: `≤ `, `≥ `, or nothing."""
    return {"max": "≤ ", "min": "≥ "}.get(check.comparison or "", "")


def format_observed(check: Check) -> str:
    """Format what a check observed, with more digits where it would look equal to a bound that it differs from."""
    value, bound = check.observed, check.bound
    text = format_value(value, check.unit)
    if not isinstance(value, int | float) or not isinstance(bound, int | float):
        return text
    if value == bound or text != format_value(bound, check.unit):
        return text
    exact = [f"{value:.{digits}g}" for digits in range(4, _MOST_DIGITS + 1)]
    shortest = next((number for number in exact if float(number) != bound), exact[-1])
    return shortest if check.unit in ("ratio", "count", "") else f"{shortest} {check.unit}"


def sentence(verdict: VerdictFile, run: RunEvidence, observed: Observed) -> str:
    """Describe what happened, with numbers and bounds. Unless the verdict is PASS, the reason comes first."""
    parts = []
    if verdict.verdict is not Verdict.PASS:
        worst = [check for check in verdict.checks if check.verdict is verdict.verdict]
        parts += [_complaint(check) for check in worst[:2]]
        if len(worst) > 2:  # noqa: PLR2004 - two are described above
            parts.append(f"{len(worst) - 2} more such checks are listed below.")
    parts += [_recovery(verdict, index, observed) for index in range(len(verdict.faults))]
    if parts and verdict.verdict is Verdict.PASS:
        parts.insert(0, _opening(len(verdict.faults)))
    finished = observed.metrics["iterations"].value
    wrong = observed.metrics["wrong_elements"].value
    if wrong is not None and finished:
        right = "every element right" if wrong == 0 else f"{wrong:,} elements wrong"
        parts.append(f"{finished} iterations on {len(run.workload.ranks)} ranks, {right}.")
    if verdict.left_out:
        parts.append(f"Without {', '.join(f'{exclusion.host} ({exclusion.why})' for exclusion in verdict.left_out)}.")
    return " ".join(part for part in parts if part)


def _opening(faults: int) -> str:
    words = {1: "One fault", 2: "Two faults", 3: "Three faults"}
    return f"{words.get(faults, f'{faults} faults')} fired, and every bound held."


def _complaint(check: Check) -> str:
    if check.verdict is Verdict.FAIL and check.bound is not None:
        bound = format_value(check.bound, check.unit)
        allowed = {"max": f"at most {bound} allowed", "min": f"at least {bound} allowed"}
        return f"{check.name} was {format_observed(check)}, {allowed.get(check.comparison or '', f'must be {bound}')}."
    name = check.name.removeprefix("fired.")
    return f"{name}: {check.detail}."


def _recovery(verdict: VerdictFile, index: int, observed: Observed) -> str:
    """Describe the recovery from one fault, as the judge measured it; empty if not measured or not proven."""
    fault = verdict.faults[index]
    impact = observed.impacts.get(fault.id)
    proven = any(check.name == f"fired.{fault.id}" and check.verdict is Verdict.PASS for check in verdict.checks)
    if impact is None or not proven:
        return ""
    fault_text = f"{fault.kind} on {fault.target}"
    if impact.censored:
        return f"{fault_text} took at least {format_duration(impact.recovery_ns)}: {impact.reason}."
    if (slow_down := impact.slow_down) is not None:
        return f"What {fault_text} cost is unknown: {slow_down.reason}."
    if impact.recovery_ns == 0:
        return f"{fault_text} cost no goodput beyond the noise."
    if impact.after_clear_ns == 0:
        value, name, since = impact.recovery_ns, "recovery", "recovered in"
    else:
        value, name, since = impact.after_clear_ns, "after_clear", "recovered"
    bound = _bound(verdict.checks, f"{name}.{fault.id}", f"{name}.total")
    suffix = " after it was cleared" if name == "after_clear" else ""
    return f"{fault_text} {since} {format_duration(value)}{suffix}{bound}."


def _bound(checks: Sequence[Check], *names: str) -> str:
    for name in names:
        for check in checks:
            if check.name == name and check.comparison == "max":
                return f" (bound {format_value(check.bound, check.unit)})"
    return ""


def _program_of(command: Any) -> str:
    first = next(iter(command.values()), "") if isinstance(command, dict) else command
    words = first.split() if isinstance(first, str) else first
    return str(words[0]) if words else ""


def describe_workload(run: RunEvidence) -> str:
    """Describe the workload in a few words."""
    spec = run.workload.planned
    size = format_bytes(float(spec.get("size_bytes") or 0))
    if "flow" in spec:
        ends = spec.get("pattern") or f"{spec.get('src')} to {spec.get('dst')}"
        count = spec.get("qps")
        return f"RDMA {spec['flow']} flow, {ends}, {count} QP{'' if count == 1 else 's'}, {size} messages"
    if "grid" in spec:
        grid = " x ".join(f"{name} {extent}" for name, extent in spec["grid"])
        count = len(spec["phases"])
        storage = f", storage on {spec['storage']['host']}" if spec.get("storage") else ""
        return f"job on a grid of {grid}, {count} phase{'' if count == 1 else 's'}{storage}"
    if "prefill_bytes" in spec:
        split = f", {spec['prefill_ranks']} of them for prefill" if spec["prefill_ranks"] else ""
        requests = f"{spec['requests']} requests of {spec['tokens']} tokens"
        return f"inference, {requests} on {len(run.workload.ranks)} ranks{split}"
    if "embedding_bytes" in spec:
        rows = format_bytes(float(spec["embedding_bytes"]))
        return f"ranking, {rows} of embeddings a rank, skew {spec['skew']:g}, on {len(run.workload.ranks)} ranks"
    if "replay" in spec:
        times = "" if spec["repeat"] == 1 else f" {spec['repeat']} times"
        return f"trace {spec['replay']}, replayed{times} on {len(run.workload.ranks)} ranks"
    return _describe_programs(spec) if "roles" in spec else _describe_collective(run, size)


def _describe_programs(spec: Mapping[str, Any]) -> str:
    places = ", ".join(f"{role} on {' '.join(rnics)}" for role, rnics in spec["roles"].items())
    return f"program {_program_of(spec['command'])}, {places}"


def _describe_collective(run: RunEvidence, size: str) -> str:
    spec = run.workload.planned
    compute = " with a compute phase" if spec.get("compute_units") else ""
    count = spec.get("qps_per_peer") or 1
    queue_pairs = f", {count} queue pairs per peer" if count > 1 else ""
    return (
        f"{spec.get('algorithm')} {spec.get('collective')} of {size} over {len(run.workload.ranks)} ranks"
        f"{queue_pairs}{compute}"
    )
