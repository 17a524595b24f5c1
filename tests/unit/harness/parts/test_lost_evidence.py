"""Losing evidence only loses knowledge: each claim keeps its status or becomes unknown."""

import pytest
from lost_evidence import files_of, gained, ledger_of, mutations
from recorded_runs import RUNS

from faultbed.harness.ledger.claims import Broken, Holds, Unknown
from faultbed.harness.ledger.ledger import fold
from faultbed.harness.verdict import Verdict

CHOSEN = (
    "collective",
    "stopped",
    "wrong twin",
    "wrong flows",
    "restarts",
    "bystander",
    "captured",
    "overloaded",
    "carried",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_run_that_lost_evidence_knows_nothing_else(name):
    whole = ledger_of(RUNS[name], files_of(RUNS[name]))
    violations = {}
    for mutation, lost in mutations(RUNS[name]):
        less = ledger_of(RUNS[name], lost)
        if wrong := gained(whole.statuses, less.statuses):
            violations[mutation] = wrong
        assert fold(less) is not Verdict.PASS or fold(whole) is Verdict.PASS, mutation
    assert violations == {}


def test_gained_names_claims_that_changed_or_vanished():
    holds, broken, unknown = Holds(), Broken(because="b"), Unknown(reasons=())
    whole = {"a": holds, "b": broken, "c": unknown, "d": holds, "e": unknown}
    assert gained(whole, {"a": unknown, "b": broken, "c": unknown, "d": holds, "e": unknown}) == []
    assert gained(whole, {"a": broken, "b": holds, "c": holds, "d": holds}) == ["a", "b", "c", "e"]
    assert gained({"a": holds}, {}) == ["a"]
