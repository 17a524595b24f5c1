"""What the rest of the house may ask of a machine: run a command, open a JSON-lines channel, put a file.

`Node` is the seam: `testbed.remote.ssh.SshNode` is the real one (SSH with pinned host keys); tests of pure logic bring
theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Channel", "Completed", "Node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A command that ended. `stdout` and `stderr` are text, decoded as UTF-8 with replacement."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str


class Channel(Protocol):
    """A program on a node, speaking JSON lines on its stdin and stdout.

    Its end of file is the far side's news that the controller is gone: closing or losing the channel is a signal.
    """

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one message as a line. Raises `Unreachable` when the far side is gone."""

    def receive(self, *, timeout_s: float) -> dict[str, Any] | None:
        """Read one message.

        Returns None when the far side has closed its stdout. A line that is not JSON is an error (`LabError`), and so
        is silence until the deadline (`CommandFailed`); both carry the tail of the far side's stderr.
        """

    def close(self) -> None:
        """Close both directions; the far side sees the end of its stdin. Safe to call twice."""


class Node(Protocol):
    """A machine of the lab, or a switch that lives in a network namespace of one."""

    @property
    def name(self) -> str:
        """The inventory's name."""

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
            CommandFailed: it ended with an error (only when `check`), or did not end by the deadline.
            Unreachable: no SSH connection.
        """

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a program that speaks JSON lines (`Channel`)."""

    def put(self, content: bytes, path: str, *, mode: int = 0o644) -> None:
        """Write a file on the node, whole or not at all (temporary name, then rename)."""
