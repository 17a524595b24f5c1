"""What the bench of telemetry counts: samples that are whole inside a span."""

import pytest

from harness.bench.telemetry import goodput_bps
from testbed.errors import LabError
from traffic.results import Sample

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
