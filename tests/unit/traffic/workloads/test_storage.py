"""Storage: data and checkpoints are verified, checkpoints block by their mode, and the server's end is detected."""

from __future__ import annotations

import errno
import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from local_traffic import LocalLab
from waiting import until

from faultbed.inject.node.actuator import Refused
from faultbed.inject.node.machine.burst import BurstActuator, listening
from faultbed.testbed.errors import CommandFailed, LabError, UsageError
from faultbed.traffic.engine.flight_recorder import standing
from faultbed.traffic.engine.run_results import Checkpoint, Iteration
from faultbed.traffic.node.checkpoints import Checkpoints, name_of
from faultbed.traffic.node.front_end.storage_client import StorageClient
from faultbed.traffic.node.ranks.feed import Feed
from faultbed.traffic.node.storage import blocks, checksum
from faultbed.traffic.workloads import storage_service
from faultbed.traffic.workloads.storage_service import Storage

STATE = b"state of a rank"
OURS = f"of-test-{os.getpid()}"
"""An argument that no other server on this machine has."""


@pytest.fixture
def server(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "faultbed.traffic.node.storage",
         "127.0.0.1", "--keep", str(tmp_path / "job"), "2", OURS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    process.port = json.loads(process.stdout.readline())["port"]
    yield process
    process.stdin.close()
    assert process.wait(timeout=10) in (0, -9), "it ends with its stdin"
    process.stdout.close()


@pytest.fixture
def loop():
    made = selectors.DefaultSelector()

    def served(condition):
        for key, _ in made.select(0.1):
            key.data()
        return condition()

    made.until = lambda condition: until(lambda: condition() or served(condition), every_s=0)
    yield made
    made.close()


def feed_of(server, loop, *, rank=0, ranks=2, **spec):
    actual = {"address": "127.0.0.1", "port": server.port, "ranks": ranks, "ingest_bytes": 0, "checkpoint_bytes": 0}
    stored, trouble = [], []
    actual |= {"every": 2, "mode": "sync", "generation": 0} | spec
    made = Feed(rank, actual, loop, state=lambda: STATE, stored=stored.append, on_error=trouble.append)
    return made, stored, trouble


def test_blocks_have_the_requested_length():
    assert [len(part) for part in blocks(b"x" * 10, 25)] == [10, 10, 5]
    assert blocks(b"x", 0) == []
    assert checksum(blocks(b"abc", 7)) == zlib.crc32(b"abcabca")


def test_storage_get_and_put_transfer_all_bytes(server, loop):
    done, trouble = [], []
    client = StorageClient("127.0.0.1", server.port, loop, trouble.append)
    for size in (1, 70_000, 3_000_000):
        client.get(size, lambda: done.append("got"))
        loop.until(lambda: not client.is_busy)
        client.put(blocks(b"state" * 1000, size), lambda: done.append("put"))
        loop.until(lambda: not client.is_busy)
    assert done == ["got", "put"] * 3
    assert trouble == []
    client.close()


def test_storage_put_with_changed_bytes_reports_a_checksum_mismatch(server, loop):
    trouble = []
    client = StorageClient("127.0.0.1", server.port, loop, trouble.append)
    client._request({"put": 4, "crc": 1}, [memoryview(b"data")], lambda: trouble.append("believed"))
    loop.until(lambda: trouble)
    assert "checksum mismatch" in trouble[0]


@pytest.mark.parametrize("line", [b"nonsense\n", b'{"get": -1}\n', b'{"put": "many"}\n', b"[]\n"])
def test_storage_answers_an_invalid_request_and_serves_others(server, line):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(line)
        assert b"not a request" in client.makefile("rb").readline()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b'{"get": 3}\n')
        assert json.loads(client.makefile("rb").readline())["bytes"] == 3


def test_burst_loads_the_running_storage_server(server):
    """The burst finds the real server by its process, not by its port, and the server handles its writes."""
    fault = BurstActuator(argument=OURS, writers=3, size_bytes=100_000, period_s=0.1)
    assert (server.port in [port for _, port in listening(server.pid)]) and not fault.prepare()["applied"]
    assert fault.read()["server"].endswith(f":{server.port}")
    fault.on()
    try:
        assert fault.read()["applied"]
        until(lambda: fault.hits() >= 6)  # all of them, twice
    finally:
        fault.off()
    assert not fault.read()["applied"]
    done = fault.hits()
    fault.close()
    assert server.poll() is None
    assert fault.hits() == done


def test_burst_without_storage_is_refused():
    with pytest.raises(Refused, match="target the host of the job's storage"):
        BurstActuator(argument="faultbed.traffic.node.nothing", writers=1, size_bytes=1, period_s=1.0).prepare()


def test_storage_that_ends_is_reported_by_name(server, loop):
    feed, _, trouble = feed_of(server, loop, ingest_bytes=1 << 26)
    feed.begin()
    server.kill()
    loop.until(lambda: trouble)
    assert trouble[0].startswith(f"storage 127.0.0.1:{server.port}")


def test_missing_storage_is_reported_with_its_address(loop):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(OSError, match=f"no storage 127.0.0.1:{port}"):
        StorageClient("127.0.0.1", port, loop, lambda _: None)


def test_feed_prefetches_the_next_batch(server, loop):
    feed, _, trouble = feed_of(server, loop, ingest_bytes=200_000)
    began = []
    feed.begin()
    feed.batch(lambda: began.append(1))
    assert began == [], "the first one has to come"
    loop.until(lambda: began)
    assert feed.ingest_ns > 0
    first = feed.read_ns
    loop.until(lambda: not feed._reader.is_busy)
    before_ns = time.monotonic_ns()
    feed.batch(lambda: began.append(2))
    assert began == [1, 2], "this one is there already"
    assert 0 < first[0] < first[1] <= feed.read_ns[0] < feed.read_ns[1] < before_ns, "read ahead, without a wait"
    assert trouble == []
    feed.close()


def test_feed_sync_checkpoint_blocks_the_rank(server, loop):
    feed, stored, _ = feed_of(server, loop, checkpoint_bytes=200_000)
    went_on = []
    feed.checkpoint(0, lambda: went_on.append(0))
    assert went_on == [0], "none is due"
    feed.checkpoint(1, lambda: went_on.append(1))
    assert went_on == [0]
    loop.until(lambda: len(went_on) == 2)
    assert stored[0]["iteration"] == 1
    assert stored[0]["waited_ns"] == feed.checkpoint_ns >= stored[0]["end_ns"] - stored[0]["start_ns"]
    feed.close()


def test_feed_async_checkpoint_blocks_only_the_next_one(server, loop):
    feed, stored, _ = feed_of(server, loop, checkpoint_bytes=500_000, mode="async", every=1)
    went_on = []
    feed.checkpoint(0, lambda: went_on.append(0))
    assert (went_on, stored) == ([0], [])
    feed.checkpoint(1, lambda: went_on.append(1))
    assert went_on == [0], "the one before is not stored yet"
    loop.until(lambda: len(went_on) == 2)
    before_last_ns, settling_ns = feed.checkpoint_ns, time.monotonic_ns()
    settled = []
    feed.settle(lambda: settled.append(True))
    assert settled == []
    loop.until(lambda: settled)
    assert [one["iteration"] for one in stored] == [0, 1]
    assert stored[0]["waited_ns"] < 50_000_000
    at_the_end_ns = stored[1]["waited_ns"] - before_last_ns
    assert 0 < at_the_end_ns <= stored[1]["end_ns"] - settling_ns, "the wait at the end of the job counts as well"
    feed.close()


def test_feed_staggered_checkpoints_alternate_between_ranks(server, loop):
    turns = {}
    for rank in range(4):
        feed, _, _ = feed_of(server, loop, rank=rank, ranks=4, checkpoint_bytes=1, mode="staggered", every=8)
        turns[rank] = [iteration for iteration in range(16) if feed._is_due(iteration)]
        feed.close()
    assert turns == {0: [7, 15], 1: [5, 13], 2: [3, 11], 3: [1, 9]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "later"}, "sync, staggered, async"),
        ({"every": 0}, "interval at least 1 iteration"),
        ({"ingest_bytes": -1}, "must be at least 0"),
        ({"ingest_bytes": 0}, "is not used"),
    ],
)
def test_storage_with_invalid_values_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        storage_service.check(Storage(**{"host": "host4", "ingest_bytes": 1} | changes))


def test_storage_times_cover_all_ranks():
    iterations = [[Iteration(index=0, start_ns=0, end_ns=9, compute_ns=1, comm_ns=1, wait_ns=0, wrong_elements=0,
                             ingest_ns=wait) for wait in (1, 3)] for _ in range(2)]  # fmt: skip
    stored = [
        Checkpoint(rank=rank, iteration=0, start_ns=0, end_ns=10 + rank, waited_ns=5, size_bytes=1) for rank in (0, 1)
    ]
    times = storage_service.times_of(iterations, stored)
    assert (times.ingest_wait_p50_ns, times.checkpoints, times.stored_max_ns) == (2, 2, 11)
    assert storage_service.times_of([], []).checkpoints == 0


def test_rank_waiting_for_storage_reports_it():
    assert standing({"phase": "data", "iteration": 3}) == "iteration 3, waits for data from storage"


def stored_by(server, loop, rank, iteration, state, *, ranks=2, generation=0, **spec):
    """Store a checkpoint of one rank after an iteration."""
    spec = {"checkpoint_bytes": 64, "every": 1, "generation": generation} | spec
    feed, stored, trouble = feed_of(server, loop, rank=rank, ranks=ranks, **spec)
    feed.state = lambda: state
    feed.checkpoint(iteration, lambda: None)
    loop.until(lambda: stored or trouble)
    feed.close()
    assert trouble == []


def newest_of(server):
    server.stdin.write(b'{"do": "newest"}\n')
    server.stdin.flush()
    return json.loads(server.stdout.readline())


def restored_by(server, loop, rank, iterations, generation=0):
    feed, _, trouble = feed_of(server, loop, rank=rank, checkpoint_bytes=64)
    data = []
    feed.restore({"rank": rank, "iterations": iterations, "generation": generation}, data.append)
    loop.until(lambda: data or trouble)
    feed.close()
    return data[0] if data else trouble[0]


def test_newest_set_is_the_last_one_that_all_ranks_have_stored(server, loop):
    assert newest_of(server)["iterations"] is None
    for rank, iteration in ((0, 3), (1, 3), (0, 7)):
        stored_by(server, loop, rank, iteration, f"rank {rank} after {iteration + 1}".encode())
    newest = newest_of(server)
    assert (newest["iterations"], newest["generation"], newest["ranks"]) == (4, 0, 2)
    assert newest["rejected"] == [["g0-rank1-after00000008.checkpoint", "missing: this rank had not stored it"]]
    assert restored_by(server, loop, 1, 4).startswith(b"rank 1 after 4")
    assert "no checkpoint" in restored_by(server, loop, 1, 8)


def test_restored_state_is_followed_by_filler_up_to_the_size_of_the_checkpoint(server, loop):
    stored_by(server, loop, 0, 0, b"x" * 40, ranks=1, checkpoint_bytes=100_000)
    data = restored_by(server, loop, 0, 1)
    assert (len(data), data[:40]) == (100_000, b"x" * 40)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!"), "checksum mismatch"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "it has 59 of 64 bytes"),
        (lambda path: path.write_bytes(b"\0" * 64), "its first line is not that of a checkpoint"),
        (lambda path: path.write_bytes(b"[" * 4000 + b"\n"), "first line is not that of a checkpoint"),
        (lambda path: spoil_header(path, b'"ranks": 2', b'"ranks": 1e999'), "its first line is not that of"),
        (lambda path: spoil_header(path, b'"rank": 1', b'"rank": 1.5'), "line is not that of a checkpoint"),
        (lambda path: spoil_header(path, b'"ranks": 2', b'"ranks": 1'), "foreign: it is of 1 ranks, and its gen"),
        (lambda path: path.rename(f"{path}.unfinished"), "half-written"),
    ],
)
def test_corrupt_or_half_written_checkpoint_is_named_and_the_one_before_is_used(server, loop, tmp_path, spoil, reason):
    for iteration in (1, 3):
        for rank in (0, 1):
            stored_by(server, loop, rank, iteration, b"s")
    name = "g0-rank1-after00000004.checkpoint"
    spoil(tmp_path / "job" / name)
    newest = newest_of(server)
    assert newest["iterations"] == 2
    assert [why for file, why in newest["rejected"] if file == name and reason in why], newest


def spoil_header(path, old, new):
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new, 1))


def test_checkpoints_that_are_not_of_the_job_are_named_and_the_newest_of_the_job_is_used(tmp_path, loop):
    """The newer sets are of another generation, or have fewer or more ranks; each is complete and intact by itself."""
    lab, server = on_this_machine(tmp_path)
    for rank in (0, 1):
        stored_by(server, loop, rank, 0, b"s")
        stored_by(server, loop, rank, 3, b"x", generation=7)
    stored_by(server, loop, 0, 5, b"x", ranks=1)
    for rank in range(3):
        stored_by(server, loop, rank, 7, b"x", ranks=3)
    newest = server.newest({0: 2, 1: 1})
    assert (newest.iterations, newest.generation, newest.ranks) == (1, 0, 2)
    assert dict(newest.rejected) == {
        **{name_of(7, rank, 4): "foreign: the job has no generation 7" for rank in (0, 1)},
        name_of(0, 0, 6): "foreign: it is of 1 ranks, and its generation has 2",
        name_of(0, 1, 6): "missing: this rank had not stored it",
        **{name_of(0, rank, 8): "foreign: it is of 3 ranks, and its generation has 2" for rank in range(3)},
    }
    assert server.newest().iterations == 8
    server.close()
    lab.close()


def test_older_checkpoints_are_removed_and_a_new_generation_replaces_the_old_one(server, loop, tmp_path):
    for iteration in range(4):
        for rank in (0, 1):
            stored_by(server, loop, rank, iteration, b"s")
    names = {path.name for path in (tmp_path / "job").iterdir()}
    assert names == {f"g0-rank{rank}-after{after:08d}.checkpoint" for rank in (0, 1) for after in (3, 4)}
    for iteration in (3, 4):
        stored_by(server, loop, 0, iteration, b"s", ranks=1, generation=1)
    assert {path.name for path in (tmp_path / "job").iterdir()} == {
        f"g1-rank0-after{after:08d}.checkpoint" for after in (4, 5)
    }
    assert newest_of(server)["generation"] == 1


def test_checkpoint_of_no_rank_of_the_job_completes_no_set(server, loop):
    """A foreign checkpoint counted as that of the missing rank, and the complete sets before it were removed."""
    for iteration in (1, 3):
        for rank in (0, 1):
            stored_by(server, loop, rank, iteration, b"s")
    for iteration in (5, 7, 9):
        stored_by(server, loop, 7, iteration, b"x")
        stored_by(server, loop, 0, iteration, b"s")
    assert newest_of(server)["iterations"] == 4


def test_rank_ahead_of_others_keeps_its_part_of_the_newest_complete_checkpoint(server, loop):
    """With `async`, one rank may store several checkpoints before another rank has stored its first."""
    for rank, iterations in ((0, (0, 1)), (1, (0, 1)), (0, (2, 3, 4, 5))):
        for iteration in iterations:
            stored_by(server, loop, rank, iteration, b"s")
    assert newest_of(server)["iterations"] == 2


def test_checkpoints_are_removed_when_the_controller_is_gone(server, loop, tmp_path):
    stored_by(server, loop, 0, 0, b"s")
    server.stdin.close()
    assert server.wait(timeout=10) == 0
    assert not (tmp_path / "job").exists()


def test_next_server_removes_checkpoints_of_a_killed_server_only(server, loop, tmp_path):
    stored_by(server, loop, 0, 0, b"s")

    def other(name):
        argv = [sys.executable, "-m", "faultbed.traffic.node.storage", "127.0.0.1", "--keep", str(tmp_path / name), "2"]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.stdout.readline()
        return process

    killed = other("killed")
    killed.kill()
    killed.wait(timeout=10)
    assert (tmp_path / "killed").exists()
    third = other("third")
    assert {path.name for path in tmp_path.iterdir()} == {"job", "job.lock", "third", "third.lock"}
    third.stdin.close()
    assert third.wait(timeout=10) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"job", "job.lock"}
    killed.stdin.close()
    for process in (killed, third):
        process.stdout.close()


def test_checkpoint_that_ends_early_is_never_published(server, loop, tmp_path):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        fields = {"put": 1000, "crc": 0, "rank": 0, "ranks": 1, "iterations": 1, "generation": 0}
        client.sendall(json.dumps(fields).encode() + b"\nonly this much")
    until(lambda: newest_of(server)["rejected"])
    assert newest_of(server)["iterations"] is None
    assert [path.suffix for path in (tmp_path / "job").iterdir()] == [".unfinished"]


def test_staggered_ranks_store_the_state_after_the_same_iterations(server, loop):
    """Ranks copy their state at the same time and write it at different times."""
    for rank in (0, 1):
        feed, stored, _ = feed_of(server, loop, rank=rank, checkpoint_bytes=64, mode="staggered", every=4)
        at = {}
        feed.state = lambda at=at: b"after %d" % at["iteration"]
        at["iteration"] = 0
        feed.begin()
        for iteration in range(7):
            at["iteration"] = iteration + 1
            went_on = []
            feed.checkpoint(iteration, lambda went_on=went_on: went_on.append(True))
            loop.until(lambda went_on=went_on: went_on)
        feed.close()
        assert [(one["iteration"], one["iterations"]) for one in stored] == ([(3, 4)], [(1, 0), (5, 4)])[rank]
    assert newest_of(server)["iterations"] == 4
    assert {restored_by(server, loop, rank, 4)[:7] for rank in (0, 1)} == {b"after 4"}


def test_checkpoints_of_servers_that_start_together_are_kept(tmp_path):
    """Each server removes leftovers of killed servers, but must not remove a new folder that is not locked yet."""
    start = threading.Barrier(4)

    def serve(number):
        start.wait()
        return [Checkpoints(str(tmp_path / f"job-{number}-{turn}"), keep=2) for turn in range(30)]

    with ThreadPoolExecutor(max_workers=4) as pool:
        made = [one for some in pool.map(serve, range(4)) for one in some]
    assert all((tmp_path / one.folder).is_dir() for one in made)
    for one in made:
        one.remove()
    assert list(tmp_path.iterdir()) == []


def on_this_machine(tmp_path):
    lab = LocalLab(tmp_path)
    return lab, storage_service.serve(lab, "host6", folder=str(tmp_path / "checkpoints"))


def test_late_reply_of_the_storage_is_not_taken_for_that_to_a_later_request(tmp_path, loop):
    lab, server = on_this_machine(tmp_path)
    lab.freeze("host6")
    with pytest.raises(CommandFailed):
        server.newest(timeout_s=0.2)
    lab.thaw("host6")
    stored_by(server, loop, 0, 0, b"s", ranks=1)
    assert server.newest().iterations == 1
    server.close()
    lab.close()


def test_ping_of_the_storage_reads_no_checkpoint_and_notices_its_end(tmp_path, loop):
    lab, server = on_this_machine(tmp_path)
    stored_by(server, loop, 0, 0, b"s", ranks=1)
    (path,) = tmp_path.glob("checkpoints/*/*.checkpoint")
    path.unlink()
    os.mkfifo(path)  # a FIFO blocks its reader until a writer opens it
    server.ping(timeout_s=10)
    lab.kill("host6")
    with pytest.raises(LabError):
        server.ping(timeout_s=10)
    server.close()
    lab.close()


def test_time_to_find_the_newest_set_grows_with_what_is_kept():
    storage = Storage(host="host6", checkpoint_bytes=1 << 30, keep=2)
    small = storage_service.newest_timeout_s(Storage(host="host6", checkpoint_bytes=1), 2)
    assert storage_service.newest_timeout_s(storage, 8) > 8 * (1 << 30) / 5_000_000 > small >= 30


def test_unreadable_checkpoint_is_reported_and_the_previous_one_is_restored(tmp_path, monkeypatch, server, loop):
    """The disk returns errors after the first line of the checkpoint."""
    for iteration in (0, 1):
        stored_by(server, loop, 0, iteration, b"s", ranks=1)
    bad = name_of(0, 0, 2)
    checkpoints = Checkpoints(str(tmp_path / "copy"), keep=2)
    for path in (tmp_path / "job").iterdir():
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    plain = checkpoints.open

    def failing(generation, rank, iterations):
        if name_of(generation, rank, iterations) == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(generation, rank, iterations)

    monkeypatch.setattr(checkpoints, "open", failing)
    newest = checkpoints.newest()
    assert (newest["iterations"], newest["rejected"]) == (1, [[bad, "cannot be read: Input/output error"]])
    checkpoints.remove()


def test_checkpoints_are_removed_also_when_the_server_fails(tmp_path):
    argv = [sys.executable, "-m", "faultbed.traffic.node.storage", "127.0.0.1", "--keep", str(tmp_path / "job"), "2"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    assert (tmp_path / "job").is_dir()
    _, stderr = process.communicate(b"nonsense\n", timeout=20)
    assert (process.returncode, b"JSONDecodeError" in stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_half_written_checkpoint_is_removed_with_the_older_sets(server, loop, tmp_path):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        fields = {"put": 1000, "crc": 0, "rank": 1, "ranks": 2, "iterations": 2, "generation": 0}
        client.sendall(json.dumps(fields).encode() + b"\nonly this much")
    until(lambda: newest_of(server)["rejected"])
    for iteration in (2, 3):
        for rank in (0, 1):
            stored_by(server, loop, rank, iteration, b"s")
    assert newest_of(server)["rejected"] == []
    assert {path.suffix for path in (tmp_path / "job").iterdir()} == {".checkpoint"}


def test_checkpoint_that_does_not_fit_the_disk_is_refused_with_the_reason(server, tmp_path):
    """A client reads the reply only after it has sent all data, so the server must not close the connection earlier."""
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    data = bytes(20_000_000)
    fields = {"put": len(data), "crc": 0, "rank": 0, "ranks": 1, "iterations": 1, "generation": 0}
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client, client.makefile("rb") as file:
        client.sendall(json.dumps(fields).encode() + b"\n" + data)
        assert json.loads(file.readline()) == {"error": "the checkpoint was not stored: File too large"}
        client.sendall(b'{"get": 3}\n')
        assert json.loads(file.readline())["bytes"] == 3
    assert list((tmp_path / "job").iterdir()) == []
    assert newest_of(server)["rejected"] == []


def test_folder_that_cannot_be_removed_keeps_its_lock_file(tmp_path):
    """A file stands in place of the folder, which cannot be removed as one."""
    (tmp_path / "abandoned").write_text("")
    (tmp_path / "abandoned.lock").write_text("")
    checkpoints = Checkpoints(str(tmp_path / "job"), keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"abandoned", "abandoned.lock", "job", "job.lock"}
    (tmp_path / "job").rmdir()
    (tmp_path / "job").write_text("")
    checkpoints.remove()
    assert (tmp_path / "job.lock").exists()
    for name in ("abandoned", "job"):
        (tmp_path / name).unlink()
    Checkpoints(str(tmp_path / "next"), keep=2).remove()
    assert list(tmp_path.iterdir()) == []
