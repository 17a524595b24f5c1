"""The experiment file: what a person writes, as frozen types; refused with the path of what is wrong.

    tests/experiments/demo.toml: faults[1].target: no link "rtsw9:host1" ...; did you mean rtsw1:host1:rxe0?

`load` needs no lab. `harness.fit` then holds the experiment against a lab's topology.

Fault keys: `kind`, `target` (a name, or a list from which the seed chooses), `at` (a time since the
workload's start, or a range `["6s", "9s"]` from which the seed draws), `for`, optionally `id` (default: the
kind, numbered when it repeats), and the kind's own parameters under `set = { ... }`, which go to the injector
as they are.

`[capture]` has `ports`: switch ports whose packets are kept and checked (`rtsw2:host4:rxe0`, or `host4:rxe0` for the
port that faces it, or `rtsw1:ctsw1`).
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from harness.job_words import parse_checkpoint, parse_grid, parse_phase
from harness.metrics import METRICS, Metric, lookup, nearest
from harness.needs import Need, parse_need
from harness.quantities import parse_duration_ns, parse_size_bytes
from testbed.errors import ConfigError, UsageError
from traffic.collective import AUTO, ITEM_BYTES, REDOPS
from traffic.flow import SPREADS, VERBS, check_qp
from traffic.job import JobPhase, JobSpec
from traffic.job import check as check_job
from traffic.matrix import PATTERNS
from traffic.plan import QpParams
from traffic.ranks import WARMUP
from traffic.schedules import COLLECTIVES, algorithms_for
from traffic.storage import MODES, Storage

__all__ = [
    "Collective",
    "Expectation",
    "Experiment",
    "Fault",
    "Flow",
    "Job",
    "Scalar",
    "Workload",
    "decode",
    "load",
]

Scalar = str | int | float | bool
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective, repeated. Exactly one of `iterations` and `duration_ns` is set.

    `ranks` are RNICs (`host1:rxe0`) in rank order; empty: one a host, on its first RNIC. `compute_units` is
    the work each rank's GPU does before each iteration (0: none); a unit is one block of the soft GPU's
    matrix product. `warmup` iterations come first and are not counted. The other words are those of
    `traffic.collective.CollectiveSpec`.
    """

    collective: str
    algorithm: str
    size_bytes: int
    dtype: str
    op: str
    root: int
    skew: float
    in_place: bool
    ranks: tuple[str, ...]
    iterations: int | None
    duration_ns: int | None
    compute_units: int
    warmup: int
    qp: QpParams = field(default_factory=QpParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """An elephant: `qps` queue pairs with messages of `size_bytes`, `depth` outstanding on each.

    `flow` is the verb, `spread` how messages get on the queue pairs, both as in `traffic.flow.FlowSpec`. With a
    `pattern` (`traffic.matrix`) there are several alike, between `pairs` that `harness.fit` finds; `src` and `dst` are
    empty then.
    """

    flow: str
    src: str
    dst: str
    pattern: str | None = None
    pairs: tuple[tuple[str, str], ...] = ()
    qps: int
    spread: str
    size_bytes: int
    depth: int
    duration_ns: int
    qp: QpParams = field(default_factory=QpParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job on a grid of ranks (`traffic.job.JobSpec`); it goes by iterations and has no duration."""

    grid: tuple[tuple[str, int], ...]
    phases: tuple[JobPhase, ...]
    dtype: str
    op: str
    ranks: tuple[str, ...]
    iterations: int
    warmup: int
    compute_units: int
    storage: Storage | None = None
    qp: QpParams = field(default_factory=QpParams)

    @property
    def duration_ns(self) -> None:
        """Nobody can say."""
        return


Workload = Collective | Flow | Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault as written: the seed still has to choose one of `targets` and a time (`harness.plan`)."""

    id: str
    kind: str
    targets: tuple[str, ...]
    at_earliest_ns: int
    at_latest_ns: int
    duration_ns: int
    parameters: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A bound on a metric, in the metric's unit. At least one of the three is set; `equals` stands alone."""

    metric: Metric
    minimum: float | None = None
    maximum: float | None = None
    equals: Scalar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A whole experiment file. `source` is where it came from, for messages; `capture` are switch ports."""

    name: str
    seed: int
    needs: tuple[Need, ...]
    workload: Workload
    faults: tuple[Fault, ...]
    expectations: tuple[Expectation, ...]
    source: str
    capture: tuple[str, ...] = ()


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what stands in the file, before quantities are read."""


class _LabFile(_File, frozen=True, kw_only=True):
    needs: tuple[str, ...] = ()


class _CollectiveFile(_File, frozen=True, kw_only=True):
    collective: str
    size: str
    algorithm: str = "auto"
    dtype: str = "fp32"
    op: str = "sum"
    root: Annotated[int, msgspec.Meta(ge=0)] = 0
    skew: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    in_place: bool = False
    ranks: tuple[str, ...] = ()
    iterations: Annotated[int, msgspec.Meta(ge=1)] | None = None
    duration: str | None = None
    compute_units: Annotated[int, msgspec.Meta(ge=0)] = 0
    warmup: Annotated[int, msgspec.Meta(ge=0)] = WARMUP
    qp: dict[str, int] = {}


class _StorageFile(_File, frozen=True, kw_only=True):
    host: str
    ingest: str | None = None
    checkpoint: str | None = None


class _JobFile(_File, frozen=True, kw_only=True):
    grid: str
    phases: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    iterations: Annotated[int, msgspec.Meta(ge=1)]
    dtype: str = "fp32"
    op: str = "sum"
    ranks: tuple[str, ...] = ()
    warmup: Annotated[int, msgspec.Meta(ge=0)] = WARMUP
    compute_units: Annotated[int, msgspec.Meta(ge=0)] = 0
    storage: _StorageFile | None = None
    qp: dict[str, int] = {}


class _FlowFile(_File, frozen=True, kw_only=True):
    flow: str
    duration: str
    src: str = ""
    dst: str = ""
    pattern: str | None = None
    spread: str = "each"
    size: str = "64KiB"
    qps: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    depth: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 16
    qp: dict[str, int] = {}


class _FaultFile(_File, frozen=True, kw_only=True):
    kind: str
    target: str | tuple[str, ...]
    at: str | tuple[str, str]
    duration: str = msgspec.field(name="for")
    id: str | None = None
    parameters: dict[str, Scalar] = msgspec.field(name="set", default_factory=dict)


class _CaptureFile(_File, frozen=True, kw_only=True):
    ports: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]


class _ExpectFile(_File, frozen=True, kw_only=True):
    metric: str
    min: str | int | float | None = None
    max: str | int | float | None = None
    equals: Scalar | None = None


class _ExperimentFile(_File, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9.-]{0,62}$")]
    workload: dict[str, Any]
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 1
    lab: _LabFile = msgspec.field(default_factory=_LabFile)
    capture: _CaptureFile | None = None
    faults: tuple[_FaultFile, ...] = ()
    expect: tuple[_ExpectFile, ...] = ()


_AT_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_KEYS = {
    "": ("name", "seed", "lab", "workload", "faults", "expect", "capture"),
    "capture": ("ports",),
    "lab": ("needs",),
    "faults": ("id", "kind", "target", "at", "for", "set"),
    "expect": ("metric", "min", "max", "equals"),
    "collective": tuple(_CollectiveFile.__struct_fields__),
    "flow": tuple(_FlowFile.__struct_fields__),
    "job": tuple(_JobFile.__struct_fields__),
    "storage": tuple(_StorageFile.__struct_fields__),
}


def load(path: Path) -> Experiment:
    """Read an experiment file.

    Raises:
        ConfigError: not readable, not TOML, or something in it makes no sense; with the path of it.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; name an experiment file (TOML)") from error
    return decode(content, source=str(path))


def decode(content: bytes, *, source: str) -> Experiment:
    """Decode the bytes of an experiment file; `source` is what messages call it.

    Raises:
        ConfigError: as `load`.
    """
    try:
        raw = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: not TOML: {error}") from error
    parsed = _convert(raw, _ExperimentFile, source, "")
    faults = _faults(parsed.faults, source)
    return Experiment(
        name=parsed.name,
        seed=parsed.seed,
        needs=tuple(
            _read(parse_need, text, source, f"lab.needs[{index}]") for index, text in enumerate(parsed.lab.needs)
        ),
        workload=_workload(parsed.workload, source),
        faults=faults,
        expectations=tuple(
            _expectation(item, f"expect[{index}]", source, faults) for index, item in enumerate(parsed.expect)
        ),
        source=source,
        capture=parsed.capture.ports if parsed.capture else (),
    )


def _fail(source: str, path: str, message: str) -> ConfigError:
    return ConfigError(f"{source}: {path}: {message}" if path else f"{source}: {message}")


def _convert(raw: Any, type_: type[_T], source: str, prefix: str) -> _T:
    try:
        return msgspec.convert(raw, type_)
    except msgspec.ValidationError as error:
        raise _fail(source, *_explain(str(error), prefix)) from error


def _explain(message: str, prefix: str) -> tuple[str, str]:
    """Split msgspec's message into the path inside the file and a sentence; hint at a misspelt key."""
    match = _AT_PATH.search(message)
    inner = match["path"] if match else ""
    sentence = _AT_PATH.sub("", message)
    path = ".".join(part for part in (prefix.partition("/")[0], inner) if part)
    unknown = _UNKNOWN.match(sentence)
    if unknown:
        section = prefix.partition("/")[2] or re.sub(r"\[.*", "", inner)
        keys = _KEYS.get(section, ())
        near = difflib.get_close_matches(unknown["name"], keys, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(keys)}"
        sentence = f'no key "{unknown["name"]}" here; {hint}'
    return path, sentence[:1].lower() + sentence[1:]


def _read(parser: Callable[[str], _T], text: str, source: str, path: str) -> _T:
    try:
        return parser(text)
    except ValueError as error:
        raise _fail(source, path, str(error)) from error


def _workload(raw: dict[str, Any], source: str) -> Workload:
    if sum(kind in raw for kind in ("collective", "flow", "grid")) != 1:
        said = 'say what runs: collective = "all-reduce", or flow = "write", or a job on a grid = "tp=2,dp=2"'
        raise _fail(source, "workload", said)
    if "grid" in raw:
        return _job(_convert(raw, _JobFile, source, "workload/job"), source)
    if "flow" in raw:
        flow = _convert(raw, _FlowFile, source, "workload/flow")
        _one_of(flow.flow, VERBS, "flow", source)
        _one_of(flow.spread, SPREADS, "spread", source)
        if flow.pattern is not None:
            _one_of(flow.pattern, PATTERNS, "pattern", source)
        if bool(flow.src and flow.dst) == bool(flow.pattern) or bool(flow.src) != bool(flow.dst):
            raise _fail(source, "workload", 'name src and dst, or a pattern such as "incast"')
        return Flow(
            flow=flow.flow,
            src=flow.src,
            dst=flow.dst,
            pattern=flow.pattern,
            qps=flow.qps,
            spread=flow.spread,
            size_bytes=_positive(parse_size_bytes, flow.size, source, "workload.size"),
            depth=flow.depth,
            duration_ns=_positive(parse_duration_ns, flow.duration, source, "workload.duration"),
            qp=_qp(flow.qp, source),
        )
    collective = _convert(raw, _CollectiveFile, source, "workload/collective")
    if (collective.iterations is None) == (collective.duration is None):
        raise _fail(source, "workload", "give either iterations or duration")
    _one_of(collective.collective, COLLECTIVES, "collective", source)
    _one_of(collective.algorithm, (AUTO, *algorithms_for(collective.collective)), "algorithm", source)
    _one_of(collective.dtype, tuple(ITEM_BYTES), "dtype", source)
    _one_of(collective.op, REDOPS, "op", source)
    return Collective(
        collective=collective.collective,
        algorithm=collective.algorithm,
        dtype=collective.dtype,
        op=collective.op,
        root=collective.root,
        skew=collective.skew,
        in_place=collective.in_place,
        size_bytes=_positive(parse_size_bytes, collective.size, source, "workload.size"),
        ranks=collective.ranks,
        iterations=collective.iterations,
        duration_ns=None
        if collective.duration is None
        else _positive(parse_duration_ns, collective.duration, source, "workload.duration"),
        compute_units=collective.compute_units,
        warmup=collective.warmup,
        qp=_qp(collective.qp, source),
    )


def _job(job: _JobFile, source: str) -> Job:
    _one_of(job.dtype, tuple(ITEM_BYTES), "dtype", source)
    _one_of(job.op, REDOPS, "op", source)
    phases = tuple(
        _read(parse_phase, text, source, f"workload.phases[{index}]") for index, text in enumerate(job.phases)
    )
    made = Job(
        grid=_read(parse_grid, job.grid, source, "workload.grid"),
        phases=phases,
        dtype=job.dtype,
        op=job.op,
        ranks=job.ranks,
        iterations=job.iterations,
        warmup=job.warmup,
        compute_units=job.compute_units,
        storage=None if job.storage is None else _storage(job.storage, source),
        qp=_qp(job.qp, source),
    )
    try:
        check_job(
            JobSpec(
                grid=made.grid,
                phases=phases,
                dtype=made.dtype,
                redop=made.op,
                iterations=made.iterations,
                storage=made.storage,
            )
        )
    except UsageError as error:
        raise _fail(source, "workload", str(error)) from error
    return made


def _storage(storage: _StorageFile, source: str) -> Storage:
    size_bytes, every, mode = 0, 1, MODES[0]
    if storage.checkpoint is not None:
        size_bytes, every, mode = _read(parse_checkpoint, storage.checkpoint, source, "workload.storage.checkpoint")
    ingest = storage.ingest
    return Storage(
        host=storage.host,
        ingest_bytes=0 if ingest is None else _read(parse_size_bytes, ingest, source, "workload.storage.ingest"),
        checkpoint_bytes=size_bytes,
        every=every,
        mode=mode,
    )


def _qp(values: dict[str, int], source: str) -> QpParams:
    try:
        params = QpParams.of(values)
        check_qp(params)
    except UsageError as error:
        raise _fail(source, "workload.qp", str(error)) from error
    return params


def _one_of(value: str, known: tuple[str, ...], key: str, source: str) -> None:
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}"
        raise _fail(source, f"workload.{key}", f'no {key} "{value}"; {hint}')


def _positive(parser: Callable[[str], int], text: str, source: str, path: str) -> int:
    value = _read(parser, text, source, path)
    if value <= 0:
        raise _fail(source, path, "must be more than 0")
    return value


def _faults(items: tuple[_FaultFile, ...], source: str) -> tuple[Fault, ...]:
    seen: dict[str, str] = {}
    faults = []
    for index, item in enumerate(items):
        path = f"faults[{index}]"
        fault = _fault(item, path, source, _fault_id(item, seen))
        if fault.id in seen:
            raise _fail(source, f"{path}.id", f'"{fault.id}" is also the id of {seen[fault.id]}; choose another')
        seen[fault.id] = path
        faults.append(fault)
    return tuple(faults)


def _fault_id(item: _FaultFile, seen: dict[str, str]) -> str:
    if item.id is not None:
        return item.id
    number = 1
    while (candidate := item.kind if number == 1 else f"{item.kind}-{number}") in seen:
        number += 1
    return candidate


def _fault(item: _FaultFile, path: str, source: str, fault_id: str) -> Fault:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", fault_id):
        raise _fail(source, f"{path}.id", f'"{fault_id}" must be lower-case letters, digits, dots and dashes')
    if f"recovery.{fault_id}" in METRICS:
        raise _fail(source, f"{path}.id", f"recovery.{fault_id} is a metric of its own; call the fault something else")
    targets = (item.target,) if isinstance(item.target, str) else item.target
    if not targets:
        raise _fail(source, f"{path}.target", "an empty list: name at least one target")
    bounds = (item.at, item.at) if isinstance(item.at, str) else item.at
    earliest, latest = (_read(parse_duration_ns, text, source, f"{path}.at") for text in bounds)
    if latest < earliest:
        raise _fail(source, f"{path}.at", f"the range ends ({bounds[1]}) before it begins ({bounds[0]})")
    return Fault(
        id=fault_id,
        kind=item.kind,
        targets=targets,
        at_earliest_ns=earliest,
        at_latest_ns=latest,
        duration_ns=_positive(parse_duration_ns, item.duration, source, f"{path}.for"),
        parameters=dict(item.parameters),
    )


def _expectation(item: _ExpectFile, path: str, source: str, faults: tuple[Fault, ...]) -> Expectation:
    ids = [fault.id for fault in faults]
    metric = lookup(item.metric, ids)
    if metric is None:
        near = nearest(item.metric, ids)
        hint = f"; did you mean {near}?" if near else ""
        raise _fail(source, f"{path}.metric", f'no metric "{item.metric}"{hint}')
    if item.equals is not None and (item.min is not None or item.max is not None):
        raise _fail(source, path, "equals stands alone; drop min and max")
    if item.equals is None and item.min is None and item.max is None:
        raise _fail(source, path, "no bound: give min, max or equals")
    if metric.unit == "host" and not isinstance(item.equals, str):
        raise _fail(source, path, f'{metric.name} is a name: write equals = "host3"')
    return Expectation(
        metric=metric,
        minimum=_bound(item.min, metric, f"{path}.min", source),
        maximum=_bound(item.max, metric, f"{path}.max", source),
        equals=item.equals,
    )


def _bound(value: str | float | None, metric: Metric, path: str, source: str) -> float | None:
    """A bound in the metric's unit: "3s" for a time, a bare number for all others."""
    if value is None:
        return None
    if metric.unit == "s":
        if not isinstance(value, str):
            raise _fail(source, path, f'a time needs its unit: write "{value}s" if seconds are meant')
        return _read(parse_duration_ns, value, source, path) / 1e9
    if isinstance(value, str):
        raise _fail(source, path, f"{metric.name} is a plain number ({metric.unit}); drop the quotes and the unit")
    return float(value) if metric.unit != "count" else value
