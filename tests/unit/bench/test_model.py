"""The model beside recorded results of a packet-level simulator, and the rows of the bench that need no lab."""

import numpy as np
import pytest

from bench.model import bisection, random_mmr
from bench.packet_level import last_flow_s, mean_stretch, read, ring_job_s


@pytest.mark.parametrize("name", ["perm1", "perm4", "incast8", "ring4"])
def test_last_flow_is_within_25_percent_of_the_packet_level_result(name):
    record = read(name)
    assert last_flow_s(record) == pytest.approx(record.seconds.max(), rel=0.25)


@pytest.mark.parametrize("name", ["ar1", "ar4"])
def test_ring_job_is_within_10_percent_of_the_packet_level_result(name):
    record = read(name)
    assert ring_job_s(record) == pytest.approx(record.seconds.max(), rel=0.10)


def test_flows_take_longer_than_max_min_by_head_of_line_blocking():
    assert all(1.05 < mean_stretch(read(name)) < 1.3 for name in ("perm1", "perm4", "ring4"))


def test_mmr_of_a_thousand_random_flows_on_sixteen_links():
    assert random_mmr() == pytest.approx(1.23, abs=0.02)


def test_bisection_rises_with_the_queue_pairs():
    shares = [bisection(qps) for qps in (1, 4, 16)]
    assert shares == sorted(shares)
    assert shares == pytest.approx([0.51, 0.81, 0.95], abs=0.06)
    assert np.isfinite(shares).all()
