"""Specification of a workload of programs: which command runs on which RNICs, and how its progress is read. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from faultbed.testbed.errors import UsageError
from faultbed.testbed.suggestions import hint
from faultbed.traffic.node.programs.placeholders import names_in
from faultbed.traffic.node.programs.readers import COUNTERS, LINES, NAMES, reader_of

__all__ = [
    "PLACEHOLDERS",
    "RESTARTS",
    "CommandSpec",
    "Restart",
    "Role",
    "check_progress",
    "check_role_name",
    "words_of",
]

Restart = Literal["never", "on-failure"]
RESTARTS: tuple[Restart, ...] = get_args(Restart)

PLACEHOLDERS: Mapping[str, str] = {
    "rnic": "name of the process's RNIC, such as rxe0",
    "gid": "index of the RNIC's RoCE v2 GID, read when the process is started",
    "addr": "address of the RNIC",
    "role": "name of the process's role",
    "rank": "number of the process, from 0 in the order of the roles",
    "world": "number of all processes",
    "hosts": "addresses of all processes, by rank, with commas between them",
    "attempt": "1, and one more after each restart",
}
"""Placeholders of every command, and what each becomes. The name of a role is one, too: its first address."""

_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
_SHELL_SIGN = re.compile(r"\|\||&&|>>|[|&;<>`*?]|\$[A-Za-z_({]|(?:^|\s)~")
_ROLE_SIGNS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One role: a process with these `words` on each of its RNICs. Only words of a `shell` go through one.

    A role that `serves` does not end by itself: it is ended after the others.
    """

    name: str
    words: tuple[str, ...]
    rnics: tuple[str, ...]
    serves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """Programs on hosts, in the order in which their roles are started.

    Attributes:
        progress: how progress is read (`faultbed.traffic.node.programs.readers`).
        duration_s: time after the first progress at which the programs are ended; None: they end by themselves.
        timeout_s: the longest time from the first start of a process until its last end.
        ready_s: the longest wait, before the next role is started, for a process to listen or to show progress.
        environment: further environment variables; their values may have placeholders.
        directory: working directory on the hosts; empty: a folder of the run with the `files`.
        files: content by name of files that each process finds in that folder.
        attempts: the most starts of a process with `restart = "on-failure"`.
    """

    roles: tuple[Role, ...]
    progress: str
    duration_s: float | None = None
    timeout_s: float = 600.0
    ready_s: float = 10.0
    shell: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    restart: Restart = "never"
    attempts: int = 10

    @property
    def rnics(self) -> tuple[str, ...]:
        """The RNIC of each process, by rank."""
        return tuple(rnic for role in self.roles for rnic in role.rnics)


def words_of(command: str | Sequence[str], roles: Collection[str], *, shell: bool) -> tuple[str, ...]:
    """Return the words of a command after a check of its placeholders; with `shell`, the text as a single word.

    Raises:
        UsageError: it is empty, needs a shell, or has an unknown placeholder.
    """
    words: tuple[str, ...]
    if shell:
        words = (command if isinstance(command, str) else shlex.join(command),)
    else:
        words = tuple(_split(command) if isinstance(command, str) else command)
    if not words or not words[0].strip():
        raise UsageError("the command is empty; write the program and its arguments")
    if isinstance(command, str) and not shell:
        _refuse_shell_signs(command, words)
    _refuse_unknown(words, roles)
    return words


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise UsageError(f"cannot split the command into words: {error}; close the quotes, or write a list") from error


def _refuse_shell_signs(command: str, words: Sequence[str]) -> None:
    """Reject what only a shell understands. In quotes it is plain text for the program, as in `sh -c '...'`."""
    sign = _SHELL_SIGN.search(_QUOTED.sub("", command))
    if sign is not None:
        raise UsageError(
            f"{sign[0].strip()} needs a shell, and {words[0]} is started without one; write shell = true, or put the "
            "text in quotes if the program is to get it as it is"
        )


def _refuse_unknown(words: Sequence[str], roles: Collection[str]) -> None:
    known = (*PLACEHOLDERS, *roles)
    for name in (name for word in words for name in names_in(word)):
        if name not in known:
            raise UsageError(f"no placeholder {{{name}}}; {hint(name, known)}; {{{{{name}}}}} is the text itself")


def check_role_name(name: str) -> None:
    """Reject a role that could not be a placeholder or part of a file's name.

    Raises:
        UsageError: the message says why.
    """
    if name in PLACEHOLDERS:
        raise UsageError(f'"{name}" is a placeholder of its own ({PLACEHOLDERS[name]}); call the role something else')
    if not name or not set(name) <= _ROLE_SIGNS or not name[0].isalpha() or len(name) > 32:  # noqa: PLR2004
        raise UsageError(f'"{name[:40]}" cannot name a role; write lower-case letters, digits, "-" and "_"')


def check_progress(progress: str) -> None:
    """Reject an unknown reader, and a regular expression that is none.

    Raises:
        UsageError: the message names the readers.
    """
    try:
        reader_of(progress)
    except KeyError:
        known = f"choose one of {', '.join(NAMES)}, or {LINES}REGEX"
        raise UsageError(f'no reader "{progress[:40]}"; {known}') from None
    except ValueError as error:
        raise UsageError(f"{error}; correct what stands after {LINES}") from error


def counts_all_traffic(progress: str) -> bool:
    """Return whether a reader counts everything on the RNIC, not the program's own data alone."""
    return progress == COUNTERS
