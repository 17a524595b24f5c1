"""Start node programs by the warm parent of a machine (`faultbed.testbed.node.warm.warm_parent`), if it has one.

An interpreter takes seconds to start on an emulated machine. Each machine of a lab with a snapshot therefore runs a
process that has imported the node code and forks programs on request. The name of its socket is the digest of its node
archive, so that the controller never starts a program from other code than its own.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
from collections.abc import Sequence
from typing import Any

import paramiko

from faultbed.testbed.errors import CommandFailed
from faultbed.testbed.remote import node_archive
from faultbed.testbed.remote.remote_node import Node
from faultbed.testbed.remote.ssh import JsonChannel, SshConnection
from faultbed.testbed.side_by_side import on_each
from faultbed.testbed.stopping import Deadline

__all__ = ["FOLDER", "prepare", "start_program", "status"]

FOLDER = "/run/faultbed/warm"
_MODULE = "faultbed.testbed.node.warm.warm_parent"
_STREAMS = ("stdin", "stdout", "stderr")
_ANSWER_S = 10.0
"""How long a warm parent may take to answer. A program that is forked later finds its client gone and ends."""
_PREPARE_S = 300.0
"""Deadline for importing all node code on an emulated machine."""
_GONE = (OSError, EOFError, paramiko.SSHException, ValueError, TypeError)


def prepare(node: Node) -> dict[str, Any]:
    """Start the warm parent of a machine, and return what it reports: `pid`, `rss_kib`, `modules`, `missing`.

    A warm parent of other code, which a resumed snapshot may contain, is ended.

    Raises:
        CommandFailed: the warm parent did not start.
        Unreachable: there is no SSH connection.
    """
    path = f"PYTHONPATH={node_archive.archive().folder}"
    done = node.run(["env", path, "python3", "-m", _MODULE, FOLDER], timeout_s=_PREPARE_S)
    try:
        reported: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise CommandFailed(f"{node.name}: the warm parent ended at once: {done.stderr.strip()}") from error
    return reported


def start_program(connection: SshConnection, argv: Sequence[str], *, unit: Sequence[str] = ()) -> JsonChannel | None:
    """Start a program in a fork of the warm parent and return its channel.

    Args:
        connection: the connection to the machine.
        argv: a module and its arguments.
        unit: `systemd-run` with the name and the properties of a transient unit, whose main process the program will
            be. If systemd refuses the unit, the program ends with the reason on its stderr.

    Returns:
        The program's channel, or None if no warm parent of this code answered in time. Then the program has not run
        and will not run, because it begins only when this client sends `go`.

    Raises:
        Unreachable: the machine does not answer.
    """
    channels = on_each(_STREAMS, lambda _: connection.unix_socket(_socket()), timeout_s=_PREPARE_S)
    opened = [channel for channel in channels if channel is not None]
    with contextlib.ExitStack() as unused:
        for channel in opened:
            unused.callback(channel.close)
        if len(opened) < len(_STREAMS):
            return None
        stdin, stdout, stderr = opened
        name = secrets.token_hex(8)
        try:
            for role, channel in zip(_STREAMS, opened, strict=True):
                program = {"argv": list(argv), "unit": list(unit)} if channel is stdin else {}
                _send(channel, {"id": name, "role": role, **program})
            if "started" not in _line(stdout):
                return None
            stdin.sendall(b"go\n")
        except _GONE:
            return None
        unused.pop_all()
    return JsonChannel(f"{connection.name}: `{shlex.join(argv)}`", stdin, (stdout, stderr))


def status(connection: SshConnection) -> dict[str, Any] | None:
    """Return what the warm parent of a machine reports (see `prepare`), or None if none of this code answers.

    Raises:
        Unreachable: the machine does not answer.
    """
    channel = connection.unix_socket(_socket())
    if channel is None:
        return None
    with contextlib.closing(channel):
        try:
            _send(channel, {"role": "status"})
            return _line(channel)
        except _GONE:
            return None


def _socket() -> str:
    return f"{FOLDER}/{node_archive.archive().digest}"


def _send(channel: paramiko.Channel, message: dict[str, Any]) -> None:
    channel.settimeout(_ANSWER_S)
    channel.sendall(json.dumps(message).encode() + b"\n")


def _line(channel: paramiko.Channel) -> dict[str, Any]:
    """Return the next line, decoded. The parent sends one line and then waits for this client.

    Raises:
        OSError: no line came within `_ANSWER_S`.
        EOFError: the parent has closed the connection.
        ValueError, TypeError: the line is not a JSON object.
    """
    deadline, data = Deadline(_ANSWER_S), b""
    while not data.endswith(b"\n"):
        channel.settimeout(deadline.step_s)
        try:
            part = channel.recv(65536)
        except TimeoutError:
            if deadline.is_over:
                raise
            continue
        if not part:
            raise EOFError("the warm parent has closed the connection")
        data += part
    return dict(json.loads(data))
