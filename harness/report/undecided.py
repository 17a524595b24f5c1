"""Explain an INCONCLUSIVE run in at most three lines: what was not decided, why, and what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from faultbed.harness.conditions import is_condition
from faultbed.harness.verdict import Check, Verdict, VerdictFile
from faultbed.testbed.observe.machine_load import MachineLoad
from faultbed.testbed.suggestions import first_of

__all__ = ["explain", "first_reason"]

_CONTROL, _HEALTH = "control_run", "healthy_start"
"""Names of checks that, if undecided, are the reason why the other checks of a run are undecided."""
_MOST_NAMES, _MOST_LETTERS = 4, 200
_BUSY = 0.25
"""A machine is busy if tasks waited for CPU, disk or memory for at least this share of the run."""


def explain(verdict: VerdictFile, load: MachineLoad | None) -> list[str]:
    """Return the lines about an INCONCLUSIVE verdict; empty for any other.

    Args:
        verdict: the verdict.
        load: how busy this machine was during the run; None: not measured.
    """
    if verdict.verdict is not Verdict.INCONCLUSIVE:
        return []
    undecided = [check for check in verdict.checks if check.verdict is Verdict.INCONCLUSIVE]
    if not undecided:
        return ["not decided: the run as a whole, because nothing was checked", "do: add an [[expect]] or a [[faults]]"]
    # If a fault is not proved, the bounds about faults are undecided, too: the fault is the reason.
    roots = [check for check in undecided if check.name in (_CONTROL, _HEALTH)]
    roots = roots or [check for check in undecided if is_condition(check.name)] or undecided
    names = first_of([check.name for check in undecided], _MOST_NAMES)
    return [
        f"not decided: {names} ({len(undecided)} of {len(verdict.checks)} checks)",
        f"why: {_why(roots)}",
        f"do: {_remedy(roots, load)}",
    ]


def first_reason(text: str) -> str:
    """Return the first clause of a check's detail: a terminal shows it, and the report shows all."""
    clause = re.split(r";\s|\.\s", text, maxsplit=1)[0].strip()
    return clause if len(clause) <= _MOST_LETTERS else clause[: _MOST_LETTERS - 1] + "…"


def _why(roots: Sequence[Check]) -> str:
    reasons = list(dict.fromkeys(first_reason(check.detail) for check in roots if check.detail))
    if not reasons:
        return "the run has no evidence for or against them"
    more = f" (and {len(reasons) - 1} more reasons, in the report)" if len(reasons) > 1 else ""
    return f"{roots[0].name}: {reasons[0]}{more}"


def _remedy(roots: Sequence[Check], load: MachineLoad | None) -> str:
    if any(check.name == _CONTROL for check in roots):
        return "nothing: a control run has no fault, and never passes"
    if busy := _busy_with(load):
        return f"run it again when this machine has less other work ({busy})"
    if any(is_condition(check.name) for check in roots):
        return "read in the report what the fault or the routing scheme lacked, and run it again"
    return "run it again, or with `--until-decided`, which adds runs until all of them together decide"


def _busy_with(load: MachineLoad | None) -> str:
    shares = {} if load is None else {"CPU": load.cpu, "disk": load.io, "memory": load.memory}
    known = {name: share for name, share in shares.items() if share is not None and share >= _BUSY}
    return ", ".join(f"tasks waited for {name} {100 * share:.0f} % of the time" for name, share in known.items())
