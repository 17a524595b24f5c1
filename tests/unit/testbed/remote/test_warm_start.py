"""The controller's side of a warm parent: a program is forked, or it is as if nothing had been requested."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from faultbed.testbed.remote import warm_start

ARGV = ["faultbed.testbed.node.watch", "word"]


class Channel:
    """A socket behind the methods of paramiko's channels that are used."""

    def __init__(self, ours):
        self.socket = ours
        self.settimeout, self.sendall, self.recv = ours.settimeout, ours.sendall, ours.recv
        self.is_closed = False

    def recv_ready(self):
        return False

    def shutdown_write(self):
        self.socket.shutdown(socket.SHUT_WR)

    def close(self):
        if not self.is_closed:
            self.socket.shutdown(socket.SHUT_RDWR)
            self.socket.close()
        self.is_closed = True


class Machine:
    """An SSH connection to a machine whose warm parent is `parent`: it gets the lines of all roles."""

    name = "host1"

    def __init__(self, parent, *, most=3):
        self.parent, self.most, self.channels, self.theirs = parent, most, [], []
        self.lock = threading.Lock()

    def unix_socket(self, path):
        assert path.startswith("/run/faultbed/warm/")
        with self.lock:
            if len(self.channels) == self.most:
                return None
            ours, theirs = socket.socketpair()
            self.channels.append(Channel(ours))
            self.theirs.append(theirs)
            if len(self.theirs) == 3:
                threading.Thread(target=self.serve, daemon=True).start()
            return self.channels[-1]

    def serve(self):
        lines = [(json.loads(theirs.makefile("rb").readline()), theirs) for theirs in self.theirs]
        assert len({line["id"] for line, _ in lines}) == 1
        self.parent({line["role"]: (line, theirs) for line, theirs in lines})

    def close(self):
        for each in [*self.channels, *self.theirs]:
            each.close()


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(warm_start, "_ANSWER_S", 0.3)
    made = []

    def start_by(parent, **options):
        made.append(Machine(parent, **options))
        return made[0], warm_start.start_program(made[0], ARGV)

    yield start_by
    for machine in made:
        machine.close()


def test_program_is_told_to_begin_and_its_streams_are_the_channels(start):
    def parent(streams):
        (request, stdin), (_, stdout), _ = (streams[role] for role in ("stdin", "stdout", "stderr"))
        stdout.sendall(b'{"started": 7}\n')
        said = stdin.recv(3, socket.MSG_WAITALL)
        stdout.sendall(json.dumps({"said": said.decode(), "argv": request["argv"]}).encode() + b"\n")
        stdin.recv(1)
        stdout.shutdown(socket.SHUT_WR)

    _, channel = start(parent)
    assert channel.receive(timeout_s=10) == {"said": "go\n", "argv": ARGV}
    channel.close()


@pytest.mark.parametrize(
    "answer", [b"", b'{"error": "cannot fork"}\n', b"nonsense\n", b"7\n", b'{"started": 7}', None],
    ids=["closed", "error", "nonsense", "number", "half a line", "silent"],
)  # fmt: skip
def test_parent_without_a_proper_answer_starts_nothing(start, answer):
    said, over = [], threading.Event()

    def parent(streams):
        if answer:
            streams["stdout"][1].sendall(answer)
        if answer is not None:
            streams["stdout"][1].shutdown(socket.SHUT_WR)
        said.append(streams["stdin"][1].recv(10))
        over.set()

    machine, channel = start(parent)
    assert channel is None
    assert all(each.is_closed for each in machine.channels)
    assert over.wait(10)
    assert said == [b""], "the fork waits for `go`, and reads the end of file"


@pytest.mark.parametrize("most", [0, 1, 2])
def test_machine_on_which_nothing_listens_is_left_alone(start, most):
    machine, channel = start(None, most=most)
    assert channel is None
    assert all(each.is_closed for each in machine.channels)
