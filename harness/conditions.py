"""Checks without which no number of a run counts: faults, routing scheme, capacity of the emulation. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from faultbed.harness.verdict import Check, Verdict
from faultbed.testbed.routing.schemes import SCHEMES

__all__ = ["is_condition", "unmet"]

_CONDITIONS = frozenset({"emulation", *(f"routing.{scheme}" for scheme in SCHEMES)})


def is_condition(name: str) -> bool:
    """Return whether a check is such a condition; a metric such as `routing.converged` is not."""
    return name.startswith("fired.") or name in _CONDITIONS


def unmet(checks: Iterable[Check]) -> list[Check]:
    """Return the conditions that are not met."""
    return [check for check in checks if is_condition(check.name) and check.verdict is not Verdict.PASS]
