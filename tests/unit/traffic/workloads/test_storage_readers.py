"""Readers beside a job: planned times, slow storage, and what becomes of them at every end. Real processes."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from local_traffic import LocalLab
from waiting import until, wait_s

from faultbed.testbed.errors import FaultbedError, UsageError
from faultbed.traffic.engine.run_results import Window
from faultbed.traffic.workloads import job, storage_readers, storage_service
from faultbed.traffic.workloads.job import JobPhase, JobSpec
from faultbed.traffic.workloads.storage_service import Storage

MS = 1_000_000
STORAGE = Storage(
    host="host6", ingest_bytes=100_000, checkpoint_bytes=1 << 15, every=20, readers=("host5",), read_every_ns=20 * MS
)
SPEC = JobSpec(
    grid=(("dp", 2),),
    phases=(JobPhase(along="dp", collective="all-reduce", size_bytes=1 << 14),),
    ranks=("host1:rxe0", "host2:rxe0"),
    iterations=300,
    storage=STORAGE,
    peer_deadline_s=180.0,
    op_deadline_s=180.0,
)
EVER = Window(start_ns=0, end_ns=1 << 62)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    plain = storage_service.serve
    monkeypatch.setattr(storage_service, "serve", lambda *args, **more: plain(*args, **more, folder=str(tmp_path)))
    made = LocalLab(tmp_path)
    yield made
    made.close()


@pytest.fixture
def server(lab):
    made = storage_service.serve(lab, STORAGE.host)
    yield made
    made.close()


@pytest.fixture
def readers(lab, server):
    made = storage_readers.start(lab, STORAGE, server, ())
    yield made
    made.close()


def test_reads_are_planned_at_equal_distances_and_reported_in_controller_time(readers):
    before_ns = time.monotonic_ns()
    readers.begin()
    wait_s(0.5)
    (result,) = readers.results(EVER)
    assert (result.host, result.failure) == ("host5", None)
    planned = sorted(read[0] for read in result.reads)
    assert len(planned) >= 10
    assert {later - earlier for earlier, later in pairwise(planned)} == {STORAGE.read_every_ns}
    assert all(planned_ns <= begin_ns < end_ns for planned_ns, begin_ns, end_ns in result.reads)
    assert before_ns - 50 * MS < planned[0] < max(end_ns for *_, end_ns in result.reads) < time.monotonic_ns() + 50 * MS
    assert set(readers.clock_error_ns) == {"host5"}


def test_storage_that_stands_still_hides_no_read(lab, readers):
    """All reads that were planned meanwhile are made, and their times count from their plans (an open loop)."""
    readers.begin()
    wait_s(0.2)
    lab.freeze("host6")
    stopped_ns = time.monotonic_ns()
    wait_s(1.0)
    lab.thaw("host6")
    resumed_ns = time.monotonic_ns()
    (result,) = readers.results(EVER)
    assert result.failure is None
    planned = sorted(read[0] for read in result.reads)
    assert {later - earlier for earlier, later in pairwise(planned)} == {STORAGE.read_every_ns}
    meanwhile = [read for read in result.reads if stopped_ns + 50 * MS < read[0] < resumed_ns - 50 * MS]
    assert len(meanwhile) >= 40
    assert all(end_ns > resumed_ns - 50 * MS for *_, end_ns in meanwhile)
    assert max(begin_ns - planned_ns for planned_ns, begin_ns, _ in meanwhile) > 500 * MS, "all connections were busy"


def test_only_reads_planned_within_the_window_count(readers):
    readers.begin()
    wait_s(0.2)
    begin_ns = time.monotonic_ns()
    wait_s(0.2)
    window = Window(start_ns=begin_ns, end_ns=begin_ns + 100 * MS)
    (result,) = readers.results(window)
    assert 1 <= len(result.reads) <= 6
    assert all(window.start_ns <= planned_ns <= window.end_ns for planned_ns, *_ in result.reads)


def test_reader_that_dies_is_reported_by_name(lab, readers):
    readers.begin()
    lab.kill("host5")
    assert readers.results(EVER) == (storage_readers.ReaderResult(host="host5", failure="its reader is gone"),)


def test_reader_that_stands_still_is_reported_by_name(lab, readers, monkeypatch):
    monkeypatch.setattr(storage_readers, "END_TIMEOUT_S", 0.3)
    readers.begin()
    lab.freeze("host5")
    (result,) = readers.results(EVER)
    assert result.failure == "its reads were not over 0.3 s after the job"
    lab.thaw("host5")


def test_storage_that_dies_fails_the_reads(lab, server, readers):
    readers.begin()
    wait_s(0.1)
    lab.kill("host6")
    wait_s(0.1)
    (result,) = readers.results(EVER)
    assert f"storage 127.0.0.1:{server.port}" in result.failure


def test_reader_without_storage_reports_it(lab, server):
    lab.kill("host6")
    until(lambda: not lab.engines_of("host6"))
    readers = storage_readers.start(lab, STORAGE, server, ())
    readers.begin()
    (result,) = readers.results(EVER)
    assert f"no storage 127.0.0.1:{server.port}" in result.failure
    readers.close()


def test_reader_ends_with_its_channel(lab, readers):
    readers.begin()
    for channel in lab.channels:
        if "reader" in channel.what:
            channel.close()
    until(lambda: not lab.engines_of("host5"))


@pytest.mark.parametrize("lost", [None, "host5"])
def test_job_ends_alike_with_its_reader_and_without(lab, lost):
    with job.start(lab, SPEC) as running:
        if lost is not None:
            lab.kill(lost)
        result = running.wait(180.0)
    assert (result.outcome, result.iterations_completed, result.wrong_elements) == ("completed", 300, 0)
    (reader,) = result.readers
    assert reader.failure == (None if lost is None else "its reader is gone")
    if lost is None:
        assert set(result.clock_error_ns) == {"host1", "host2", "host5"}
        assert reader.reads
        assert all(result.window.start_ns <= read[0] <= result.window.end_ns for read in reader.reads)
    until(lambda: not lab.engines_of("host5"))


def test_reader_ends_with_a_job_that_does_not_start(lab):
    lab.dead.add("host2")
    with pytest.raises(FaultbedError):
        job.start(lab, SPEC)
    until(lambda: not lab.engines_of("host5") and not lab.engines_of("host6"))


@pytest.mark.parametrize(
    ("readers", "message"),
    [
        (("host9",), 'no host "host9" to read on; choose one of host1'),
        (("host5:rxe0",), 'no host "host5:rxe0" to read on'),
        (("host1",), "host1 cannot be a reader: it has a rank"),
        (("host[-1]",), "host6 cannot be a reader: it serves the storage"),
        (("host5", "host[4]"), "host5 is named twice"),
    ],
)
def test_reader_on_a_host_with_a_part_in_the_job_is_refused(lab, readers, message):
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        job.fit(lab, replace(SPEC, storage=replace(STORAGE, readers=readers)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ingest_bytes": 0}, "the readers host5 have nothing to read; give a size for ingest"),
        ({"read_every_ns": 1}, "at most once every 10 ms, got 1e-06 ms"),
    ],
)
def test_readers_that_could_not_read_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        storage_service.check(replace(STORAGE, **changes))
