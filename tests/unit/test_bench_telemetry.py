"""What the bench of telemetry counts, samples that are whole inside a span and CPU time, and when it is decided."""

import os
import time

import pytest

from bench.rows import MISSED, OPEN, REACHED, decided
from bench.telemetry import cpu_s, goodput_bps
from harness.confidence import Interval
from testbed.errors import LabError
from traffic.engine.run_results import Sample

S = 10**9


def samples(*sizes):
    return [
        Sample(endpoint="host1:rxe0", start_ns=number * S, duration_ns=S, size_bytes=size)
        for number, size in enumerate(sizes)
    ]


def test_what_is_cut_by_the_ends_of_a_span_does_not_count():
    """Of four samples the middle two are inside: 250 bytes in 2 s."""
    assert goodput_bps(samples(9, 100, 150, 9), (S // 2, 3 * S)) == pytest.approx(1000)


def test_a_span_without_samples_is_an_error_and_no_zero():
    with pytest.raises(LabError, match="no samples"):
        goodput_bps(samples(1, 1), (5 * S, 6 * S))


def test_cpu_time_is_what_the_kernel_has_counted_for_all_of_the_processes():
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    own = cpu_s([os.getpid()])
    assert own == pytest.approx(time.process_time(), abs=0.05)
    assert cpu_s([os.getpid(), os.getpid()]) == pytest.approx(2 * own, abs=0.05)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.99, 1.1, REACHED), (0.95, 1.1, OPEN), (0.95, 0.98, MISSED), (0.95, 0.99, OPEN)],
)
def test_an_interval_decides_when_all_of_it_is_on_one_side_of_the_goal(low, high, said):
    assert decided(Interval(low=low, high=high, method="exact"), least=0.99) == said
    assert decided(Interval(low=-high, high=-low, method="exact"), most=-0.99) == said
