"""`[workload]` with `command`: programs on hosts, as a run takes them (`faultbed.traffic.programs.command_spec`).

Files that the programs need are beside the experiment file. A run directory has copies of them below `program-files/`,
which are used if the path does not exist: `repro.sh` runs the copy of the experiment in the run directory.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from faultbed.harness.experiment.declare.field_types import (
    Choice,
    Count,
    Duration,
    FieldType,
    Flag,
    Selector,
    Several,
    Text,
    expected,
)
from faultbed.harness.experiment.declare.section import Named, Section, Wrong
from faultbed.harness.experiment.replayed import file_or_copy
from faultbed.testbed.errors import UsageError
from faultbed.traffic.node.programs.placeholders import names_in
from faultbed.traffic.node.programs.readers import LINES, NAMES
from faultbed.traffic.programs.command_spec import (
    PLACEHOLDERS,
    RESTARTS,
    CommandSpec,
    Restart,
    Role,
    check_progress,
    check_role_name,
    words_of,
)

__all__ = ["COPY", "Command", "command_spec", "keep_files"]

COPY = "program-files"
_MOST_FILE_BYTES = 4 << 20

Words = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Commands(FieldType):
    """A command for all roles, or a table with one for each role. A command is text, or a list of words."""

    _: KW_ONLY
    kind: ClassVar[str] = "text, list of words, or table by role"

    def read(self, raw: Any) -> Words | dict[str, Words]:
        """Return the command, or the commands by role."""
        if isinstance(raw, Mapping):
            return {str(role): _words(command) for role, command in raw.items()}
        return _words(raw)

    def write(self, value: Any) -> Any:
        """Return the raw form."""
        if isinstance(value, Mapping):
            return {role: self.write(command) for role, command in value.items()}
        return value if isinstance(value, str) else list(value)

    def schema(self) -> dict[str, Any]:
        """Return the schema of the three forms."""
        one = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
        return {"anyOf": [*one["anyOf"], {"type": "object", "additionalProperties": one}]}


def _words(raw: Any) -> Words:
    if isinstance(raw, str):
        return raw
    if isinstance(raw, list | tuple) and raw and all(isinstance(word, str) for word in raw):
        return tuple(raw)
    raise expected("a command", raw, "write text, a list of words, or a table with one of them for each role")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Section):
    """Programs of other authors on hosts: `ib_write_bw`, nccl-tests, fio, a training script."""

    command: Annotated[
        Words | dict[str, Words],
        _Commands(
            "What is started: a command for all roles, or one for each role. "
            f"Placeholders: {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}, and each role's name for its first "
            "address. Without `shell` it is split into words and started as it is."
        ),
    ]
    roles: Annotated[
        dict[str, tuple[str, ...]],
        Named(
            "RNICs of each role, in the order in which the roles are started; a process runs for each RNIC.",
            of=Several("RNICs.", of=Selector("RNIC of a process."), or_one=True, least=1),
        ),
    ]
    progress: Annotated[
        str,
        Text(
            f"How its progress is read: {', '.join(NAMES)}, or {LINES} and a regular expression, of which each "
            "matching line is an iteration (a group `bytes` has its bytes)."
        ),
    ]
    serves: Annotated[
        tuple[str, ...],
        Several("Roles that do not end by themselves: they are ended after the others.", of=Text("A role.")),
    ] = ()
    duration_ns: Annotated[
        int | None,
        Duration("Time after the first progress at which the programs are ended.", key="duration", above=0),
    ] = None
    timeout_ns: Annotated[
        int, Duration("Longest time of the programs, all restarts included.", key="timeout", above=0)
    ] = 600 * 10**9
    shell: Annotated[bool, Flag("Start each command by `sh -c`.")] = False
    environment: Annotated[
        dict[str, str], Named("Environment variables, with placeholders.", of=Text("Value of a variable."))
    ] = field(default_factory=dict)
    directory: Annotated[str, Text("Working directory on the hosts; empty: a folder with the `files`.")] = ""
    files: Annotated[
        tuple[str, ...],
        Several("Files that each process finds in its working directory.", of=Text("A path beside this file.")),
    ] = ()
    sha256: tuple[str, ...] = ()
    restart: Annotated[Restart, Choice("Whether a process that fails is started again.", among=RESTARTS)] = "never"
    attempts: Annotated[int, Count("Most starts of a process with restart.", least=1, most=1000)] = 10

    def problems(self) -> Iterable[tuple[str, str]]:
        """Return names, commands and readers that do not fit together."""
        if not self.roles:
            yield "roles", 'no role has an RNIC; write roles = { client = "host1:rxe0" }'
        for role in self.roles:
            try:
                check_role_name(role)
            except UsageError as error:
                yield f"roles.{role}", str(error)
        for index, role in enumerate(self.serves):
            if role not in self.roles:
                yield f"serves[{index}]", f'no role "{role}"; choose one of {", ".join(self.roles)}'
        if self.roles and set(self.roles) <= set(self.serves):
            yield "serves", "every role serves, so nothing would end the run; leave one of them out"
        yield from self._problems_of_commands()
        try:
            check_progress(self.progress)
        except UsageError as error:
            yield "progress", str(error)
        if self.directory and self.files:
            yield (
                "files",
                "they are put into a folder of the run; leave directory out, or name them by their full paths",
            )
        if len({Path(file).name for file in self.files}) < len(self.files):
            yield "files", "two of them have the same name, and all are in one folder; rename one"

    def _problems_of_commands(self) -> Iterable[tuple[str, str]]:
        if isinstance(self.command, Mapping):
            for role in self.command.keys() - self.roles.keys():
                yield f"command.{role}", f'there is no RNIC for the role "{role}"; add it to roles'
            for role in self.roles.keys() - self.command.keys():
                yield f"roles.{role}", f'there is no command for the role "{role}"; add it to command'
        for role in self.roles:
            try:
                if not isinstance(self.command, Mapping) or role in self.command:
                    self.words(role)
            except UsageError as error:
                yield f"command.{role}" if isinstance(self.command, Mapping) else "command", str(error)
                return
        for name, value in self.environment.items():
            for placeholder in names_in(value):
                if placeholder not in (*PLACEHOLDERS, *self.roles):
                    yield f"environment.{name}", f"no placeholder {{{placeholder}}}; {{{{{placeholder}}}}} is the text"

    def words(self, role: str) -> tuple[str, ...]:
        """Return the words of a role's command.

        A word of the command for all roles that is only the address of the own role is left out: `ib_write_bw` is a
        client with the address of its server, and the server without one.

        Raises:
            UsageError: the command is invalid.
        """
        if isinstance(self.command, Mapping):
            return words_of(self.command[role], self.roles, shell=self.shell)
        words = words_of(self.command, self.roles, shell=self.shell)
        return words if self.shell else tuple(word for word in words if word != f"{{{role}}}")

    def decoded(self, source: str) -> Command:
        """Return the section with the digests of its files.

        Raises:
            Wrong: a file cannot be read.
        """
        return replace(self, sha256=tuple(hashlib.sha256(content).hexdigest() for content in self._contents(source)))

    def _contents(self, source: str) -> Sequence[bytes]:
        contents = []
        for index, text in enumerate(self.files):
            try:
                content = file_or_copy(text, source, COPY).read_bytes()
            except OSError as error:
                raise Wrong(
                    f"files[{index}]", f"{text}: {error.strerror}; name a file beside the experiment"
                ) from error
            if len(content) > _MOST_FILE_BYTES:
                raise Wrong(f"files[{index}]", f"{text} has more than 4 MiB; put it on the hosts, and name it there")
            contents.append(content)
        return contents

    def contents(self, source: str) -> dict[str, bytes]:
        """Return the content of each file by its name.

        Raises:
            UsageError: a file cannot be read, or is another one than that which was planned.
        """
        contents = self._contents(source)
        for text, content, digest in zip(self.files, contents, self.sha256, strict=True):
            if hashlib.sha256(content).hexdigest() != digest:
                raise UsageError(f"{text} has changed since the run was planned; plan it again")
        return {Path(text).name: content for text, content in zip(self.files, contents, strict=True)}


def command_spec(work: Command, source: str) -> CommandSpec:
    """Return a fitted workload as the traffic package specifies it.

    Raises:
        UsageError: a file cannot be read, or has changed since the run was planned.
    """
    return CommandSpec(
        roles=tuple(
            Role(name=role, words=work.words(role), rnics=rnics, serves=role in work.serves)
            for role, rnics in work.roles.items()
        ),
        progress=work.progress,
        duration_s=None if work.duration_ns is None else work.duration_ns / 1e9,
        timeout_s=work.timeout_ns / 1e9,
        shell=work.shell,
        environment=work.environment,
        directory=work.directory,
        files=work.contents(source),
        restart=work.restart,
        attempts=work.attempts,
    )


def keep_files(work: Command, source: str, folder: Path) -> None:
    """Copy the files of the programs to `program-files/` in `folder`.

    Raises:
        UsageError: they cannot be copied.
    """
    if not work.files:
        return
    target = folder / COPY
    try:
        target.mkdir(exist_ok=True)
        for text in work.files:
            shutil.copy(file_or_copy(text, source, COPY), target / Path(text).name)
    except OSError as error:
        raise UsageError(f"{target}: the files cannot be kept there: {error.strerror or error}") from error
