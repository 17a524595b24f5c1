"""Workers on this machine with tasks that sleep: deaths, refused connections, and what is left afterwards."""

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import cloudpickle
import pytest
from house import HOUSE
from waiting import until

from faultbed.harness.run.workers.local_workers import LocalWorkers
from faultbed.harness.run.workers.worker_pool import Ended, OwnPool
from faultbed.testbed.errors import LabError, UsageError

pytestmark = pytest.mark.process
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def local(count, home, progress):
    return OwnPool(LocalWorkers(count=count, home=home, inventory=None), progress)


def pids(pool):
    return [worker.process.pid for worker in pool.workers]


@pytest.fixture
def pool(tmp_path):
    lines = []
    before = frozenset(listeners(os.getpid()))
    with local(2, tmp_path / "workers", lines.append) as started:
        started.lines, started.listened_before = lines, before
        yield started


def publish_once(folder, number, delay_s):
    """A run in short: look for the key, work in a folder of its own, publish by a rename that one attempt wins."""
    published = folder / f"key-{number}"
    if published.exists():
        return published
    own = folder / f"own-{number}-{os.getpid()}-{time.monotonic_ns()}"
    own.mkdir()
    (own / "result").write_text(str(number))
    time.sleep(delay_s)
    try:
        own.rename(published)
    except OSError:
        (own / "result").unlink()
        own.rmdir()
    return published


def working(folder):
    return sorted(path for path in folder.iterdir() if path.name.startswith("own-"))


def test_results_come_back_and_an_error_is_of_its_task_only(pool):
    def work(number):
        if number == 2:
            raise OSError(28, "No space left on device")
        return number * 10, os.environ["FAULTBED_HOME"]

    results = dict(pool.map(work, [1, 2, 3, 4]))
    assert [results[number][0] for number in (1, 3, 4)] == [10, 30, 40]
    assert isinstance(results[2], OSError)
    homes = {results[number][1] for number in (1, 3, 4)}
    assert homes <= {str(path) for path in Path(next(iter(homes))).parent.iterdir()}


def test_tasks_of_workers_that_are_killed_are_made_again_and_published_once(pool, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    ended = threading.Event()

    def kill_some():
        for _ in range(6):
            if ended.wait(0.7):
                return
            running = pids(pool)
            os.kill(running[len(working(folder)) % len(running)], signal.SIGKILL)

    killer = threading.Thread(target=kill_some)
    killer.start()
    results = list(pool.map(lambda number: publish_once(folder, number, 0.3), range(20)))
    ended.set()
    killer.join()
    assert sorted(path.name for _, path in results) == sorted(f"key-{number}" for number in range(20))
    assert any("killed by signal 9" in line for line in pool.lines)
    assert len([path for path in folder.iterdir() if path.name.startswith("key-")]) == 20


def test_workers_end_with_the_pool(tmp_path):
    with local(2, tmp_path, print) as pool:
        assert [result for _, result in pool.map(abs, [-1])] == [1]
        started = pids(pool)
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_connection_without_the_certificate_of_the_pool_is_refused(pool):
    host, port = pool.address.removeprefix("tls://").split(":")
    list(pool.map(abs, [1]))
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port)), timeout=10) as plain:
        plain.sendall(b"\0" * 64)
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(64)[:1] in (b"", b"\x15"), "a TLS alert, or the end"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    raw = socket.create_connection((host, int(port)), timeout=10)
    with raw, pytest.raises((ssl.SSLError, ConnectionError)), context.wrap_socket(raw) as tls:
        tls.sendall(b"x")
        if not tls.recv(1):
            raise ConnectionResetError


def test_workers_and_scheduler_listen_on_loopback_alone_and_serve_no_page(pool):
    list(pool.map(abs, [1]))  # one worker is there now; the other one may still be starting
    deadline_s = time.monotonic() + 60.0
    listening = set()
    while len(listening) < 3 and time.monotonic() < deadline_s:
        # Other tests of this process may have listened before: the scheduler of an earlier pool, which still closes.
        listening = {address for pid in (os.getpid(), *pids(pool)) for address in listeners(pid)} - pool.listened_before
        time.sleep(0.1)
    assert len(listening) == 3, "the scheduler and two workers"
    assert {address for address, _ in listening} == {"0100007F"}


def listeners(pid):
    """Return the local addresses on which a process listens (proc(5), /proc/net/tcp, state 0A)."""
    sockets = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    inodes = {name.removeprefix("socket:[").removesuffix("]") for name in sockets if name.startswith("socket:")}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                yield tuple(fields[1].split(":"))


def test_secret_of_the_environment_is_in_no_file_of_the_workers(monkeypatch, tmp_path):
    monkeypatch.setenv("CANARY", "canary-5d41402a")
    with local(1, tmp_path, print) as pool:
        list(pool.map(abs, [1]))
        key = pool._channel.key
        words = Path(f"/proc/{pids(pool)[0]}/cmdline").read_bytes()
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert contents
    for secret in (b"canary-5d41402a", key.encode()[30:80]):
        assert not any(secret in content for content in (*contents, words))


def test_two_workers_with_one_home_are_refused(pool, tmp_path):
    list(pool.map(abs, [1, 2]))
    message = "another worker has this folder"
    second = local(1, tmp_path / "workers", print)
    with pytest.raises(UsageError, match=message), second:
        list(second.map(abs, [1]))
    assert [result for _, result in pool.map(abs, [-2])] == [2]


class Dying:
    """A launcher whose workers are dead when they are looked at, as if the kernel had killed them for memory."""

    count, host = 2, "127.0.0.1"

    def __init__(self):
        self.started = 0

    def start(self, _number, _channel):
        self.started += 1
        return self

    def ended(self):
        return Ended(killed=True, code=-9, why="killed by signal 9")

    def request_end(self):
        pass

    def join(self, _timeout_s):
        pass


def test_workers_that_die_before_any_result_are_given_up():
    dying = Dying()
    with OwnPool(dying, lambda _: None) as pool, pytest.raises(LabError, match="killed by signal 9"):
        list(pool.map(abs, [1]))
    assert dying.started == 2 + 20


_COMMAND = """
import sys, time
from pathlib import Path
from faultbed.harness.run.workers.local_workers import LocalWorkers
from faultbed.harness.run.workers.worker_pool import OwnPool
with OwnPool(LocalWorkers(count=1, home=Path(sys.argv[1]), inventory=None), print) as pool:
    list(pool.map(abs, [1]))
    print(*(worker.process.pid for worker in pool.workers), flush=True)
    time.sleep(600)
"""


def test_worker_ends_when_the_command_that_started_it_is_killed(tmp_path):
    command = [sys.executable, "-c", _COMMAND, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=HOUSE) as process:
        worker = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 120
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


_MAKE = """
import os, sys, time
from pathlib import Path
from faultbed.harness.run.workers.local_workers import LocalWorkers
from faultbed.harness.run.workers.worker_pool import OwnPool
folder = Path(sys.argv[1])
def make(number):
    if not (folder / f"key-{number}").exists():
        (folder / f"start-{number}-{os.getpid()}").touch()
        time.sleep(1)
        (folder / f"key-{number}").touch()
    return number
with OwnPool(LocalWorkers(count=1, home=folder / "workers", inventory=None), print) as pool:
    print(len(list(pool.map(make, range(5)))))
"""


def test_command_that_was_killed_goes_on_and_repeats_only_what_was_in_progress(tmp_path):
    command = [sys.executable, "-c", _MAKE, str(tmp_path)]
    with subprocess.Popen(command, cwd=HOUSE) as killed:
        until((tmp_path / "key-1").exists, within_s=300)
        killed.kill()
    before = sorted(tmp_path.glob("key-*"))
    done = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.split()[-1] == "5"
    starts = Counter(path.name.split("-")[1] for path in tmp_path.glob("start-*"))
    assert {path.name.split("-")[1] for path in before} <= {number for number, count in starts.items() if count == 1}
    assert sum(starts.values()) <= 5 + 1
