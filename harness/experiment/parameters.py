"""Parameters of an experiment file by their paths: which there are, and the file with other values. Pure.

    faults[0].set.share    workload.size    workload.qp.timeout    workload.phases[1]    expect[0].max

A path is written as error messages print it. It names a value that the file has or may have: a key of a section, or a
parameter of a fault's kind.

A value is text. If it is a number, true or false, it becomes that, unless the experiment's type requires a string.
Values of one path are separated by commas; a value that contains a comma is written in double quotes.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import itertools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faultbed.harness.experiment.experiment_file import SECTION_KEYS, Experiment, Scalar, decode
from faultbed.harness.experiment.toml_text import experiment_toml
from faultbed.harness.experiment.workload_file import KEYS as WORKLOAD_KEYS
from faultbed.harness.experiment.workload_file import kinds_in
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.leaves import leaves
from faultbed.testbed.suggestions import first_of, nearest
from faultbed.testbed.text_files import decoded
from faultbed.traffic.engine.task_specs import QpParams

__all__ = ["Parameter", "known_paths", "parse", "with_values"]

_STEP = re.compile(r"(?P<key>[A-Za-z0-9_:-]+)(?:\[(?P<index>[0-9]+)\])?")
"""A key may be the name of a link, which has a colon: `fabric.weights.rtsw1:ctsw1`."""
_FIXED = frozenset({"name", "seed"})
"""Keys that name a run: a sweep names its runs itself, and --seed chooses the seed."""
_MAX_TEXT = 4000
"""Characters of one `--over`."""
_MAX_LISTED = 12
"""Paths that an error message lists."""
_SECTIONS = ("storage", "resilience")
"""Sections within `[workload]`; their keys are offered where the file has the section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A path and the values that a sweep gives it, in the order of the command line."""

    path: str
    values: tuple[str, ...]


def parse(text: str) -> Parameter:
    """Read `PATH=V1,V2,...`.

    Raises:
        UsageError: no path, no value, an empty value, or a value that appears twice.
    """
    path, equals, rest = text.partition("=")
    path = path.strip()
    if not equals or not path or not rest.strip():
        raise UsageError(f'--over {text}: write PATH=V1,V2,..., such as "faults[0].set.share=0.001,0.01"')
    if len(text) > _MAX_TEXT or not text.isprintable():
        raise UsageError(f"--over {path[:40]}: a control character, or more than {_MAX_TEXT} characters; correct it")
    values = tuple(value.strip() for value in next(csv.reader([rest], skipinitialspace=True)))
    if "" in values:
        raise UsageError(f"--over {text}: a value is empty; remove the comma")
    if twice := sorted({value for value in values if values.count(value) > 1}):
        raise UsageError(f"--over {text}: {twice[0]} appears twice; use --repeat to run a point several times")
    return Parameter(path=path, values=values)


def known_paths(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return every path of an experiment file (decoded from TOML) that has a value, or may have one."""
    paths = [path for path, _ in leaves(raw)]
    work = raw.get("workload")
    if isinstance(work, Mapping):
        for kind in kinds_in(work)[:1]:
            paths += [f"workload.{key}" for key in WORKLOAD_KEYS[kind] if key not in ("qp", *_SECTIONS)]
        paths += [f"workload.qp.{field.name}" for field in dataclasses.fields(QpParams)]
        for section in _SECTIONS:
            paths += [f"workload.{section}.{key}" for key in WORKLOAD_KEYS[section] if section in work]
    for section in ("faults", "stop", "expect"):
        items = raw.get(section)
        for index, item in enumerate(items if isinstance(items, list) else ()):
            paths += [f"{section}[{index}].{key}" for key in SECTION_KEYS[section] if key != "set"]
            fault = CATALOGUE.get(str(item.get("kind"))) if section == "faults" else None
            paths += [f"faults[{index}].set.{param.name}" for param in (fault.params if fault else ())]
    paths += [f"probe.{key}" for key in SECTION_KEYS["probe"] if "probe" in raw]
    paths += [f"fabric.{key}" for key in SECTION_KEYS["fabric"] if key != "weights"]
    return tuple(dict.fromkeys(path for path in paths if path not in _FIXED))


def with_values(content: bytes, values: Mapping[str, str], *, source: str) -> tuple[bytes, Experiment]:
    """Return the experiment file with these values by path, as TOML, and the experiment that it is.

    Comments of the file are lost. `source` is what messages call the file.

    Raises:
        ConfigError: a path is none of `known_paths` (the message has the nearest one), or a value is invalid there.
    """
    decode(content, source=source)  # so that errors of the file itself are not blamed on the values
    raw = tomllib.loads(decoded(content, source))
    known = known_paths(raw)
    for path in values:
        if path not in known:
            near = nearest(path, known)
            hint = f"did you mean {near}?" if near else f"choose one of {first_of(known, _MAX_LISTED)}"
            raise ConfigError(f"{source}: {path}: this experiment has no such parameter; {hint}")
    refused: ConfigError | None = None
    for readings in itertools.product(*(_readings(text) for text in values.values())):
        chosen = copy.deepcopy(raw)
        for path, value in zip(values, readings, strict=True):
            _place(chosen, path, value, source)
        text_of_experiment = experiment_toml(chosen)
        try:
            return text_of_experiment, decode(text_of_experiment, source=source)
        except ConfigError as error:
            # If a string is required, the error about the number hides the one about the string.
            refused = error if refused is None or "expected `str`" in str(refused) else refused
    settings = ", ".join(f"{path}={text}" for path, text in values.items())
    raise ConfigError(f"{refused} (with {settings})") from refused


def _readings(text: str) -> list[Scalar]:
    """Return what a text may be in an experiment file: a number, true or false, or a string."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, KeyError):  # no TOML, or a number of thousands of digits
        return [text]
    is_scalar = isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
    return [value, text] if is_scalar else [text]


def _place(raw: dict[str, Any], path: str, value: Scalar, source: str) -> None:
    """Set the value at a path. Missing sections on the way (such as `set`) are created."""
    steps: list[str | int] = []
    for part in path.split("."):
        match = _STEP.fullmatch(part)
        if match is None:
            raise ConfigError(f"{source}: {path}: not a path; write one like faults[0].set.share")
        steps += [match["key"], *([int(match["index"])] if match["index"] else [])]
    section: Any = raw
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if after is None:
            section[step] = value
        elif isinstance(step, int):
            section = section[step]
        else:
            section = section.setdefault(step, {})
