"""Reads of training data beside checkpoints: which they are, the ratio of their percentiles, and its interval."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_run import changed, reread, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.analysis.ranks.storage_reads import reads_of
from faultbed.harness.record.evidence.workload_evidence import Iteration, RankSeries, ReaderRun

MS = 1_000_000


def rank(reads_ms, *, number=0, stored_ms=(), length_ms=100):
    """Return a rank whose read of iteration i takes `reads_ms[i]`, from the start of iteration i - 1 on."""
    steps = tuple(
        Iteration(
            index=index,
            start_ns=index * length_ms * MS,
            compute_ns=length_ms * MS,
            comm_ns=0,
            wait_ns=0,
            read_from_ns=-length_ms * MS,
            read_ns=round(read_ms * MS),
        )
        for index, read_ms in enumerate(reads_ms)
    )
    stored_ns = tuple((start * MS, end * MS) for start, end in stored_ms)
    return RankSeries(rank=number, iterations=steps, stored_ns=stored_ns)


def test_read_counts_as_beside_checkpoints_of_any_rank_if_they_overlap():
    """The read of iteration 3 lasts from 200 to 250 ms; a checkpoint that begins at its end is not beside it."""
    reader = rank([50, 50, 50, 50, 50])
    storing = rank([], number=1, stored_ms=[(240, 245), (150, 200)])
    reads = reads_of([reader, storing])
    assert [len(times) for times in reads.beside] == [1, 0]
    assert [len(times) for times in reads.alone] == [4, 0]
    assert reads_of([reader, rank([], number=1, stored_ms=[(250, 260)])]).p99_ratio is None


def test_p99_ratio_is_that_of_percentiles():
    stored = [(index * 100 - 60, index * 100 - 50) for index in range(100) if index % 2]
    reader = rank([30 if index % 2 else 10 for index in range(100)], stored_ms=[])
    assert reads_of([reader, rank([], number=1, stored_ms=stored)]).p99_ratio is None, "stored after the reads ended"
    stored = [(start - 30, end) for start, end in stored]
    assert reads_of([reader, rank([], number=1, stored_ms=stored)]).p99_ratio == pytest.approx(3.0)


def test_ratio_of_equal_reads_lies_in_its_interval():
    """Reads that checkpoints do not delay: 1 is in the 99 % interval in at least 97 of 100 made-up runs."""
    generator, held, known = np.random.default_rng(7), 0, 0
    stored = [(index * 100 - 95, index * 100 - 5) for index in range(1200) if index % 2]
    for _ in range(100):
        reader = rank(20 + generator.exponential(5, 1200))
        interval = reads_of([reader, rank([], number=1, stored_ms=stored)]).interval()
        known += interval is not None
        held += interval is not None and interval.low <= 1 <= interval.high
    assert known >= 80, "noise that looks dependent by chance gives no interval"
    assert held >= known - 3


def test_interval_of_the_ratio_covers_both_kinds_of_reads_at_the_border_of_a_checkpoint():
    """The clocks of two hosts differ by up to 2 ms: slow reads that end 1 ms before a checkpoint may be beside it."""
    generator = np.random.default_rng(5)
    # A read of iteration i lasts from (i - 1) * 100 ms on; the checkpoint begins 1 ms after its end, or in its middle.
    slow = np.arange(1200) % 4 == 1
    lengths_ms = np.where(slow, 60.0, 20 + generator.exponential(1, 1200))
    stored = [(index * 100 - 39 if slow[index] else index * 100 - 90, index * 100 - 20) for index in range(1, 1200, 2)]
    reader, storing = rank(lengths_ms), rank([], number=1, stored_ms=stored)
    sure, unsure = (reads_of([reader, storing], clock_error_ns=error_ns * MS) for error_ns in (0, 1))
    assert sure.otherwise == ()
    assert len(unsure.otherwise) == 2
    assert unsure.p99_ratio == sure.p99_ratio
    beside, alone = unsure.otherwise
    assert beside.p99_ratio > 2, "the border decides"
    assert alone.p99_ratio < 0.5
    assert beside.interval().low < sure.interval().low
    assert (unsure.interval().low, unsure.interval().high) == (beside.interval().low, sure.interval().high)


def test_few_reads_bound_the_ratio_on_one_side_at_most():
    reader = rank(20 + np.random.default_rng(3).exponential(5, 60))
    stored = [(index * 100 - 95, index * 100 - 5) for index in range(60) if index % 2]
    interval = reads_of([reader, rank([], number=1, stored_ms=stored)]).interval()
    assert interval is None or interval.high == float("inf")


@pytest.mark.parametrize(
    ("series", "words"),
    [
        ([rank([0, 0])], "the job reads no data from storage"),
        ([rank([5, 5])], "none of 2 reads was beside a checkpoint"),
        ([rank([5, 5], stored_ms=[(-200, 500)])], "each of 2 reads was beside a checkpoint"),
    ],
)
def test_metric_says_why_it_has_no_value(series, words):
    run = changed(synthetic_run(fired=False), series=tuple(series))
    observed = observe(run).metrics["ingest.p99_ratio"]
    assert observed.value is None
    assert words in observed.detail


def readers_run(*readers, stored_ms=((100, 200),)):
    """Return a run whose ranks' own reads would give no ratio, with readers beside it."""
    storing = rank([0] * 5, stored_ms=stored_ms)
    return changed(synthetic_run(fired=False), ranks=(), series=(storing,), readers=readers, t0_ns=0, end_ns=1000 * MS)


def reader(*reads_ms, host="host4", failure=None):
    reads = tuple((planned * MS, begin * MS, end * MS) for planned, begin, end in reads_ms)
    return ReaderRun(host=host, reads_ns=reads, failure=failure)


def test_with_readers_only_their_reads_count_from_the_time_of_their_plan():
    """The third read is planned beside the checkpoint and begins after it."""
    run = readers_run(reader((0, 5, 10), (50, 50, 60), (190, 210, 220), (300, 300, 310)))
    observed = observe(run).metrics["ingest.p99_ratio"]
    assert observed.value == pytest.approx(3.0)
    assert observed.detail.startswith("of 1 reads beside checkpoints and 3 others by host4")


@pytest.mark.parametrize(("others", "ratio"), [(40, None), (120, pytest.approx(25.0, rel=0.5))])
def test_ratio_to_the_backlog_after_a_checkpoint_is_no_value(others, ratio):
    """One read waited for a connection, until after the checkpoint: of 40 others it is their 99th percentile."""
    quick = [(300 + 10 * number, 300 + 10 * number, 305 + 10 * number) for number in range(others)]
    run = readers_run(reader((50, 50, 175), (201, 215, 220), *quick))
    observed = observe(run).metrics["ingest.p99_ratio"]
    assert observed.value == ratio
    if ratio is None:
        assert "1 of 41 reads by host4 without a checkpoint beside them began late" in observed.detail


def test_recorded_reads_give_the_same_ratio_again():
    run = readers_run(reader((0, 5, 10), (190, 210, 220)))
    again = reread(changed(run, ranks=synthetic_run(fired=False).workload.ranks[:1]))
    assert again.workload.readers == run.workload.readers
    assert observe(again).metrics["ingest.p99_ratio"].value == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("readers", "words"),
    [
        ([reader()], "no data was read by host4"),
        ([reader((300, 300, 310))], "none of 1 reads by host4 was beside a checkpoint"),
        ([reader((150, 150, 160))], "each of 1 reads by host4 was beside a checkpoint"),
        (
            [reader((0, 0, 1), (150, 150, 160)), reader(host="host5", failure="its reader is gone")],
            "reads are missing: host5: its reader is gone",
        ),
    ],
)
def test_metric_of_readers_says_why_it_has_no_value(readers, words):
    run = readers_run(*readers)
    observed = observe(run).metrics["ingest.p99_ratio"]
    assert (observed.value, observed.interval) == (None, None)
    assert words in observed.detail
