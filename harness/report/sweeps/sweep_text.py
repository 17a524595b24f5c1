"""The table of a sweep as text, for the terminal and the page. Pure."""

from __future__ import annotations

from faultbed.harness.record.sweep_file import SweepFile, SweptPoint, SweptValue
from faultbed.harness.report.summary import format_value
from faultbed.harness.verdict import Verdict

__all__ = ["cell", "is_shown", "sentence", "state"]


def state(point: SweptPoint) -> str:
    """Return the verdict of a point, or that it has none."""
    return "not run" if point.verdict is None else str(point.verdict)


def is_shown(point: SweptPoint) -> bool:
    """Return whether the values of a point may be shown as numbers: its verdict is PASS or FAIL."""
    return point.verdict is not None and point.verdict.is_conclusive


def cell(point: SweptPoint, metric: str) -> str:
    """Return a metric at a point: `0.83 (0.80 .. 0.86)`, or the verdict of a point that shows nothing."""
    if not is_shown(point):
        return state(point)
    value = next((candidate for candidate in point.values if candidate.metric == metric), None)
    if value is None or value.value is None:
        return "no value"
    text = ("≥ " if value.censored else "") + format_value(value.value, value.unit)
    return f"{text}{_interval(value)}"


def _interval(value: SweptValue) -> str:
    if value.low is not None and value.high is not None:
        return f" ({format_value(value.low, value.unit)} .. {format_value(value.high, value.unit)})"
    if value.low is not None:
        return f" ({format_value(value.low, value.unit)} or more)"
    return " (no interval)" if value.unit in ("s", "ratio", "Gb/s") else ""


def sentence(sweep: SweepFile) -> str:
    """Describe a sweep in one sentence: points by verdict, runs, and the state of the lab."""
    counts = {name: sum(state(point) == name for point in sweep.points) for name in ("not run", *map(str, Verdict))}
    parts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    runs = sum(len(point.runs) for point in sweep.points)
    return f"{len(sweep.points)} points ({parts}), {runs} run{'' if runs == 1 else 's'}, lab {sweep.lab_state}"
