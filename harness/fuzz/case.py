"""A fuzz case: a workload with faults, and its experiment file. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faultbed.harness.experiment.toml_text import inline, lines
from faultbed.inject.kinds.catalogue import kind_named
from faultbed.inject.kinds.fault_spec import FaultSpec

__all__ = ["NAME", "Case", "describe", "describe_fault", "duration_s", "size", "to_toml"]

NAME = "fuzz"
"""The experiment's name in every case; run directories are named after it."""

TAIL_S = 3.0
"""Seconds that the workload continues after the last fault: later iterations may show its damage."""
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload (keys of `[workload]`, without its duration) and faults in the order in which they begin."""

    workload: Mapping[str, Any]
    faults: tuple[FaultSpec, ...] = ()


def duration_s(case: Case) -> float:
    """Return how long the workload runs: until some seconds after the last fault."""
    return max((fault.at_s + fault.for_s for fault in case.faults), default=0.0) + TAIL_S


def size(case: Case) -> tuple[int, float, float, int]:
    """Return a sort key for shrinking: number of faults, their total duration, their starts, length of the text."""
    on_s = sum(fault.for_s for fault in case.faults)
    return len(case.faults), on_s, sum(fault.at_s for fault in case.faults), len(to_toml(case))


def to_toml(case: Case, *, comments: Sequence[str] = ()) -> str:
    """Return the case as an experiment file.

    For a collective, the file expects no wrong element; a flow checks its own bytes. The file does not bound
    `kernel.errors`, because rxe logs every queue pair that a fault ends, and a kernel bug makes the run an ERROR
    anyway.
    """
    metrics = ["wrong_elements"] if "collective" in case.workload else []
    workload = {**case.workload, "duration": f"{duration_s(case):g}s"}
    parts = [
        *(f"# {line}" for line in comments),
        f'name = "{NAME}"',
        f"seed = {SEED}",
        "",
        "[workload]",
        *lines(workload),
    ]
    for fault in case.faults:
        parts += ["", "[[faults]]", *lines({"kind": fault.kind, "target": fault.target})]
        parts += lines({"at": f"{fault.at_s:g}s", "for": f"{fault.for_s:g}s"})
        if fault.params:
            parts += lines({"set": kind_named(fault.kind).spelled(fault.params)})
    for metric in metrics:
        parts += ["", "[[expect]]", *lines({"metric": metric, "max": 0})]
    return "\n".join(parts) + "\n"


def describe(case: Case) -> str:
    """Return the case in one line for people."""
    workload = " ".join(_word(key, value) for key, value in case.workload.items())
    return "; ".join([workload, *(describe_fault(fault) for fault in case.faults)])


def describe_fault(fault: FaultSpec) -> str:
    """Return a fault in one phrase for people."""
    params = "".join(f" {key}={value}" for key, value in kind_named(fault.kind).spelled(fault.params).items())
    return f"{fault.kind} on {fault.target} at {fault.at_s:g} s for {fault.for_s:g} s{params}"


def _word(key: str, value: Any) -> str:
    if key in ("collective", "flow"):
        return f"{key} {value}"
    return f"{key}={inline(value) if isinstance(value, dict | list) else value}"
