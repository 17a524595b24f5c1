"""The bench of telemetry: it counts CPU time and the samples that lie wholly inside a span; when its goal is
decided."""

import pytest

from bench.rows import MISSED, OPEN, REACHED, decided
from bench.telemetry import goodput_bps
from faultbed.harness.confidence import Interval
from faultbed.testbed.errors import LabError
from faultbed.traffic.engine.run_results import Sample

S = 10**9


def samples(*sizes):
    return [
        Sample(endpoint="host1:rxe0", start_ns=number * S, duration_ns=S, size_bytes=size)
        for number, size in enumerate(sizes)
    ]


def test_goodput_excludes_samples_cut_by_the_span():
    """Only the middle two of four samples lie inside the span: 250 bytes in 2 s."""
    assert goodput_bps(samples(9, 100, 150, 9), (S // 2, 3 * S)) == pytest.approx(1000)


def test_goodput_span_without_samples_is_an_error():
    with pytest.raises(LabError, match="no sample"):
        goodput_bps(samples(1, 1), (5 * S, 6 * S))


@pytest.mark.parametrize(
    ("low", "high", "decision"),
    [(0.99, 1.1, REACHED), (0.95, 1.1, OPEN), (0.95, 0.98, MISSED), (0.95, 0.99, OPEN)],
)
def test_goal_is_decided_when_the_whole_interval_is_on_one_side(low, high, decision):
    assert decided(Interval(low=low, high=high, method="exact"), least=0.99) == decision
    assert decided(Interval(low=-high, high=-low, method="exact"), most=-0.99) == decision
