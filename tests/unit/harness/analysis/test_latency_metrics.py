"""Percentiles of a flow's timed messages: value, interval, and thinning of very many times."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from synthetic_run import changed, reread, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.bounds import check_expectation
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.ledger.statistics.level_tolerance import DECLARED
from faultbed.harness.record.sweep_file import SweptPoint, SweptValue
from faultbed.harness.record.workload_series import latencies_of
from faultbed.harness.report.sweeps.sweep_text import cell
from faultbed.harness.verdict import Verdict


def observed(*flows):
    return observe(changed(synthetic_run(), latencies_ns=tuple(map(tuple, flows)))).metrics


def timed(times_ns, *, every=1):
    """A flow that kept the time of each `every`-th message."""
    return SimpleNamespace(latencies_ns=times_ns, latencies_every=every)


def times(count, seed=1):
    return [int(time) for time in np.random.default_rng(seed).lognormal(np.log(2e6), 0.3, size=count)]


def test_latency_percentiles_cover_all_timed_messages():
    metrics = observed(times(900), times(900, seed=2))
    every = np.array([*times(900), *times(900, seed=2)]) / 1e9
    for share in (50, 99):
        one = metrics[f"latency.p{share}"]
        assert one.value == pytest.approx(np.percentile(every, share))
        assert one.interval.low < one.value < one.interval.high
        assert one.detail == "of 1800 timed messages of 2 flows"


def test_latency_percentiles_of_thinned_times_count_each_message_alike():
    """Ten of eleven messages took 10 us, so the median is 10 us, however few times of each flow were kept."""
    flows = [timed((10_000,) * 50_000), timed((1_000_000,) * 5_000)]
    kept = latencies_of(SimpleNamespace(flows=flows))
    assert [len(one) for one in kept] == [5_000, 500]
    assert observed(*kept)["latency.p50"].value == 10e-6


def test_latency_percentiles_of_times_that_an_engine_has_thinned_count_each_message_alike():
    """The fast flow's engine kept every 64th of 64,000 messages, the slow one's all of its 2,000: 1 of 33 is slow."""
    kept = latencies_of(SimpleNamespace(flows=[timed((10_000,) * 1_000, every=64), timed((1_000_000,) * 2_000)]))
    assert [len(one) for one in kept] == [1_000, 32]
    assert observed(*kept)["latency.p50"].value == 10e-6


def test_latency_of_bulk_messages_and_of_a_probe_in_one_record_has_no_value():
    """A percentile of both is of neither: with many bulk messages it said nothing of the probe, and the reverse."""
    run = changed(synthetic_run(), latencies_ns=(tuple(times(900)), tuple(times(900, seed=2))))
    both = changed(run, workload={"flow": "write", "latency": True, "probe": True})
    for words in ({"latency": True, "probe": False}, {"latency": False, "probe": True}):
        one = observe(changed(run, workload={"flow": "write", **words})).metrics["latency.p99"]
        assert one.value is not None
        assert one.interval is not None
    mixed = observe(both).metrics["latency.p99"]
    assert (mixed.value, mixed.interval) == (None, None)
    assert "percentiles mean nothing" in mixed.detail


def test_run_without_timed_messages_has_no_percentile():
    one = observed()["latency.p99"]
    assert (one.value, one.interval) == (None, None)
    assert "no flow timed its messages" in one.detail
    check = check_expectation(
        Expectation(metric=METRICS["latency.p99"], maximum=1.0), one, (), tolerance=DECLARED["rack"]
    )[0]
    assert check.verdict is Verdict.INCONCLUSIVE


def test_latency_interval_of_correlated_times_is_wider_or_none():
    """If a flow is slow for a while, many messages in a row are slow: they are not independent samples."""
    free = times(400)
    slow = [int(2e6 + 1e6 * np.sin(n / 40)) for n in range(400)]
    mixed = observed(slow)["latency.p50"].interval
    independent = observed(free)["latency.p50"].interval
    assert mixed is None or mixed.high - mixed.low > independent.high - independent.low


def test_latency_interval_of_flows_through_one_queue_is_no_narrower_than_that_of_one_flow():
    """Eight flows that wait in one queue are slow at the same time: the 99 % interval missed the median in 26 %."""
    queue = times(400)
    together = [
        [time + own % 1000 for time, own in zip(queue, times(400, seed=flow), strict=True)] for flow in range(8)
    ]
    one, eight = (observed(*flows)["latency.p50"].interval for flows in (together[:1], together))
    assert eight.high - eight.low > 0.9 * (one.high - one.low)


def test_latency_interval_needs_enough_messages_of_every_flow():
    assert observed(times(900), [2_000_000] * 3)["latency.p50"].interval is None


def test_latency_many_times_are_thinned_evenly():
    flows = [timed(tuple(range(12_001))), timed(())]
    (kept,) = latencies_of(SimpleNamespace(flows=flows))
    assert kept == tuple(range(0, 12_001, 3))


def test_latency_times_round_trip():
    run = changed(synthetic_run(), latencies_ns=((1, 2), (3,)))
    assert reread(run).workload.latencies_ns == ((1, 2), (3,))


def test_latency_interval_without_an_upper_end_is_reported_as_open():
    value = SweptValue(metric="latency.p99", unit="s", value=0.004, low=0.003)
    point = SweptPoint(number=1, parameters={}, verdict=Verdict.PASS, values=(value,))
    assert cell(point, "latency.p99") == "4 ms (3 ms or more)"
