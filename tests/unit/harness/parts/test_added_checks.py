"""The ledger of a run has every row of its verdict, so that its fold is that verdict."""

import pytest
from judged_runs import plan_of
from synthetic_run import synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.judge import judge, with_checks
from faultbed.harness.ledger.ledger import fold
from faultbed.harness.verdict import Check, Verdict, worst


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE])
def test_ledger_with_a_stop_condition_folds_to_the_verdict_of_all_rows(verdict):
    """A run that a stop condition had made FAIL left a ledger that folded to PASS."""
    run = synthetic_run()
    judged = judge(plan=plan_of(run), expectations=(), run=run, observed=observe(run))
    assert fold(judged.ledger) is Verdict.PASS
    stop = Check(name="stop.goodput", verdict=verdict, observed=1.0, bound=2.0, unit="Gb/s", detail="beyond the bound")
    ledger = with_checks(judged.ledger, [stop])
    assert fold(ledger) is worst(check.verdict for check in (*judged.verdict.checks, stop))
