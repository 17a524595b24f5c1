"""Nodes over SSH, with pinned host keys.

One connection for each machine carries all commands, and the channels of long-lived programs that speak JSON lines. A
host key that differs from the pinned one is an error.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import queue
import shlex
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko

from faultbed.testbed.errors import CommandFailed, Unreachable
from faultbed.testbed.remote.jsonlines import next_message
from faultbed.testbed.remote.remote_node import Completed
from faultbed.testbed.stopping import Deadline

__all__ = ["Address", "JsonChannel", "SshConnection", "SshNode"]

CONNECT_TIMEOUT_S = 15.0
LOCK_TIMEOUT_S, CLOSE_TIMEOUT_S = 120.0, 2.0
"""How long to wait for the connection's lock, which other threads hold while they connect: to use it, to close it."""
REPLY_TIMEOUT_S = 60.0
"""How long an SSH server may take to accept a command or data, and to report the exit status of an ended command."""
_LEAST_S = 0.2
"""Minimum timeout for opening a channel, even if the command's deadline is over: it may still have to clean up."""
STDERR_TAIL = 2000


def _default_remedy() -> str:
    return "check its power, its management cable and its SSH server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address and credentials for SSH to a machine. `host_key` is a public key line (`ssh-ed25519 AAAA…`).

    `remedy` is called if the machine does not answer; it returns the likely reason and what to do. `cannot_answer` is
    called before a connection is opened; if it returns a reason, the connection fails at once instead of timing out.
    """

    host: str
    port: int
    user: str
    identity: Path
    host_key: str
    remedy: Callable[[], str] = _default_remedy
    cannot_answer: Callable[[], str | None] = lambda: None


class _Reply(threading.Event):
    """The event of a channel that the server's reply to a request sets, with a timeout for waiting.

    paramiko waits for the reply without one (`Channel._wait_for_event`). A machine that hangs keeps its TCP connections
    open, so that this wait would not end.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the reply.

        Raises:
            Unreachable: it did not come in time.
        """
        deadline = Deadline(REPLY_TIMEOUT_S if timeout is None else timeout)
        while not super().wait(deadline.step_s):
            if deadline.is_over:
                raise Unreachable(f"{self._name}: its SSH server did not reply in {deadline.waited}")
        return True


class _Transport(paramiko.Transport):
    """An SSH connection that can also connect to unix sockets of the machine."""

    def __init__(self, raw: socket.socket) -> None:
        super().__init__(raw)
        self._wanted = threading.local()

    def open_unix(self, path: str, *, timeout_s: float) -> paramiko.Channel:
        """Open a channel to a unix socket (OpenSSH's PROTOCOL, 2.4), for which paramiko has no function."""
        self._wanted.path = path
        return self.open_channel("direct-streamlocal@openssh.com", timeout=timeout_s)

    def _log(self, level: int, msg: str | list[str], *args: object) -> None:
        """Log a message, except paramiko's error for a socket at which nothing listens: callers expect that."""
        if not str(msg).startswith("Secsh channel"):
            super()._log(level, msg, *args)  # type: ignore[misc] # not in its stubs

    def _send_user_message(self, data: paramiko.Message) -> None:
        path, self._wanted.path = getattr(self._wanted, "path", None), None
        if path is not None:  # `open_channel` sends its request on the calling thread
            data.add_string(path)
            data.add_string("")  # reserved
            data.add_int(0)  # reserved
        super()._send_user_message(data)  # type: ignore[misc] # not in its stubs


class SshConnection:
    """One SSH connection to one machine, opened at first use and shared by all nodes on that machine. Thread-safe."""

    def __init__(self, name: str, address: Address) -> None:
        self.name = name
        self.address = address
        self._lock = threading.Lock()
        self._transport: _Transport | None = None

    def session(self) -> paramiko.Channel:
        """Open a new session channel. Several threads can open one at the same time.

        Raises:
            Unreachable: the machine does not answer, or has another host key.
        """
        transport = self._connected()
        try:
            session = transport.open_session(timeout=max(_LEAST_S, Deadline(CONNECT_TIMEOUT_S).left_s))
        except (paramiko.SSHException, EOFError, OSError) as error:
            self._give_up(transport)
            raise Unreachable(f"{self.name}: the SSH connection is gone ({error})") from error
        session.event = _Reply(self.name)
        return session

    def unix_socket(self, path: str) -> paramiko.Channel | None:
        """Connect to a unix socket of the machine. None: nothing listens there, or the SSH server forbids it.

        Raises:
            Unreachable: the machine does not answer, or has another host key.
        """
        transport = self._connected()
        try:
            return transport.open_unix(path, timeout_s=max(_LEAST_S, Deadline(CONNECT_TIMEOUT_S).left_s))
        except (paramiko.SSHException, EOFError, OSError) as error:
            # The server refused this channel. paramiko may not say why: if it refuses the channels of two threads at
            # the same time, only one thread gets the reason.
            if isinstance(error, paramiko.SSHException) and transport.is_active():
                return None
            self._give_up(transport)
            raise Unreachable(f"{self.name}: the SSH connection is gone ({error})") from error

    def is_loopback(self) -> bool:
        """Return whether the machine is this one, by the address that its SSH server is reached at.

        Raises:
            Unreachable: the machine does not answer, or has another host key.
        """
        return ipaddress.ip_address(self._connected().getpeername()[0]).is_loopback

    def _connected(self) -> _Transport:
        """Return the open connection; open it if there is none."""
        with self._exclusive():
            if self._transport is None or not self._transport.is_active():
                self._transport = self._connect()
            return self._transport

    def _give_up(self, transport: _Transport) -> None:
        """Close a broken connection, unless another thread has replaced it by a new one already."""
        transport.close()
        with self._exclusive():
            if self._transport is transport:
                self._transport = None

    def close(self) -> None:
        """Close the connection; the next use opens a new one."""
        try:
            with self._exclusive(CLOSE_TIMEOUT_S):
                self._drop()
        except Unreachable:  # another thread hangs while it holds the lock: closing the transport ends its wait
            if (transport := self._transport) is not None:
                transport.close()

    @contextlib.contextmanager
    def _exclusive(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Hold the connection's lock, which other threads hold while they connect.

        Raises:
            Unreachable: the lock was not free before the timeout.
        """
        deadline = Deadline(timeout_s)
        while not self._lock.acquire(timeout=deadline.step_s):
            if deadline.is_over:
                raise Unreachable(f"{self.name}: not connected after {deadline.waited}")
        try:
            yield
        finally:
            self._lock.release()

    def _drop(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _connect(self) -> _Transport:
        server = f"{self.name} ({self.address.user}@{self.address.host}:{self.address.port})"
        if reason := self.address.cannot_answer():
            raise Unreachable(f"{server} does not answer: {reason}")
        try:
            raw = socket.create_connection((self.address.host, self.address.port), timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            raise Unreachable(f"{server} does not answer: {error}; {self.address.remedy()}") from error
        transport = _Transport(raw)
        transport.daemon = True
        transport.banner_timeout = CONNECT_TIMEOUT_S
        try:
            transport.start_client(timeout=CONNECT_TIMEOUT_S)
            if not transport.initial_kex_done:  # start_client returns without an error after its timeout
                raise paramiko.SSHException(f"no agreement on keys within {CONNECT_TIMEOUT_S:g} s")  # noqa: TRY301
            self._check_host_key(server, transport.get_remote_server_key())
            transport.auth_publickey(
                self.address.user, paramiko.Ed25519Key.from_private_key_file(str(self.address.identity))
            )
        except (paramiko.SSHException, EOFError, OSError) as error:
            transport.close()
            raise Unreachable(
                f"{server} has no working SSH server: {error or type(error).__name__}; {self.address.remedy()}"
            ) from error
        except BaseException:
            transport.close()
            raise
        transport.set_keepalive(5)
        return transport

    def _check_host_key(self, server: str, offered: paramiko.PKey) -> None:
        kind, key = self.address.host_key.split()[:2]
        if (offered.get_name(), offered.get_base64()) != (kind, key):
            raise Unreachable(
                f"{server} has another host key than the pinned one: it is not the machine that was provisioned; if it "
                "was rebuilt on purpose, run `faultbed down` and `faultbed up`"
            )


class SshNode:
    """A machine, or a network namespace of one. Implements `faultbed.testbed.remote.remote_node.Node`.

    `prefix` precedes every command: `ip netns exec NAME`, or `sudo -n --`.
    """

    def __init__(self, name: str, connection: SshConnection, *, prefix: Sequence[str] = ()) -> None:
        self._name = name
        self._connection = connection
        self._prefix = tuple(prefix)

    @property
    def name(self) -> str:
        """The name in the inventory."""
        return self._name

    def run(
        self, argv: Sequence[str], *, timeout_s: float = 60.0, stdin: str | None = None, check: bool = True
    ) -> Completed:
        """See `faultbed.testbed.remote.remote_node.Node.run`."""
        session = self._connection.session()
        session.settimeout(REPLY_TIMEOUT_S)
        with contextlib.closing(session):
            session.exec_command(shlex.join([*self._prefix, *argv]))
            if stdin is not None:
                session.sendall(stdin.encode())
            session.shutdown_write()
            out, err = _read_to_end(session, timeout_s, f"{self._name}: `{_short(argv)}`")
            rc = _exit_status(session, f"{self._name}: `{_short(argv)}`")
        done = Completed(
            argv=tuple(argv), rc=rc, stdout=out.decode(errors="replace"), stderr=err.decode(errors="replace")
        )
        if check and rc:
            output = (done.stderr.strip() or done.stdout.strip())[-STDERR_TAIL:]
            raise CommandFailed(f"{self._name}: `{_short(argv)}` ended with {rc}: {output}")
        return done

    def open(self, argv: Sequence[str]) -> JsonChannel:
        """See `faultbed.testbed.remote.remote_node.Node.open`."""
        session = self._connection.session()
        session.exec_command(shlex.join([*self._prefix, *argv]))
        return JsonChannel(f"{self._name}: `{_short(argv)}`", session)

    def put(self, content: bytes, path: str, *, mode: int = 0o644) -> None:
        """See `faultbed.testbed.remote.remote_node.Node.put`."""
        script = 'set -e; mkdir -p "$(dirname "$1")"; cat >"$1.new"; chmod "$2" "$1.new"; mv "$1.new" "$1"'
        session = self._connection.session()
        session.settimeout(REPLY_TIMEOUT_S)
        with contextlib.closing(session):
            session.exec_command(shlex.join([*self._prefix, "sh", "-c", script, "put", path, f"{mode:o}"]))
            session.sendall(content)
            session.shutdown_write()
            _, err = _read_to_end(session, 60.0, f"{self._name}: writing {path}")
            if _exit_status(session, f"{self._name}: writing {path}"):
                raise CommandFailed(f"{self._name}: could not write {path}: {err.decode(errors='replace').strip()}")


class JsonChannel:
    """A program on a node that speaks JSON lines; one thread reads, any thread may send.

    A program that the SSH server has started has one channel, `session`. A program that a warm parent has forked
    (`faultbed.testbed.remote.warm_start`) has `session` for its stdin, and `forked` for its stdout and stderr.

    Implements `faultbed.testbed.remote.remote_node.Channel`.
    """

    def __init__(
        self, program: str, session: paramiko.Channel, forked: tuple[paramiko.Channel, paramiko.Channel] | None = None
    ) -> None:
        self._what = program
        self._session = session
        self._stdout = session if forked is None else forked[0]
        self._separate_stderr = None if forked is None else forked[1]
        for channel in (session, self._stdout):
            channel.settimeout(REPLY_TIMEOUT_S)
        self._lock = threading.Lock()
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._stderr = b""
        self._reader = threading.Thread(target=self._read, name=f"reader of {program}", daemon=True)
        self._reader.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """See `faultbed.testbed.remote.remote_node.Channel.send`."""
        try:
            with self._lock:
                self._session.sendall(json.dumps(message).encode() + b"\n")
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise Unreachable(f"{self._what} is gone{self._stderr_note()}") from error

    def receive(self, *, timeout_s: float) -> dict[str, Any] | None:
        """See `faultbed.testbed.remote.remote_node.Channel.receive`."""
        return next_message(self._lines, program=self._what, stderr_note=self._stderr_note(), timeout_s=timeout_s)

    def close(self) -> None:
        """See `faultbed.testbed.remote.remote_node.Channel.close`."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._session.shutdown_write()
        for channel in (self._session, self._stdout, self._separate_stderr):
            if channel is not None:
                channel.close()
        Deadline(5.0).join(self._reader)

    def stderr(self) -> str:
        """Return the end of the program's stderr."""
        return self._stderr.decode(errors="replace")[-STDERR_TAIL:].strip()

    def _stderr_note(self) -> str:
        return f"; its stderr: {self.stderr()}" if self._stderr else ""

    def _read(self) -> None:
        buffer = b""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while data := self._next_data():
                self._drain_stderr()
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    if line.strip():
                        self._lines.put(line)
        self._drain_stderr()
        self._lines.put(None)

    def _next_data(self) -> bytes:
        """Return the next output, or b"" at its end. Waits without a timeout, because a program may be silent."""
        while True:
            try:
                return self._stdout.recv(65536)
            except TimeoutError:
                continue

    def _drain_stderr(self) -> None:
        ready, receive = (
            (self._session.recv_stderr_ready, self._session.recv_stderr)
            if self._separate_stderr is None
            else (self._separate_stderr.recv_ready, self._separate_stderr.recv)
        )
        while ready() and (data := receive(65536)):
            self._stderr = (self._stderr + data)[-2 * STDERR_TAIL :]


def _short(argv: Sequence[str]) -> str:
    line = shlex.join(argv)
    return line if len(line) <= 120 else line[:117] + "..."  # noqa: PLR2004 (a line of an error message)


def _exit_status(session: paramiko.Channel, program: str) -> int:
    """Return the exit status of a program that has closed its output."""
    if not Deadline(REPLY_TIMEOUT_S).wait(session.status_event):
        raise CommandFailed(f"{program}: it has closed its output, but its exit status did not arrive")
    return session.recv_exit_status()  # deadline: does not wait, because the status has arrived


def _read_to_end(session: paramiko.Channel, timeout_s: float, program: str) -> tuple[bytes, bytes]:
    deadline = Deadline(timeout_s)
    out, err = bytearray(), bytearray()
    session.settimeout(0.05)
    while True:
        while session.recv_stderr_ready():
            err += session.recv_stderr(65536)
        try:
            data = session.recv(65536)
        except TimeoutError:
            if deadline.is_over:
                raise CommandFailed(f"{program} did not end in {deadline.waited}") from None
            # After a channel is closed, its buffer still has the end of file: the next recv returns it.
            continue
        if not data:
            break
        out += data
    while data := session.recv_stderr(65536):
        err += data
    if not session.exit_status_ready() and session.transport is not None and not session.transport.is_active():
        raise Unreachable(f"{program}: the connection is gone")
    return bytes(out), bytes(err)
