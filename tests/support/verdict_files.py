"""Verdicts of repeated runs."""

from __future__ import annotations

from faultbed.harness.verdict import Check, Verdict, VerdictFile

PASS, FAIL, ERROR = Verdict.PASS, Verdict.FAIL, Verdict.ERROR


def verdict(seed, *checks, said=PASS, lab_state="CLEAN"):
    made = tuple(Check(name=n, verdict=v, observed=o, bound=b, unit="s") for n, v, o, b in checks)
    return VerdictFile(experiment="x", seed=seed, lab="soft", verdict=said, checks=made, faults=(), lab_state=lab_state)
