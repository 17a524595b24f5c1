"""Recovery of many flows: one that stands still is no dip of their goodput, and its outage counts nevertheless."""

from __future__ import annotations

import pytest
from synthetic_run import MS, T0, S, Window, _fault, changed, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.bounds import check_expectation
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.ledger.statistics.level_tolerance import DECLARED
from faultbed.harness.record.evidence.workload_evidence import Rank, RankSeries, Sample
from faultbed.harness.verdict import Verdict

SECONDS, FLOWS = 40, 64


def flows(*faults, silent=(), paced=False):
    """Return a run of 64 flows. The first one carries nothing in these spans (s), and, if `paced`, every other s."""

    def carried(number, at):
        is_off = any(begin <= at / 10 < end for begin, end in silent) or (paced and at % 20 >= 10)
        return 0 if number == 0 and is_off else 1_000_000

    series = tuple(
        RankSeries(
            rank=number,
            samples=tuple(Sample(T0 + at * 100 * MS, carried(number, at)) for at in range(SECONDS * 10)),
            iterations=(),
        )
        for number in range(FLOWS)
    )
    return changed(
        synthetic_run(),
        workload={"flow": "write"},
        series=series,
        ranks=tuple(Rank(rank=number, host=f"host{number}", rnic="mlx5_0") for number in range(FLOWS)),
        twin=None,
        connections=(),
        faults=tuple(
            _fault(
                name, "link.down", "rtsw1:ctsw1", Window(begin, end), end - begin, {},
                ("ctsw1:rtsw1.carrier_down_count", 1, "emulated"), {}, fired=True,
            )
            for name, begin, end in faults
        ),
        end_ns=T0 + SECONDS * S,
    )  # fmt: skip


def test_flow_that_stands_still_among_many_is_not_recovered_until_it_carries_data_again():
    """Its 1.6 % of the goodput is no dip: recovery was 0 s, for an outage of 15 s, and passed any bound."""
    seen = observe(flows(("first", 15, 17), silent=[(15, 30)])).metrics
    assert (seen["recovery.first"].value, seen["recovery.first"].censored) == (pytest.approx(15.0), False)
    assert seen["after_clear.first"].value == pytest.approx(13.0)
    expectation = Expectation(metric=METRICS["recovery.total"], maximum=8.0)
    assert (
        check_expectation(expectation, seen["recovery.total"], (), tolerance=DECLARED["rack"])[0].verdict
        is Verdict.FAIL
    )


def test_flow_that_never_carries_data_again_makes_recovery_a_lower_bound():
    recovery = observe(flows(("first", 15, 17), silent=[(15, SECONDS)])).metrics["recovery.first"]
    assert recovery.censored
    assert recovery.value == pytest.approx(SECONDS - 15)
    assert "host0:mlx5_0 carried nothing for 25 s, and still nothing when the data end" in recovery.detail


@pytest.mark.parametrize("silent", [(), [(15, 15.9)], [(19, 25)], [(10, 14)]])
def test_recovery_counts_no_silence_that_is_short_or_began_at_another_time(silent):
    recovery = observe(flows(("first", 15, 17), silent=silent)).metrics["recovery.first"]
    assert (recovery.value, recovery.censored) == (0, False)


def test_recovery_counts_no_silence_that_is_usual_for_a_paced_flow():
    assert observe(flows(("first", 15, 17), paced=True)).impacts["first"].recovery_ns == 0


def test_silence_under_two_faults_is_assigned_to_neither():
    seen = observe(flows(("first", 15, 16), ("second", 16.5, 18), silent=[(16.6, 30)])).metrics
    for name, other in (("first", "second"), ("second", "first")):
        recovery = seen[f"recovery.{name}"]
        assert (recovery.value, recovery.censored) == (0, True)
        assert f"perhaps because of {other}" in recovery.detail
