"""The operations that faultbed needs on a machine: run a command, open a JSON-lines channel, write a file.

`faultbed.testbed.remote.ssh.SshNode` implements `Node` (SSH with pinned host keys); tests of pure logic have other
implementations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Channel", "Completed", "Node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A command that ended. `stdout` and `stderr` are decoded as UTF-8 with replacement."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str


class Channel(Protocol):
    """A program on a node that speaks JSON lines on its stdin and stdout.

    When its stdin ends, because the channel was closed or lost, the program knows that the controller is gone.
    """

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one message as a line. Raises `Unreachable` if the program is gone."""

    def receive(self, *, timeout_s: float) -> dict[str, Any] | None:
        """Read one message.

        Returns None after the program has closed its stdout. Raises `LabError` for a line that is not JSON, and
        `CommandFailed` if there is no line by the deadline; both messages have the end of the program's stderr.
        """

    def close(self) -> None:
        """Close both directions; the program sees the end of its stdin. Safe to call twice."""


class Node(Protocol):
    """A machine of the lab, or a switch in a network namespace of one."""

    @property
    def name(self) -> str:
        """The name in the inventory."""

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = 60.0,
        stdin: str | None = None,
        check: bool = True,
    ) -> Completed:
        """Run a command to its end.

        Raises:
            CommandFailed: it ended with an error (only with `check`), or did not end by the deadline.
            Unreachable: there is no SSH connection.
        """

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a program that speaks JSON lines (`Channel`). Raises `Unreachable` if there is no SSH connection."""

    def put(self, content: bytes, path: str, *, mode: int = 0o644) -> None:
        """Write a file on the node atomically (temporary name, then rename), and create its folder.

        Raises:
            CommandFailed: the file could not be written.
            Unreachable: there is no SSH connection.
        """
