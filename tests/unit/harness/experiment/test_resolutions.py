"""Recovery times: noise alone does not make a bound fail, and a real effect still does."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from error_limits import most_errors
from msgspec.structs import replace
from samples import some_of
from synthetic_run import MS, T0, S, Window, _fault, changed, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.bounds import check_expectation
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.ledger.statistics.level_tolerance import DECLARED
from faultbed.harness.record.evidence.workload_evidence import Iteration, RankSeries, Sample
from faultbed.harness.verdict import Verdict

SECONDS = 40
BOUND_S = 2.0


def noisy_run(rng, *, sd, phi, start_s, length_s, share=1.0):
    """A run of one flow with AR(1) noise; the fault leaves `share` of its goodput for as long as it is on."""
    count = SECONDS * 10
    noise = rng.normal(size=count)
    for at in range(1, count):
        noise[at] = phi * noise[at - 1] + np.sqrt(1 - phi**2) * noise[at]
    carried = 1e6 * np.maximum(1 + sd * noise, 0)
    carried[int(start_s * 10) : int((start_s + length_s) * 10)] *= share
    samples = tuple(Sample(T0 + at * 100 * MS, int(value)) for at, value in enumerate(carried))
    fault = _fault(
        "uplink", "link.rate", "rtsw1:ctsw1", Window(start_s, start_s + length_s), length_s, {},
        ("host2:rxe0.rcvd_seq_err", 118, "emulated"), {}, fired=True,
    )  # fmt: skip
    base = synthetic_run()
    series = (RankSeries(rank=0, samples=samples, iterations=()),)
    return changed(
        base, series=series, twin=None, faults=(fault,), end_ns=T0 + SECONDS * S, ranks=base.workload.ranks[:1]
    )


def verdict_of(run, name):
    expectation = Expectation(metric=METRICS[name], maximum=BOUND_S)
    return check_expectation(expectation, observe(run).metrics[name], (), tolerance=DECLARED["rack"])[0].verdict


@pytest.mark.parametrize("name", ["recovery.total", "after_clear.total", "recovery.hold"])
@pytest.mark.parametrize(("sd", "phi"), some_of([(0.2, 0.8), (0.1, 0.5), (0.05, 0.8), (0.2, 0.0)], 2))
def test_recovery_from_a_harmless_fault_fails_no_bound_by_chance(name, sd, phi):
    """Noise alone took goodput below its floor in every second such run, and recovery was "12 s"."""
    rng = np.random.default_rng(5)
    result = Counter(verdict_of(noisy_run(rng, sd=sd, phi=phi, start_s=15, length_s=10), name) for _ in range(60))
    assert result[Verdict.FAIL] <= most_errors(60, 0.005)


@pytest.mark.parametrize(
    ("start_s", "sd", "phi", "share"), [(6, 0.1, 0.5, 0.0), (6, 0.05, 0.0, 0.6), (20, 0.1, 0.5, 0.5)]
)
def test_recovery_from_an_outage_that_is_no_noise_fails_its_bound(start_s, sd, phi, share):
    rng = np.random.default_rng(6)
    actual = [verdict_of(noisy_run(rng, sd=sd, phi=phi, start_s=start_s, length_s=10, share=share), "recovery.total")
             for _ in range(20)]  # fmt: skip
    assert actual.count(Verdict.FAIL) >= 19


def test_recovery_that_is_censored_by_noise_alone_fails_no_bound():
    """The run ends during the fault, so recovery was "at least 12 s", although only noise was below the floor."""
    rng = np.random.default_rng(7)
    runs = [noisy_run(rng, sd=0.1, phi=0.5, start_s=20, length_s=19.5) for _ in range(60)]
    assert all(observe(run).metrics["recovery.total"].censored for run in runs[:5])
    assert Counter(verdict_of(run, "recovery.total") for run in runs) == {Verdict.INCONCLUSIVE: 60}
    dead = noisy_run(rng, sd=0.1, phi=0.5, start_s=20, length_s=19.5, share=0.0)
    assert verdict_of(dead, "recovery.total") is Verdict.FAIL


def test_interval_of_a_recovery_begins_where_goodput_is_no_noise():
    """An RNIC at 70 % with 20 % of noise may have recovered at any time; by the floor it had after 10 s."""
    rng = np.random.default_rng(8)
    recovery = observe(noisy_run(rng, sd=0.2, phi=0.5, start_s=15, length_s=10, share=0.7)).metrics["recovery.total"]
    assert recovery.interval is not None
    assert recovery.interval.low < 1
    assert recovery.interval.high > 9


@pytest.mark.parametrize(("bound", "verdict"), [(0.1, Verdict.INCONCLUSIVE), (1.0, Verdict.PASS)])
def test_recovery_of_zero_may_hide_an_outage_that_is_short_against_the_window(bound, verdict):
    """A job with iterations of 3 s stood still for 0.2 s. Its recovery was exactly 0, and within any bound."""
    run = noisy_run(np.random.default_rng(9), sd=0.02, phi=0.0, start_s=20, length_s=0.2, share=0.0)
    steps = tuple(
        Iteration(index=index, start_ns=T0 + 3 * index * S, compute_ns=S, comm_ns=2 * S, wait_ns=0)
        for index in range(13)
    )
    run = changed(run, series=(replace(run.workload.series[0], iterations=steps),))
    observed = observe(run).metrics["recovery.total"]
    assert (observed.value, observed.censored) == (0, False)
    expectation = Expectation(metric=METRICS["recovery.total"], maximum=bound)
    assert check_expectation(expectation, observed, (), tolerance=DECLARED["rack"])[0].verdict is verdict
