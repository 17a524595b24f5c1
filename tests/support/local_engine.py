"""A traffic engine on this machine: its verbs go over unix sockets to engines in other processes. No RDMA is needed.

`start` forks an engine from a process that has imported what engines need: imports cost more than most tests' traffic.
FOLDER has a socket for each RNIC's address. While it has a file `spoil`, a bit of each write arrives inverted, below
the checksums of RDMA. `start_program` forks another program of a node, such as the storage.

This module replaces `faultbed.traffic.node.verbs`. A write changes memory of the other process and completes when it is
acknowledged. A request that is not acknowledged within `RETRY_S` fails with RETRY_EXC_ERR, as on RDMA: the other
process was killed or stopped, or has closed the queue pair. RNICs acknowledge without the CPUs of their host. Therefore
a request to a process that is only slow does not fail.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import functools
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from types import SimpleNamespace

RETRY_S = 0.4
HEAD = struct.Struct("<BIIQQIIB")  # what, destination QP, source QP, wr_id, address, size, imm, signalled
WRITE, ACK, REFUSED = 0, 1, 2
RETRY_EXC = 12
_STARTING = threading.Lock()


class Request:
    def __init__(self, *, wr_id, mr, address, size, imm, signalled):
        del mr
        self.wr_id, self.imm, self.signalled = wr_id, imm, signalled
        self.imm_data = self.remote = 0
        self.sge = SimpleNamespace(addr=address, length=size)

    def set_wr_rdma(self, _rkey, address):
        self.remote = address


class Stream:
    """A connection to another RNIC; bytes that the socket does not accept yet wait in `out`."""

    def __init__(self, rnic, sock):
        self.rnic, self.sock, self.out, self.buffer, self.dead = rnic, sock, bytearray(), bytearray(), False
        sock.settimeout(0)
        rnic.streams[sock.fileno()] = self
        rnic.epoll.register(sock.fileno(), select.EPOLLIN)

    def send(self, data):
        self.out += data
        self.flush()

    def flush(self):
        try:
            while self.out:
                del self.out[: self.sock.send(self.out[: 1 << 20])]
        except BlockingIOError:
            pass
        except OSError:
            self.end()
            return
        if not self.dead:
            self.rnic.epoll.modify(self.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if self.out else 0))

    def read(self):
        try:
            while data := self.sock.recv(1 << 20):
                self.buffer += data
        except BlockingIOError:
            pass
        except OSError:
            data = b""
        while len(self.buffer) >= HEAD.size:
            head = HEAD.unpack_from(self.buffer)
            size = head[5] if head[0] == WRITE else 0
            if len(self.buffer) < HEAD.size + size:
                break
            payload = bytes(self.buffer[HEAD.size : HEAD.size + size])
            del self.buffer[: HEAD.size + size]
            self.rnic.arrived(self, head, payload)
        if data == b"":
            self.end()

    def end(self):
        if not self.dead:
            self.dead = True
            with contextlib.suppress(OSError, ValueError):
                self.rnic.epoll.unregister(self.sock.fileno())
            self.rnic.streams.pop(self.sock.fileno(), None)
            self.sock.close()


class Rnic:
    folder = ""

    def __init__(self, name, address):
        self.name, self.address, self.cq_entries = name, address, 1 << 15
        self.epoll = select.epoll()
        self.fd = self.epoll.fileno()
        self.streams, self.qps, self.peers, self.done, self.next_qpn = {}, {}, {}, [], 17 + os.getpid() % 1000
        self.server = socket.socket(socket.AF_UNIX)
        path = f"{self.folder}/{address}"
        Path(path).unlink(missing_ok=True)
        self.server.bind(path)
        self.server.listen(64)
        self.server.settimeout(0)
        self.epoll.register(self.server.fileno(), select.EPOLLIN)
        self.tick = os.eventfd(0, os.EFD_NONBLOCK)  # a completion that did not come from a socket
        self.epoll.register(self.tick, select.EPOLLIN)
        self.context = SimpleNamespace(close=lambda: None)

    def gid_index(self):
        return 0

    def check_mtu(self, _mtu):
        pass

    def register(self, address, _size):
        return SimpleNamespace(rkey=1, lkey=1, buf=address, close=lambda: None)

    def stream_to(self, address):
        stream = self.peers.get(address)
        if stream is None or stream.dead:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(1)
            sock.connect(f"{self.folder}/{address}")
            stream = self.peers[address] = Stream(self, sock)
        return stream

    def arrived(self, stream, head, payload):
        opcode, dst, src, wr_id, address, _size, imm, signalled = head
        qp = self.qps.get(dst)
        if qp is None or not qp.up:
            if opcode == WRITE:  # it is not acknowledged
                stream.send(HEAD.pack(REFUSED, src, dst, wr_id, 0, 0, 0, signalled))
            return
        if opcode == REFUSED:
            qp.is_refused = True
            return
        if opcode == ACK:
            while qp.pending and qp.pending[0][0] != wr_id:
                qp.pending.popleft()
            if qp.pending:
                _, reported, _ = qp.pending.popleft()
                if reported:
                    self.done.append(SimpleNamespace(status=0, wr_id=wr_id, qp_num=dst, imm_data=0))
            return
        if payload:
            if os.access(f"{self.folder}/spoil", os.F_OK):
                payload = bytes([payload[0] ^ 1]) + payload[1:]
            ctypes.memmove(address, payload, len(payload))
        receive = qp.receives.popleft()
        self.done.append(SimpleNamespace(status=0, wr_id=receive, qp_num=dst, imm_data=imm))
        stream.send(HEAD.pack(ACK, src, dst, wr_id, 0, 0, 0, signalled))

    def clear_event(self):
        pass

    def poll(self):
        for fd, events in self.epoll.poll(0):
            if fd == self.server.fileno():
                with contextlib.suppress(BlockingIOError):
                    while True:
                        Stream(self, self.server.accept()[0])
            elif fd == self.tick:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.tick)
            elif fd in self.streams:
                stream = self.streams[fd]
                if events & select.EPOLLOUT:
                    stream.flush()
                if not stream.dead and events & ~select.EPOLLOUT:
                    stream.read()
        done, self.done = self.done, []
        return done

    drain = poll

    def expire(self):
        """Fail expired requests, as the timer of a real RNIC does; called by the engine's tick."""
        now = time.monotonic()
        for qp in list(self.qps.values()):
            if qp.pending and now - qp.pending[0][2] > RETRY_S and (qp.is_refused or self.is_away(qp.peer["address"])):
                wr_id, _, _ = qp.pending[0]
                qp.pending.clear()
                qp.up = False
                self.done.append(SimpleNamespace(status=RETRY_EXC, wr_id=wr_id, qp_num=qp.qpn, imm_data=0))
                os.eventfd_write(self.tick, 1)

    def is_away(self, address):
        """Return whether the process of another RNIC is gone or stopped."""
        stream = self.peers.get(address)
        if stream is None or stream.dead:
            return True
        peer = struct.unpack("3i", stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        try:
            state = Path(f"/proc/{peer}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return True
        return state in "TZX"


class RcQp:
    def __init__(self, rnic, *, sends, receives, psn, params):
        del sends, receives, params
        self.rnic, self.psn, self.up, self.peer, self.is_refused = rnic, psn, False, None, False
        rnic.next_qpn += 1
        self.qpn = rnic.next_qpn
        rnic.qps[self.qpn] = self
        self.receives, self.pending = collections.deque(), collections.deque()

    def connect(self, peer):
        self.rnic.stream_to(peer["address"])
        self.peer, self.up = peer, True

    def post_recv(self, request):
        self.receives.append(request)

    def post_send(self, request):
        self.pending.append((request.wr_id, request.signalled, time.monotonic()))
        data = ctypes.string_at(request.sge.addr, request.sge.length) if request.sge.length else b""
        head = HEAD.pack(
            WRITE, self.peer["qpn"], self.qpn, request.wr_id, request.remote, len(data), request.imm_data,
            request.signalled,
        )  # fmt: skip
        with contextlib.suppress(OSError):  # the receiver is gone: the message is not acknowledged
            self.rnic.stream_to(self.peer["address"]).send(head + data)

    def psns(self):
        return self.psn, 0

    def halt(self):
        self.up = False

    def close(self):
        self.up = False
        self.rnic.qps.pop(self.qpn, None)


def write_request(**fields):
    made = Request(**fields)
    return made, made.sge


def install(folder):
    """Replace the verbs module of the engine by this one."""
    Rnic.folder = folder
    fake = types.ModuleType("faultbed.traffic.node.verbs")
    fake.__dict__.update(
        STATUS={RETRY_EXC: "RETRY_EXC_ERR"}, VERBS={}, RcQp=RcQp, Rnic=Rnic, write_request=write_request,
        recv_request=lambda wr_id, _mr, *_: wr_id, gid_of=str,
    )  # fmt: skip
    sys.modules[fake.__name__] = fake
    from faultbed.traffic.node import task

    plain = task.Task.check_deadlines

    def check_deadlines(self, now_ns):
        self.rnic.expire()
        plain(self, now_ns)

    task.Task.check_deadlines = check_deadlines


class Program:
    """The process of an engine or another program, with the used part of the interface of `subprocess.Popen`."""

    def __init__(self, pid, stdin, stdout):
        self.pid, self.stdin, self.stdout = pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        self._fd = os.pidfd_open(pid)

    def poll(self):
        return 0 if select.select([self._fd], [], [], 0)[0] else None

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout):
        if not select.select([self._fd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(["program"], timeout)


def start(folder):
    """Start an engine whose RNICs have their sockets in `folder`."""
    return start_program("faultbed.traffic.node.engine", folder=str(folder))


def start_program(module, *args, folder=""):
    """Start a program by its module and its arguments, as `python -m` does."""
    (child_in, stdin), (stdout, child_out) = os.pipe(), os.pipe()
    with _STARTING:
        server = _server()
        socket.send_fds(server, [json.dumps([folder, module, *args]).encode()], [child_in, child_out])
        pid = int(server.recv(64))
    os.close(child_in)
    os.close(child_out)
    return Program(pid, stdin, stdout)


@functools.cache
def _server():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # which is done first, and ends the process
    return ours


def next_program(requests):
    """Return a program's folder, module and arguments, in the process forked for it; None once there are no more."""
    running = set()
    while True:
        running = {pid for pid in running if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        content, pipes, _, _ = socket.recv_fds(requests, 4096, 2)
        if not content:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return None
        if not (pid := os.fork()):
            requests.close()
            for number, pipe in enumerate(pipes):
                os.dup2(pipe, number)
                os.close(pipe)
            return json.loads(content)
        for pipe in pipes:
            os.close(pipe)
        running.add(pid)
        requests.send(str(pid).encode())


if __name__ == "__main__":
    install("")
    import faultbed.traffic.node.engine
    import faultbed.traffic.node.ranks.rank  # half of what an engine imports
    import faultbed.traffic.node.storage  # noqa: F401

    if (program := next_program(socket.socket(fileno=int(sys.argv[1])))) is not None:
        Rnic.folder, *sys.argv = program
        importlib.import_module(sys.argv[0]).main()
