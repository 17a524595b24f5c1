"""Start node programs by fork(2) from a process that has imported all node code.

    python3 -m faultbed.testbed.node.warm.warm_parent /run/faultbed/warm

It is started over SSH before the lab's snapshot is taken, as a node program would be: a fork inherits from it what a
program inherits from the SSH server (environment, directory, limits, cgroup, namespaces, OOM score). It ends the
parents of other versions, imports the node code, listens on FOLDER/DIGEST (the digest of its own archive), prints
{"pid", "rss_kib", "modules", "missing"} and goes on in the background. It opens no device and no network socket, and
has one thread.

A client opens three connections and sends one line on each: {"id": ID, "role": ROLE}, with "argv": [MODULE, WORD, ..]
on `stdin`, and "unit": [WORD, ..] there if the program is to be the main process of a transient unit
(`faultbed.testbed.node.warm.own_unit`). The parent then forks, and the fork speaks:

    stdout  <- {"started": PID}, or {"error": "..."}; then the program's stdout
    stdin   -> the line `go`, without which the program does not begin; then the program's stdin
    stderr  <- the program's stderr; then, by the parent, the line `ended: code N` or `ended: signal N`, unless it has a
               unit: PID 1 is then the parent of the program

A socket that is closed while it has unread data resets the connection, and the program would read an error instead of
the end of file: therefore stdin is a connection of its own.

{"role": "status"} is answered with the line that was printed at the start. A client that is not this user is refused
(SO_PEERCRED).
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import pkgutil
import select
import signal
import socket
import struct
import sys
import time

from faultbed.testbed.node.warm.own_unit import enter_unit, leave_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType
    from typing import Any

__all__ = ["main"]

_LINE_BYTES = 65536
_PAIR_S = 30.0
"""How long a connection may take to send its line, and to be joined by the others of its program."""
_MOST = 96
"""Connections that may wait at the same time."""
_STREAMS = {"stdin": 0, "stdout": 1, "stderr": 2}
_GO = b"go\n"
_PEER = struct.Struct("=3i")  # struct ucred of unix(7): pid, uid, gid
_LAST_FD = 2**31 - 1


class _Connection:
    """A connection whose line has not come yet (`role` None), or that waits for the other two of its program."""

    def __init__(self, client: socket.socket) -> None:
        self.socket = client
        self.until_s = time.monotonic() + _PAIR_S
        self.role: str | None = None
        self.id = ""
        self.argv: list[str] = []
        self.unit: list[str] = []
        self._line = b""

    def receive(self) -> bool:
        """Receive a part of the line, and decode it once it is whole. Return False if the connection is of no use."""
        try:
            data = self.socket.recv(_LINE_BYTES, socket.MSG_DONTWAIT)
            self._line += data
            if self.role is not None or not data or len(self._line) > _LINE_BYTES:
                return False  # gone, or it sends what nobody asked for
            if self._line.endswith(b"\n"):
                request = json.loads(self._line)
                self.id, self.argv = str(request.get("id")), [str(word) for word in request.get("argv", ())]
                self.unit = [str(word) for word in request.get("unit", ())]
                self.role = str(request["role"])
        except BlockingIOError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return self.role in (None, "status", "stdout", "stderr") or (self.role == "stdin" and bool(self.argv))


class _Parent:
    """The listening socket, connections that wait, and forks that run."""

    def __init__(self, listener: socket.socket, status: bytes) -> None:
        self.listener = listener
        self.status = status
        self.waiting: dict[int, _Connection] = {}
        self.forks: dict[int, tuple[int, socket.socket | None]] = {}
        """Process id and stderr connection of each fork that runs, by its pidfd; None: PID 1 is its parent now."""

    def serve(self) -> _Connection:
        """Serve clients for ever. Return in each fork, with the request for its program."""
        while True:
            poll = select.poll()
            for fd in (self.listener.fileno(), *self.forks, *self.waiting):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(1000 if self.waiting else None):
                if fd == self.listener.fileno():
                    self._accept()
                elif fd in self.forks:
                    self._reap(fd)
                elif fd in self.waiting and (request := self._read(fd)) is not None:
                    return request
            now_s = time.monotonic()
            for fd in [fd for fd, connection in self.waiting.items() if connection.until_s < now_s]:
                self._drop(fd)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self.listener.accept()
            _, uid, _ = _PEER.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid == os.geteuid() and len(self.waiting) < _MOST:
                self.waiting[client.fileno()] = _Connection(client)
            else:
                client.close()

    def _drop(self, fd: int) -> None:
        self.waiting.pop(fd).socket.close()

    def _reap(self, pidfd: int) -> None:
        """Collect the exit status of a fork that has ended, and report it."""
        pid, errors = self.forks.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if errors is None:
            return
        end = f"ended: code {code}\n" if code >= 0 else f"ended: signal {-code}\n"
        with contextlib.suppress(OSError):
            errors.send(end.encode(), socket.MSG_DONTWAIT)
        errors.close()

    def _read(self, fd: int) -> _Connection | None:
        """Read from a connection that waits. Return the request in the fork of its program, otherwise None."""
        connection = self.waiting[fd]
        if not connection.receive():
            self._drop(fd)
        elif connection.role == "status":
            with contextlib.suppress(OSError):
                connection.socket.send(self.status, socket.MSG_DONTWAIT)
            self._drop(fd)
        elif connection.role is not None:
            streams = {part.role: other for other, part in self.waiting.items() if part.id == connection.id}
            if streams.keys() >= _STREAMS.keys():
                parts = {role: self.waiting.pop(streams[role]) for role in _STREAMS}
                return self._fork({role: part.socket for role, part in parts.items()}, parts["stdin"])
        return None

    def _fork(self, streams: dict[str, socket.socket], request: _Connection) -> _Connection | None:
        """Fork. Return the request in the fork once its client has said `go`, and None in the parent."""
        try:
            pid = os.fork()
        except OSError as error:
            _answer(streams["stdout"], {"error": f"cannot fork: {error}"})
            for stream in streams.values():
                stream.close()
            return None
        if pid:
            streams["stdin"].close()
            streams["stdout"].close()
            if request.unit:
                streams["stderr"].close()
            self.forks[os.pidfd_open(pid)] = (pid, None if request.unit else streams["stderr"])
            return None
        try:
            if request.unit:
                leave_parent()
            self._become(streams, request.argv)
        except BaseException as error:  # noqa: BLE001 (whatever it is, the fork is not the program)
            _answer(streams["stdout"], {"error": f"{type(error).__name__}: {error}"})
            os._exit(1)
        return request

    def _become(self, streams: dict[str, socket.socket], argv: Sequence[str]) -> None:
        """Make this fork look like a process that the SSH server has started, and wait for `go`."""
        from faultbed.testbed.node.warm.command_line import set_command_line  # noqa: PLC0415 (needs ctypes)

        os.setsid()
        numbers = {role: stream.fileno() for role, stream in streams.items()}
        # Their numbers are used again by the program: these objects must never close them.
        held = [self.listener, *streams.values(), *(part.socket for part in self.waiting.values())]
        for each in [*held, *(stderr for _, stderr in self.forks.values() if stderr is not None)]:
            each.detach()
        for role, fd in _STREAMS.items():
            os.dup2(numbers[role], fd)
        os.closerange(3, _LAST_FD)
        self.waiting, self.forks = {}, {}
        for role, fd in _STREAMS.items():
            before = getattr(sys, role)
            mode, size = ("r", -1) if role == "stdin" else ("w", 1 if role == "stderr" else -1)
            stream = open(fd, mode, size, before.encoding, before.errors, closefd=False)  # noqa: SIM115 (for its life)
            setattr(sys, role, stream)
            setattr(sys, f"__{role}__", stream)
        if "numpy.random" in sys.modules:  # Python's `random` sees to itself in a fork
            sys.modules["numpy.random"].seed()
        set_command_line(["python3", "-m", *argv])
        os.write(1, json.dumps({"started": os.getpid()}).encode() + b"\n")
        said = b""
        while said != _GO:
            if not _GO.startswith(said) or not (part := os.read(0, 1)):
                os._exit(0)
            said += part


def _answer(client: socket.socket, message: dict[str, Any]) -> None:
    """Send a message to a client. In a fork, the connection may have become stdout already."""
    line = json.dumps(message).encode() + b"\n"
    with contextlib.suppress(OSError):
        if client.fileno() < 0:
            os.write(1, line)
        else:
            client.send(line, socket.MSG_DONTWAIT)


def run(argv: Sequence[str]) -> None:
    """Run a module as `python3 -m MODULE WORD ...` does (runpy); its end is the end of this process."""
    module, *words = argv
    spec = importlib.util.find_spec(module)
    code: CodeType | None = spec.loader.get_code(module) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]
    if spec is None or code is None:
        sys.exit(f"python3: No module named {module}")
    program: ModuleType = type(sys)("__main__")
    vars(program).update(
        __file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader, __package__=spec.parent, __spec__=spec
    )
    sys.modules["__main__"] = program
    sys.argv[:] = [spec.origin or module, *words]
    exec(code, vars(program))  # noqa: S102 (as runpy does)


def _import_all() -> tuple[int, list[str]]:
    """Import the node code and what it imports. Return the number of modules, and those that cannot be imported."""
    missing: list[str] = []
    threads = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a fork has only the thread that forks
    archive = sys.modules["faultbed"].__path__
    names = [found.name for found in pkgutil.walk_packages(archive, "faultbed.", onerror=missing.append)]
    for name in names:
        if ".node." in name and not name.startswith(__package__ or "-"):
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 (a library that this machine does not have)
                missing.append(f"{name}: {error}")
    importlib.import_module("faultbed.testbed.node.warm.command_line")
    if threads is None:
        del os.environ["OPENBLAS_NUM_THREADS"]
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = threads
    return len(sys.modules), missing


def _require_plain() -> None:
    """Check that this process can be forked.

    Raises:
        SystemExit: it has threads, or open descriptors besides the first three.
    """
    threads = len(os.listdir("/proc/self/task"))
    with os.scandir("/proc/self/fd") as listing:
        numbers = {int(entry.name) for entry in listing}
    opened = [fd for fd in sorted(numbers - {0, 1, 2}) if os.path.exists(f"/proc/self/fd/{fd}")]
    if threads != 1 or opened:
        sys.exit(
            f"warm parent: {threads} threads and descriptors {opened} after the imports, which a fork would not have "
            "or would share; import no module that opens something"
        )


def _end_others(folder: str) -> None:
    """End the parents that listen in the same folder, and remove their sockets. Their forks go on."""
    theirs = [b"-m", f"{__package__}.warm_parent".encode(), os.fsencode(folder)]
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read().split(b"\0")[1:4] == theirs and int(pid) != os.getpid():
                os.kill(int(pid), signal.SIGKILL)
    for name in os.listdir(folder):
        os.unlink(f"{folder}/{name}")


def _digest() -> str:
    """Return the digest of this archive: the name of the folder that `faultbed` is in."""
    path = os.path.abspath(__file__)
    return os.path.basename(path[: path.rindex("/faultbed/testbed/node/warm/")])


def _memory_kib() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))


def main() -> None:
    """Prepare, report, and serve in the background; in a fork, run the requested program."""
    folder = sys.argv[1]
    modules, missing = _import_all()
    _require_plain()
    gc.collect()
    gc.freeze()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    _end_others(folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    listener.bind(f"{folder}/{_digest()}")
    os.umask(before)
    listener.listen(_MOST)
    listener.setblocking(False)  # noqa: FBT003 (the socket module's own form)
    daemon_r, daemon_w = os.pipe()
    if os.fork():
        os.close(daemon_w)
        sys.stdout.write(os.read(daemon_r, _LINE_BYTES).decode())
        return
    os.setsid()
    status = json.dumps({"pid": os.getpid(), "rss_kib": _memory_kib(), "modules": modules, "missing": missing}).encode()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    os.write(daemon_w, status + b"\n")
    os.close(daemon_r)
    os.close(daemon_w)
    request = _Parent(listener, status + b"\n").serve()
    if request.unit:
        try:
            enter_unit(request.unit)
        except OSError as error:
            sys.exit(f"{request.argv[0]}: {error}")
    run(request.argv)


if __name__ == "__main__":
    main()
