"""A small training job on the soft lab: groups beside each other, in phases, every element right."""

import pytest

from traffic import job
from traffic.job import JobPhase, JobSpec
from traffic.plan import QpParams

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts >= 4")]


def test_a_grid_of_two_by_two_computes_and_reduces_along_both_dimensions(lab):
    """Two tensor-parallel groups at once, then two data-parallel ones; each phase has its time in each group."""
    spec = JobSpec(
        grid=(("tp", 2), ("dp", 2)),
        phases=(
            JobPhase(along="tp", collective="all-reduce", size_bytes=1 << 16),
            JobPhase(along="dp", collective="reduce-scatter", size_bytes=1 << 17),
            JobPhase(along="dp", collective="all-gather", size_bytes=1 << 17),
        ),
        iterations=4,
        compute_units=2,
        qp=QpParams(timeout=18),  # patient: on a busy machine a virtual CPU that pauses is not a lost packet
    )
    with job.start(lab, spec) as running:
        result = running.wait(120.0)
    assert result.outcome == "completed", result.where
    assert result.wrong_elements == 0
    assert result.iterations_completed == 4
    assert [(one.phase, one.members) for one in result.groups] == [
        (0, (0, 1)),
        (0, (2, 3)),
        (1, (0, 2)),
        (1, (1, 3)),
        (2, (0, 2)),
        (2, (1, 3)),
    ]
    assert all(one.time_ns > 0 and one.busbw_gbytes_per_s > 0 for one in result.groups)
    for rank in result.iterations:
        for item in rank:
            assert item.compute_ns > 0
            assert item.phases_ns == tuple(sorted(item.phases_ns))
