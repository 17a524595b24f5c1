"""The data of a scorecard: programs, a file each, and the published set of faults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from faultbed.harness.experiment.declare.field_types import Duration
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.suggestions import hint

__all__ = ["Program", "ScoredFault", "faults_named", "program_named", "programs"]

_FOLDER = Path(__file__).parent
_PROGRAMS = _FOLDER / "programs"
_TIME = Duration("A time.")
_T = TypeVar("_T")


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program: its workload, and by name what each setting changes in it.

    Attributes:
        about: what it is and does, in a few words.
        workload: the section of an experiment, without `duration`.
        settings: tables that are merged into the file, such as `{"workload": {"qp": {"timeout": 18}}}`.
    """

    about: str
    workload: dict[str, Any]
    settings: dict[str, dict[str, Any]]
    name: str = ""

    def ends(self) -> Mapping[str, str]:
        """Return the RNICs (or selectors of RNICs) of client and server, which the faults name.

        Raises:
            ConfigError: the workload does not have both.
        """
        roles: Mapping[str, Any] = self.workload.get("roles", {})
        named = {
            "client": roles.get("client", self.workload.get("src")),
            "server": roles.get("server", self.workload.get("dst")),
        }
        found = {role: rnic[0] if isinstance(rnic, list) and rnic else rnic for role, rnic in named.items()}
        for role, rnic in found.items():
            if not isinstance(rnic, str):
                raise ConfigError(
                    f"{self.name}: workload: no RNIC of the role {role}; write roles with client and server, or src "
                    "and dst"
                )
        return found


class ScoredFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"for_": "for"}):
    """A fault of the set. `for` and `after` (how long the program runs on) are times such as `2s`."""

    name: str
    kind: str
    target: str
    for_: str
    after: str = "20s"
    set: dict[str, Any] = {}

    @property
    def for_ns(self) -> int:
        """Its length."""
        return int(_TIME.read(self.for_))

    @property
    def after_ns(self) -> int:
        """How long the program runs on after it."""
        return int(_TIME.read(self.after))


class _FaultSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fault: tuple[ScoredFault, ...]


def programs() -> tuple[str, ...]:
    """Return the names of the programs that come with faultbed."""
    return tuple(sorted(path.stem for path in _PROGRAMS.glob("*.toml")))


def program_named(text: str) -> Program:
    """Read the program that a user means: a name of `programs`, or the path of a file.

    Raises:
        UsageError: there is no such program.
        ConfigError: its file is invalid.
    """
    path = Path(text) if text.endswith(".toml") else _PROGRAMS / f"{text}.toml"
    try:
        content = path.read_bytes()
    except OSError as error:
        advice = f"{hint(text, programs())}; a program of your own is the path of a .toml file"
        raise UsageError(f'no program "{text}" ({error.strerror}): {advice}') from None
    program = _decoded(content, Program, str(path))
    if not program.settings:
        raise ConfigError(f"{path}: settings: there is none; write [settings.default]")
    program = msgspec.structs.replace(program, name=path.stem)
    program.ends()
    return program


def faults_named(names: Iterable[str]) -> tuple[ScoredFault, ...]:
    """Return the faults of the published set with these names; without any, all of them.

    Raises:
        UsageError: the set has no fault of a name.
    """
    every = _decoded((_FOLDER / "faults.toml").read_bytes(), _FaultSet, "faults.toml").fault
    by_name = {fault.name: fault for fault in every}
    wanted = tuple(names)
    for name in wanted:
        if name not in by_name:
            raise UsageError(f'--fault: no fault "{name}" in the set; {hint(name, tuple(by_name))}')
    return tuple(by_name[name] for name in wanted) if wanted else every


def _decoded(content: bytes, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.toml.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where}: {error}; compare it with a program of faultbed's own") from error
