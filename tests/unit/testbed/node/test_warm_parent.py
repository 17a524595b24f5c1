"""Programs that are forked from a warm parent behave as programs that are started by an interpreter of their own.

The archive is a folder with the product's warm parent and one program, which describes itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

ROOT = Path(__file__).resolve().parents[4]
SUBJECT = """
import atexit, json, os, random, sys, threading
import numpy.random

SIGNALS = ("SigPnd", "SigBlk", "SigIgn", "SigCgt")

def open_files():
    return sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))

def read(name):
    with open(f"/proc/self/{name}", "rb") as file:
        return file.read().decode()

def describe():
    return {
        "argv": sys.argv, "name": __name__, "main": sys.modules["__main__"].__dict__ is globals(),
        "package": __package__, "cmdline": read("cmdline"), "comm": read("comm"), "cgroup": read("cgroup"),
        "oom": read("oom_score_adj"), "limits": read("limits"), "files": open_files(),
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")},
        "environment": dict(os.environ), "folder": os.getcwd(), "path": sys.path[1:], "umask": os.umask(0o22),
        "leads_session": os.getsid(0) == os.getpid(), "leads_group": os.getpgid(0) == os.getpid(),
        "scheduler": os.sched_getscheduler(0), "nice": os.nice(0), "threads": threading.active_count(),
        # Of the signals, numpy's threads catch one of the C library (from 32 on), and a fork has no such threads.
        "signals": [int(line.split()[1], 16) % 2**31 for line in read("status").splitlines() if line[:6] in SIGNALS],
        "encodings": [getattr(sys, name).encoding for name in ("stdin", "stdout", "stderr")],
        "buffers": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    }

def main():
    atexit.register(lambda: os.write(1, b"atexit\\n"))
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "describe": print(json.dumps(describe()), flush=True)
        elif word == "random": print(json.dumps([random.random(), numpy.random.random()]), flush=True)
        elif word == "stderr": print(rest, file=sys.stderr, flush=True)
        elif word == "exit": sys.exit(int(rest))
        elif word == "kill": os.kill(os.getpid(), int(rest))
        elif word == "raise": raise ValueError(rest)
        elif word == "print": print(rest)
        elif word == "exec": exec(rest)
    print("end of file", flush=True)
    sys.exit(3)

if __name__ == "__main__":
    main()
"""
PROGRAM = "faultbed.testbed.node.subject"


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archives") / "0123456789abcdef"
    node = folder / "faultbed" / "testbed" / "node"
    shutil.copytree(ROOT / "testbed" / "node" / "warm", node / "warm")
    for package in (node, node.parent, node.parent.parent):
        (package / "__init__.py").write_text("")
    (node / "subject.py").write_text(SUBJECT)
    return folder


def start_parent(archive, folder):
    """Return what the warm parent reports. A fork's program is `python3`, as on nodes, whatever runs this test."""
    started = subprocess.run(
        ["python3", "-m", "faultbed.testbed.node.warm.warm_parent", str(folder)],
        capture_output=True, text=True, timeout=60, check=True, env=environment(archive), cwd="/",
        start_new_session=True,
    )  # fmt: skip
    return json.loads(started.stdout)


def environment(archive):
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(archive),
        "LC_ALL": "C.UTF-8",
    }


@pytest.fixture(scope="module")
def parent(archive, tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm")
    reported = start_parent(archive, folder)
    yield folder / archive.name, reported
    os.kill(reported["pid"], signal.SIGKILL)


@pytest.fixture(autouse=True)
def _closed(monkeypatch):
    """Close all sockets that a test has opened, and wait for its processes, which end at the end of their stdin."""
    opened = []
    monkeypatch.setattr(Streams, "opened", opened)
    yield
    for each in opened:
        each.close()
    for process in [each.process for each in opened if isinstance(each, Streams) and each.process is not None]:
        process.wait(30)


class Streams:
    """A program's stdin, stdout and stderr; `end` returns how it ended."""

    opened: ClassVar[list] = []

    def __init__(self, stdin, stdout, stderr, process=None):
        self.stdin, self.stdout, self.stderr, self.process = stdin, stdout, stderr, process
        self.lines = stdout.makefile("rb")
        for stream in (stdin, stdout, stderr):
            stream.settimeout(30)
        self.opened.append(self)

    def close(self):
        for stream in (self.lines, self.stdin, self.stdout, self.stderr):
            stream.close()

    def ask(self, line):
        self.send(line)
        return json.loads(self.lines.readline())

    def send(self, line):
        self.stdin.sendall(line.encode() + b"\n")

    def end(self):
        """Return stdout from now on, stderr, and the exit code (negative: the signal)."""
        stdout = self.lines.read()
        stderr = b"".join(iter(lambda: self.stderr.recv(65536), b""))
        if self.process is not None:
            return stdout, stderr, self.process.wait(30)
        stderr, _, ended = stderr[:-1].rpartition(b"\n")
        what, number = ended.removeprefix(b"ended: ").split()
        return stdout, stderr + b"\n" if stderr else b"", int(number) if what == b"code" else -int(number)


def by_interpreter(archive, *words):
    """Start a program as the SSH server does: in a session of its own, with a stream each."""
    pairs = [socket.socketpair() for _ in range(3)]
    process = subprocess.Popen(
        ["python3", "-m", PROGRAM, *words],
        **dict(zip(("stdin", "stdout", "stderr"), (theirs for _, theirs in pairs), strict=True)),
        env=environment(archive), cwd="/", start_new_session=True,
    )  # fmt: skip
    for _, theirs in pairs:
        theirs.close()
    return Streams(*(ours for ours, _ in pairs), process)


def connect(path):
    client = socket.socket(socket.AF_UNIX)
    Streams.opened.append(client)
    client.settimeout(30)
    client.connect(str(path))
    return client


def request(path, module, *words, name="one", unit=()):
    """Return the connections of a program that waits for `go`, and what the fork has answered."""
    clients = []
    for role in ("stderr", "stdout", "stdin"):
        clients.insert(0, connect(path))
        message = {"id": name, "role": role, **({"argv": [module, *words], "unit": unit} if role == "stdin" else {})}
        clients[0].sendall(json.dumps(message).encode() + b"\n")
    return clients, json.loads(clients[1].recv(65536))


def by_fork(parent, *words, name="one"):
    clients, answer = request(parent[0], PROGRAM, *words, name=name)
    assert answer.keys() == {"started"}, answer
    clients[0].sendall(b"go\n")
    return Streams(*clients)


@pytest.fixture(params=["interpreter", "fork"])
def start(request, archive, parent):
    return (
        (lambda *words: by_interpreter(archive, *words))
        if request.param == "interpreter"
        else (lambda *words: by_fork(parent, *words))
    )


def test_fork_is_described_as_the_program_itself(archive, parent):
    described = [
        streams.ask("describe") for streams in (by_interpreter(archive, "a", "ä b"), by_fork(parent, "a", "ä b"))
    ]
    assert described[1] == described[0]
    assert described[1]["cmdline"] == f"python3\0-m\0{PROGRAM}\0a\0ä b\0"
    assert described[1]["files"] == [0, 1, 2]
    assert described[1]["leads_session"]


@pytest.mark.parametrize(
    ("line", "stdout", "code"),
    [
        ("exit 0", b"atexit\n", 0),
        ("exit 7", b"atexit\n", 7),
        ("kill 9", b"", -9),
        ("kill 15", b"", -15),
        ("raise it is wrong", b"atexit\n", 1),
        ("exec import os; os._exit(200)", b"", 200),
    ],
)
def test_program_ends_with_the_same_code_both_ways(start, line, stdout, code):
    streams = start()
    streams.send("stderr last words")
    streams.send(line)
    out, err, ended = streams.end()
    assert (out, ended) == (stdout, code)
    assert err.startswith(b"last words\n")
    assert (b"ValueError: it is wrong\n" in err) == line.startswith("raise")


def test_end_of_stdin_ends_the_program_both_ways(start):
    streams = start()
    streams.send("print unflushed")
    streams.stdin.shutdown(socket.SHUT_WR)
    assert streams.end() == (b"unflushed\nend of file\natexit\n", b"", 3)


def test_forks_draw_different_random_numbers(parent):
    for drawn in zip(*(by_fork(parent, name=str(number)).ask("random") for number in range(4)), strict=True):
        assert len(set(drawn)) == 4


def test_parent_that_is_killed_ends_no_fork(archive, tmp_path):
    reported = start_parent(archive, tmp_path)
    streams = by_fork((tmp_path / archive.name, reported))
    os.kill(reported["pid"], signal.SIGKILL)
    with pytest.raises(OSError):  # refused, or reset
        while True:  # until the kernel has closed its socket
            connect(tmp_path / archive.name)
    assert streams.ask("describe")["argv"][1:] == []
    streams.stdin.shutdown(socket.SHUT_WR)
    assert streams.lines.read() == b"end of file\natexit\n"


def test_fork_whose_client_does_not_say_go_runs_nothing(parent, tmp_path):
    trace = tmp_path / "trace"
    for ending in (
        lambda stdin: stdin.sendall(b"gone\nexec open(%r, 'w')\n" % str(trace).encode()),
        socket.socket.close,
    ):
        (stdin, _, stderr), answer = request(parent[0], PROGRAM)
        ending(stdin)
        assert stderr.recv(100) == b"ended: code 0\n"
        assert "started" in answer
    assert not trace.exists()


def test_client_that_is_gone_with_unread_output_is_the_end_of_stdin(parent):
    """A socket that is closed before everything was read from it is reset, and a program must not read that."""
    streams = by_fork(parent)
    streams.send("print " + "x" * 100)
    streams.send("describe")
    assert streams.stdout.recv(1)
    for stream in (streams.lines, streams.stdout, streams.stdin):
        stream.close()
    stderr = b"".join(iter(lambda: streams.stderr.recv(65536), b""))
    assert b"ConnectionReset" not in stderr


def test_new_parent_ends_the_old_one_and_its_socket(archive, tmp_path):
    """The snapshot may be taken of a machine that was resumed with another version's parent."""
    other = tmp_path / "fedcba9876543210"
    shutil.copytree(archive, other)
    folder = tmp_path / "warm"
    first, second = start_parent(archive, folder), start_parent(other, folder)
    try:
        assert [path.name for path in folder.iterdir()] == [other.name]
        deadline = time.monotonic() + 10
        while Path(f"/proc/{first['pid']}/cmdline").exists() and Path(f"/proc/{first['pid']}/cmdline").read_bytes():
            assert time.monotonic() < deadline
    finally:
        os.kill(second["pid"], signal.SIGKILL)


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"[]\n",
        b"{}\n",
        b'{"role": "program"}\n',
        b'{"role": "stdin"}\n',
        b'{"role": "stdin", "argv": 3}\n',
        b"\xff\xfe\n",
        b"x" * 70000,
    ],
)
def test_parent_closes_a_connection_that_makes_no_sense_and_serves_the_next(parent, line):
    client = connect(parent[0])
    client.sendall(line)
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(100) == b""
    assert by_fork(parent).ask("describe")["argv"][1:] == []


def test_module_that_does_not_exist_ends_as_python_does(parent):
    clients, answer = request(parent[0], "faultbed.testbed.node.nothing")
    clients[0].sendall(b"go\n")
    streams = Streams(*clients)
    assert streams.end()[1:] == (b"python3: No module named faultbed.testbed.node.nothing\n", 1)
    assert "started" in answer


def test_parent_reports_its_memory_and_has_one_thread(parent):
    client = connect(parent[0])
    client.sendall(b'{"role": "status"}\n')
    status = json.loads(client.recv(65536))
    assert status == parent[1]
    assert status["rss_kib"] > 1000
    assert status["missing"] == []
    assert len(list(Path(f"/proc/{status['pid']}/task").iterdir())) == 1
    cmdline = Path(f"/proc/{status['pid']}/cmdline").read_bytes()
    assert cmdline.split(b"\0")[1:3] == [b"-m", b"faultbed.testbed.node.warm.warm_parent"]


def test_parent_serves_its_own_user_alone(parent):
    assert parent[0].stat().st_mode & 0o777 == 0o600
    if os.geteuid():
        pytest.skip("only root can become another user")
    script = """
import contextlib, socket, sys
client = socket.socket(fileno=0)
with contextlib.suppress(OSError):
    client.connect(sys.argv[1])
    client.sendall(b'{"role": "status"}\\n')
    print(client.recv(10))
"""
    # The other user connects in spite of the modes of folder and socket; the parent does not answer.
    with contextlib.ExitStack() as stack:
        for path in (parent[0], *parent[0].parents[:-2]):
            mode = path.stat().st_mode & 0o7777
            stack.callback(path.chmod, mode)
            path.chmod(mode | (0o666 if path == parent[0] else 0o011))
        with socket.socket(socket.AF_UNIX) as client:
            argv = ["/usr/bin/python3", "-c", script, str(parent[0])]
            done = subprocess.run(
                argv, stdin=client, user=65534, capture_output=True, text=True, check=False, timeout=30
            )
    assert (done.stdout in ("", "b''\n"), done.stderr) == (True, "")


def test_process_with_a_thread_or_an_open_file_is_no_warm_parent(archive, tmp_path):
    """A fork has only the thread that forks, and would share what is open."""
    bad = tmp_path / "archive"
    shutil.copytree(archive, bad)
    (bad / "faultbed/testbed/node/opens.py").write_text("import os\nKEPT = os.open('/dev/null', os.O_RDONLY)\n")
    started = subprocess.run(
        ["python3", "-m", "faultbed.testbed.node.warm.warm_parent", str(tmp_path / "warm")],
        capture_output=True, text=True, timeout=60, check=False, env=environment(bad), cwd="/",
    )  # fmt: skip
    assert started.returncode == 1
    assert "1 threads and descriptors [3] after the imports" in started.stderr


SYSTEMD_RUN = """#!/bin/sh
# Stands for systemd-run: runs the unit's command, and says what it was started with.
printf '%s\\n' "$@" >"$0.words"
for file in "$@"; do case $file in PIDFile=*) cat "${file#PIDFile=}" >"$0.pid";; esac; done
while [ "$1" != /bin/sh ]; do shift; done
"""


WITH_CGROUP_V2 = """\
both="mount --bind /sys/fs/cgroup/unified /sys/fs/cgroup && exec"
[ -e /sys/fs/cgroup/cgroup.controllers ] || exec unshare --mount sh -c "$both \\"\\$@\\"" with "$@"
"""
"""Lines of a script on a machine whose cgroups of version 2 are mounted elsewhere: they are where guests have them."""


@pytest.fixture
def systemd_run(tmp_path):
    """Return a function that makes a stand-in for systemd-run, which then goes on with these lines."""

    def make(*lines):
        path = tmp_path / "systemd-run"
        path.write_text(SYSTEMD_RUN + "\n".join(lines))
        path.chmod(0o755)
        return path

    return make


def in_unit(parent, start, *words):
    clients, answer = request(parent[0], PROGRAM, *words, unit=[str(start), "--unit=x"])
    clients[0].sendall(b"go\n")
    return Streams(*clients), answer


@pytest.mark.skipif(os.geteuid() != 0, reason="the PID file is in a folder of root, and a unit's command is root's")
class TestProgramInAUnit:
    @pytest.fixture(autouse=True)
    def _folder(self):
        Path("/run/faultbed/warm").mkdir(parents=True, exist_ok=True)

    def test_program_is_adopted_by_pid_1_and_its_unit_starts_before_it(self, parent, systemd_run):
        start = systemd_run("cp /proc/self/oom_score_adj $0.oom")
        streams, answer = in_unit(parent, start, "word")
        described = streams.ask("describe")
        assert described["argv"][1:] == ["word"]
        assert described["cmdline"] == f"python3\0-m\0{PROGRAM}\0word\0"
        assert described["files"] == [0, 1, 2]
        assert (described["leads_session"], described["folder"]) == (True, "/")
        assert set(described["environment"]) <= {"PATH", "PYTHONPATH", "LANG", "LC_ALL", "NOTIFY_SOCKET"}
        words = Path(f"{start}.words").read_text().splitlines()
        assert words[:5] == [
            "--unit=x",
            "-p",
            "Type=forking",
            "-p",
            f"PIDFile=/run/faultbed/warm/{answer['started']}.pid",
        ]
        assert words[-2:] == ["join", str(answer["started"])]
        assert Path(f"{start}.pid").read_text() == f"{answer['started']}\n"
        Path(words[4].removeprefix("PIDFile=")).unlink()  # PID 1 removes it with the unit
        streams.send("exec import os; print(os.getppid(), flush=True)")
        assert streams.lines.readline() == b"1\n"

    def test_units_command_moves_the_program_into_its_own_group_with_its_own_oom_score(self, parent, systemd_run):
        streams, answer = in_unit(
            parent, systemd_run("echo 321 >/proc/self/oom_score_adj", WITH_CGROUP_V2, 'exec "$@"')
        )
        assert streams.ask("describe")["oom"] == "321\n", "the score of the unit's command"
        assert Path(f"/proc/{answer['started']}/cgroup").read_text() == Path("/proc/self/cgroup").read_text()

    @pytest.mark.parametrize(
        ("lines", "reason"),
        [
            (("echo Unit x.service already exists. >&2", "exit 1"), b"unit: Unit x.service already exists."),
            (("kill -KILL $$",), b"unit: "),
        ],
        ids=["refused", "killed"],
    )
    def test_program_whose_unit_did_not_start_does_not_run_and_says_why(
        self, parent, systemd_run, tmp_path, lines, reason
    ):
        trace = tmp_path / "trace"
        streams, _ = in_unit(parent, systemd_run(*lines))
        with contextlib.suppress(OSError):
            streams.send(f"exec open({str(trace)!r}, 'w')")
        assert streams.lines.read() == b""
        assert b"subject: systemd did not start its " + reason in streams.stderr.recv(65536)
        assert not trace.exists()

    def test_program_in_a_unit_ends_with_its_client_and_the_parent_serves_on(self, parent, systemd_run):
        streams, _ = in_unit(parent, systemd_run())
        streams.ask("describe")
        streams.stdin.shutdown(socket.SHUT_WR)
        assert streams.lines.read() == b"end of file\natexit\n"
        assert streams.stderr.recv(100) == b"", "PID 1 is its parent, and the warm parent cannot tell how it ended"
        assert by_fork(parent).ask("describe")["argv"][1:] == []
