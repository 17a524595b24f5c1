"""The experiment file as frozen types. An error names the file, the line and the path of the invalid value.

    tests/experiments/demo.toml:31: faults[1].for: "3" is not a duration; write a number and one of ns, us, ms, ...

Every section is declared once (`faultbed.harness.experiment.declare`): `ExperimentFile` below and the sections that it
names. `docs/experiment-file.md` has the table of all keys, `faultbed schema` the JSON Schema.

`load` needs no lab. `faultbed.harness.run.prepare.bind_to_lab` then compares the experiment with a lab's topology.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from faultbed.harness.experiment.bystander_file import Bystander
from faultbed.harness.experiment.declare.field_types import (
    Choice,
    Count,
    Duration,
    Number,
    Parsed,
    Scalar,
    Selector,
    Several,
    Text,
)
from faultbed.harness.experiment.declare.section import (
    AnyScalar,
    Named,
    Problem,
    Section,
    Table,
    Tables,
    Wrong,
    deeper,
    fields_of,
    read_fields,
)
from faultbed.harness.experiment.declare.toml_lines import line_of, located
from faultbed.harness.experiment.fabric_file import Fabric, FabricSection
from faultbed.harness.experiment.metrics import METRICS, Metric, Of, lookup, nearest
from faultbed.harness.experiment.needs import Need, parse_need
from faultbed.harness.experiment.stop import METRICS as STOP_METRICS
from faultbed.harness.experiment.stop import Condition
from faultbed.harness.experiment.stop import Metric as StopMetric
from faultbed.harness.experiment.workload_file import WORKLOAD, Workload
from faultbed.harness.verdict import Verdict
from faultbed.inject.kinds.fault_spec import Exposed
from faultbed.inject.param_units import why_no_quantity
from faultbed.testbed.errors import ConfigError
from faultbed.testbed.model.lab_kind import LabKind
from faultbed.testbed.packets.cnp_rule import CnpRule, CnpScope
from faultbed.testbed.suggestions import hint
from faultbed.testbed.text_files import decoded, read_text
from faultbed.testbed.units import RATE, TIME, parse_duration_ns, parse_rate_bps, parse_share
from faultbed.traffic.flows.flow_spec import FlowSpec
from faultbed.traffic.probes.prober import ProbeSpec

__all__ = [
    "FAULT_KEYS",
    "MOST_SEED",
    "Expectation",
    "Experiment",
    "ExperimentFile",
    "Fault",
    "Scalar",
    "decode",
    "decode_table",
    "load",
    "table_of",
]

T = TypeVar("T")
MOST_SEED = 2**63 - 1
_MOST_PROBLEMS = 40
"""Problems of a file that an error lists."""
_MOST_SIGNS = 480
"""Characters of a path or of a sentence in an error."""
_LABS: tuple[str, ...] = get_args(LabKind)
_PROBED_S = 24 * 3600.0
"""Duration of probes, longer than any run: the run stops them when its workload has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A bound on a metric, in the metric's unit: `minimum`, `maximum`, both of them, or `equals` alone.

    `of`: whether it is about this run or about the setting; None: as usual for the metric.
    """

    metric: Metric
    minimum: float | None = None
    maximum: float | None = None
    equals: Scalar | None = None
    of: Of | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A whole experiment file.

    Attributes:
        source: where it was read from, for messages.
        text: the file, in which `at` finds lines.
        capture: switch ports whose packets are kept.
        cnp: how receivers answer marked packets, by the documentation of their RNICs; None: not checked.
        lab_kind: the kind of lab that its names and bounds are for; None: both kinds.
        probe: None: no probes.
        fabric: None: the switches keep BGP's ECMP, as they are provisioned.
        bystander: None: no flow beside the workload.
    """

    name: str
    seed: int
    needs: tuple[Need, ...]
    workload: Workload
    faults: tuple[Fault, ...]
    expectations: tuple[Expectation, ...]
    source: str
    capture: tuple[str, ...] = ()
    cnp: CnpRule | None = None
    lab_kind: LabKind | None = None
    stops: tuple[Condition, ...] = ()
    probe: ProbeSpec | None = None
    fabric: Fabric | None = None
    bystander: FlowSpec | None = None
    text: str = field(default="", compare=False, repr=False)

    def at(self, path: str) -> str:
        """Return where a value of the file is, as messages begin: `demo.toml:12: faults[1].target`."""
        return located(self.source, self.text, path)


_LONGEST_ID = 63
"""Maximum length of a fault's id: `capture-<id>.pcapng` is a file name, and an id is a column of reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lab(Section):
    """What an experiment needs of a lab; one that lacks something is rejected."""

    kind: Annotated[LabKind | None, Choice("Kind of lab that the experiment is for; default: both.", among=_LABS)] = (
        None
    )
    needs: Annotated[
        tuple[Need, ...],
        Several(
            "What the lab must have.",
            of=Parsed("A need.", parser=parse_need, writer=str, example="uplinks >= 2"),
        ),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Section):
    """A fault: its kind, its target and its time."""

    kind: Annotated[str, Text("Kind of the fault; `faultbed faults` lists them.")]
    targets: Annotated[
        tuple[str, ...],
        Several(
            "Where it acts; of several, the seed chooses one.",
            key="target",
            of=Selector("A target."),
            or_one=True,
            least=1,
        ),
    ]
    at: Annotated[
        tuple[int, ...],
        Several(
            "Time after the workload's start, or a range from which the seed draws.",
            of=Duration("A time."),
            or_one=True,
            least=1,
        ),
    ]
    duration_ns: Annotated[int, Duration("How long it is on.", key="for", above=0)]
    id: Annotated[
        str,
        Text(
            "Name of the fault; default: its kind, numbered if it repeats.",
            pattern="[a-z0-9][a-z0-9.-]*",
            pattern_says="lower-case letters, digits, dots and dashes",
        ),
    ] = ""
    exposed: Annotated[
        Exposed,
        Choice(
            "What it must act on: something that the workload uses, or nothing that it uses.",
            among=get_args(Exposed),
        ),
    ] = "workload"
    parameters: Annotated[
        dict[str, Scalar],
        Named("Parameters of the kind, by name.", key="set", of=AnyScalar("Value of a parameter.")),
    ] = field(default_factory=dict)

    def problems(self) -> Iterable[tuple[str, str]]:
        """Return wrong ids, times in the wrong order, and parameters without their unit."""
        for parameter, value in self.parameters.items():
            if wrong := why_no_quantity(self.kind, parameter, value):
                yield f"set.{parameter}", wrong
        name = self.id or self.kind
        if len(name) > _LONGEST_ID:
            problem = f"has {len(name)} characters, and at most {_LONGEST_ID} fit; files of the run are named by it"
            yield "id", f'"{name[:16]}..." {problem}: shorten it'
        if f"recovery.{name}" in METRICS:
            yield "id", f"recovery.{name} is a metric of its own; call the fault something else"
        if len(self.at) > 2:  # noqa: PLR2004 - begin and end
            yield "at", f'{len(self.at)} times: write one, or a range such as ["6s", "9s"]'
        elif self.at[-1] < self.at[0]:
            yield "at", f"the range ends ({self.at[-1] / 1e9:g} s) before it begins ({self.at[0] / 1e9:g} s); swap them"


FAULT_KEYS = tuple(declared.key for declared in fields_of(Fault))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Capture(Section):
    """Packets that are kept and checked."""

    ports: Annotated[
        tuple[str, ...],
        Several(
            "Switch ports whose packets are kept and checked (`rtsw2:host4:rxe0`, or `host4:rxe0` for the port that "
            "faces it, or `rtsw1:ctsw1`).",
            of=Selector("A port."),
            least=1,
        ),
    ]
    cnp_interval_ns: Annotated[
        int | None,
        Duration(
            "Interval between CNPs that the documentation of the receivers' RNICs names; default: not checked.",
            key="cnp_interval",
            above=0,
        ),
    ] = None
    cnp_per: Annotated[
        CnpScope,
        Choice(
            "What the interval is for: each queue pair, each pair of addresses, or the port as a whole.",
            among=get_args(CnpScope),
        ),
    ] = "qp"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe(Section):
    """Datagrams over every path of the fabric while the workload runs."""

    rate: Annotated[float, Number("Datagrams a second on each queue pair.", above=0, most=1000)] = 0.5
    qps: Annotated[int, Count("Queue pairs between two RNICs.", least=1, most=64)] = 4

    def decoded(self, source: str) -> ProbeSpec:  # noqa: ARG002
        """Return the probes as traffic takes them."""
        return ProbeSpec(duration_s=_PROBED_S, per_s=self.rate, qps=self.qps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounded(Section):
    """Base of sections with a bound, whose type depends on the metric's unit."""

    metric: Annotated[str, Text("Name of the metric.")]
    min: Annotated[Scalar | None, AnyScalar("Lowest value.")] = None
    max: Annotated[Scalar | None, AnyScalar("Highest value.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expect(_Bounded):
    """A bound on a metric of the run: min, max or both, or equals alone."""

    equals: Annotated[Scalar | None, AnyScalar("The only value; stands alone.")] = None
    of: Annotated[
        Of | None,
        Choice(
            "What the bound is about: what happened in this run, or what runs of this experiment do in general.",
            among=get_args(Of),
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop(_Bounded):
    """A bound on a live value. If it is broken, all faults are cleared and the run ends."""

    lasting_ns: Annotated[int, Duration("How long the value must be beyond the bound.", key="for")] = 0
    verdict: Annotated[
        str, Choice("Verdict of a run that it ends.", among=(Verdict.FAIL.value, Verdict.INCONCLUSIVE.value))
    ] = Verdict.FAIL.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentFile(Section):
    """A name, a workload, and what happens to it."""

    name: Annotated[
        str,
        Text(
            "Name of the experiment, and of its run directories.",
            pattern="[a-z0-9][a-z0-9.-]{0,62}",
            pattern_says="1 to 63 lower-case letters, digits, dots and dashes",
        ),
    ]
    workload: Annotated[Workload, WORKLOAD]
    seed: Annotated[int, Count("Seed of all random choices.", least=0, most=MOST_SEED)] = 1
    lab: Annotated[_Lab, Table("What the experiment needs of a lab.", section=_Lab)] = field(default_factory=_Lab)
    fabric: Annotated[Fabric | None, Table("Routing scheme of the switches.", section=FabricSection)] = None
    capture: Annotated[_Capture | None, Table("Packets that are kept.", section=_Capture)] = None
    probe: Annotated[
        ProbeSpec | None,
        Table("Datagrams over every path of the fabric while the workload runs; may be empty.", section=_Probe),
    ] = None
    bystander: Annotated[
        FlowSpec | None, Table("A flow beside the workload that no fault should affect.", section=Bystander)
    ] = None
    faults: Annotated[tuple[Fault, ...], Tables("Faults with their times.", section=Fault)] = ()
    stop: Annotated[
        tuple[_Stop, ...],
        Tables("Bounds on live values; one that is broken clears all faults and ends the run.", section=_Stop),
    ] = ()
    expect: Annotated[tuple[_Expect, ...], Tables("Bounds on metrics of the run.", section=_Expect)] = ()


def load(path: Path) -> Experiment:
    """Read an experiment file.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has an invalid value, whose path the message names.
    """
    return decode(read_text(path, "name an experiment file (TOML)").encode(), source=str(path))


def decode(content: bytes, *, source: str) -> Experiment:
    """Decode the bytes of an experiment file; `source` is what messages call it.

    Raises:
        ConfigError: as `load`. It has a line for each invalid value.
    """
    text = decoded(content, source)
    return decode_table(table_of(content, source=source), source=source, text=text)


def table_of(content: bytes, *, source: str) -> dict[str, Any]:
    """Return the bytes of a file as TOML.

    Raises:
        ConfigError: they are not UTF-8, or not TOML.
    """
    try:
        return tomllib.loads(decoded(content, source))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not TOML: {error}; correct that line") from error


def decode_table(raw: Mapping[str, Any], *, source: str, text: str = "") -> Experiment:
    """Decode a file that was read as TOML. Messages have the lines of `text`, or only paths without it.

    Raises:
        ConfigError: as `load`. It has a line for each invalid value.
    """
    problems: list[Problem] = []
    values = read_fields(ExperimentFile, raw, "", problems, source)
    ids = _ids(raw.get("faults"))
    faults = [item for item in values.get("faults", ()) if item is not None]
    expectations = list(_each(values.get("expect", ()), "expect", problems, lambda item: _expectation(item, ids)))
    stops = list(_each(values.get("stop", ()), "stop", problems, lambda item: _stop(item, has_faults=bool(ids))))
    problems += _repeated_ids(ids)
    problems += _without_section(values.get("expect", ()), raw)
    if problems:
        raise ConfigError("\n".join(_sentences(problems, source, text)))
    file = ExperimentFile(**values)
    return Experiment(
        name=file.name,
        seed=file.seed,
        lab_kind=file.lab.kind,
        needs=file.lab.needs,
        workload=file.workload,
        faults=tuple(replace(fault, id=fault_id) for fault, fault_id in zip(faults, ids, strict=True)),
        expectations=tuple(expectations),
        source=source,
        text=text,
        capture=file.capture.ports if file.capture else (),
        cnp=_cnp(file.capture),
        probe=file.probe,
        fabric=file.fabric,
        bystander=file.bystander,
        stops=tuple(stops),
    )


def _sentences(problems: Sequence[Problem], source: str, text: str) -> Iterator[str]:
    """Return the first problems of a file in the order of their lines."""
    ordered = sorted(problems, key=lambda problem: line_of(text, problem.line_of or problem.path) or 0)
    yield from (_sentence(problem, source, text) for problem in ordered[:_MOST_PROBLEMS])
    if len(ordered) > _MOST_PROBLEMS:
        yield f"{source}: {len(ordered) - _MOST_PROBLEMS} more values are invalid; correct these first"


def _sentence(problem: Problem, source: str, text: str) -> str:
    """Return a problem as a person reads it: file, line, path, what is wrong and what to do."""
    line = line_of(text, problem.line_of or problem.path)
    parts = (source if line is None else f"{source}:{line}", _legible(problem.path), _legible(problem.sentence))
    return ": ".join(part for part in parts if part)


def _legible(text: str) -> str:
    """Return a text on one line, and the beginning and end of one that repeats a very long value."""
    line = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
    return line if len(line) <= _MOST_SIGNS else f"{line[: _MOST_SIGNS // 2]}...{line[-_MOST_SIGNS // 2 :]}"


def _each(items: Sequence[Any], name: str, problems: list[Problem], convert: Callable[[Any], T]) -> Iterator[T]:
    """Return what `convert` makes of each valid section of a list; collect what it refuses."""
    for index, item in enumerate(items):
        if item is None:
            continue
        try:
            yield convert(item)
        except Wrong as error:
            problems.append(Problem(path=deeper(f"{name}[{index}]", error.path), sentence=str(error)))


def _ids(raw: Any) -> list[str]:
    """Return the id of each fault of a file: the one that it names, or its kind, numbered if that repeats."""
    ids: list[str] = []
    for item in raw if isinstance(raw, list) else ():
        given = item.get("id") if isinstance(item, Mapping) else None
        kind = str(item.get("kind")) if isinstance(item, Mapping) else ""
        number = 1
        while (candidate := kind if number == 1 else f"{kind}-{number}") in ids:
            number += 1
        ids.append(given if isinstance(given, str) else candidate)
    return ids


def _repeated_ids(ids: Sequence[str]) -> Iterator[Problem]:
    for index, name in enumerate(ids):
        if name in ids[:index]:
            sentence = f'"{name}" is also the id of faults[{ids.index(name)}]; choose another'
            yield Problem(path=f"faults[{index}].id", sentence=sentence)


def _without_section(expected: Sequence[_Expect | None], raw: Mapping[str, Any]) -> Iterator[Problem]:
    """Return the bounds on metrics that need a section, or a key of one, that the file does not have."""
    capture = raw.get("capture")
    needs = {
        "bystander.": ("bystander" in raw, "a bystander: add [bystander] with src and dst"),
        "cnp.": (
            isinstance(capture, Mapping) and "cnp_interval" in capture,
            "the interval between CNPs that the RNIC's documentation names: add it as cnp_interval to [capture]",
        ),
    }
    for index, item in enumerate(expected):
        for prefix, (is_there, needed) in needs.items():
            if not is_there and item is not None and item.metric.startswith(prefix) and item.metric in METRICS:
                yield Problem(path=f"expect[{index}].metric", sentence=f"{item.metric} needs {needed}")


def _cnp(capture: _Capture | None) -> CnpRule | None:
    if capture is None or capture.cnp_interval_ns is None:
        return None
    return CnpRule(interval_ns=capture.cnp_interval_ns, per=capture.cnp_per)


def _stop(item: _Stop, *, has_faults: bool) -> Condition:
    if not has_faults:
        raise Wrong("", "stop conditions are checked while faults are on, and this experiment has none")
    if item.metric not in STOP_METRICS:
        raise Wrong("metric", f'no metric "{item.metric}"; {hint(item.metric, tuple(STOP_METRICS))}')
    metric = STOP_METRICS[item.metric]
    bounds_given = {"min": item.min, "max": item.max}
    if bounds_given[metric.bound] is None or sum(value is not None for value in bounds_given.values()) > 1:
        raise Wrong("", f"{metric.name} is bounded by {metric.bound} alone")
    bound = _bound(bounds_given[metric.bound], metric, metric.bound)
    return Condition(metric=metric, bound=bound or 0.0, for_ns=item.lasting_ns, verdict=Verdict(item.verdict))


def _expectation(item: _Expect, ids: Sequence[str]) -> Expectation:
    metric = lookup(item.metric, ids)
    if metric is None:
        near = nearest(item.metric, ids)
        advice = f"did you mean {near}?" if near else "docs/metrics.md lists them"
        raise Wrong("metric", f'no metric "{item.metric}"; {advice}')
    if item.equals is not None and (item.min is not None or item.max is not None):
        raise Wrong("", "equals stands alone; drop min and max")
    if item.equals is None and item.min is None and item.max is None:
        raise Wrong("", "no bound: give min, max or equals")
    if item.of is not None and not metric.either:
        always = "the setting" if metric.estimand == "setting" else "this run"
        raise Wrong("of", f'"{item.of}": a bound on {metric.name} is always about {always}; drop it')
    if item.equals is not None and metric.is_noisy and item.of != "run":
        raise Wrong("equals", f"{metric.name} differs from run to run; give min, max or both")
    if metric.unit == "host":
        if not isinstance(item.equals, str):
            raise Wrong("", f'{metric.name} is a name: write equals = "host3"')
        return Expectation(metric=metric, equals=item.equals)
    minimum, maximum = _bound(item.min, metric, "min"), _bound(item.max, metric, "max")
    if minimum is not None and maximum is not None and minimum > maximum:
        raise Wrong("", f"min ({item.min}) is above max ({item.max}): no value fits; swap or correct them")
    equals = _bound(item.equals, metric, "equals")
    return Expectation(metric=metric, minimum=minimum, maximum=maximum, equals=equals, of=item.of)


def _bound(value: Scalar | None, metric: Metric | StopMetric, key: str) -> float | None:
    """Return a bound in the metric's unit: a time or a rate needs its unit, a share may be a percentage."""
    if value is None:
        return None
    if isinstance(value, bool):
        raise Wrong(key, f"{metric.name} is a number ({metric.unit}), not {str(value).lower()}; write it out")
    if isinstance(value, str):
        return _bound_of_text(value, metric, key)
    quantity = next((quantity for quantity in (TIME, RATE) if metric.unit in quantity.units), None)
    if quantity is not None:
        raise Wrong(key, quantity.without_unit(value, metric.unit))
    _refuse_beyond(value, metric, key)
    return float(value) if metric.unit != "count" else value


def _bound_of_text(text: str, metric: Metric | StopMetric, key: str) -> float:
    parsers: Mapping[str, Callable[[str], float]] = {
        "s": lambda time: parse_duration_ns(time) / 1e9,
        "ratio": parse_share,
        "Gb/s": lambda rate: parse_rate_bps(rate) / 1e9,
    }
    if metric.unit not in parsers:
        raise Wrong(key, f"{metric.name} is a plain number ({metric.unit}); drop the quotes and the unit")
    try:
        value = parsers[metric.unit](text)
    except ValueError as error:
        raise Wrong(key, str(error)) from None
    _refuse_beyond(value, metric, key)
    return value


def _refuse_beyond(value: float, metric: Metric | StopMetric, key: str) -> None:
    if isinstance(metric, Metric) and metric.most is not None and value > metric.most:
        advice = f"write {value / 100:g} for {value:g} %"
        raise Wrong(key, f"{metric.name} is never above {metric.most:g}: {value:g} decides nothing; {advice}")
