"""The experiment file as frozen types. An error names the path of the invalid value.

    tests/experiments/demo.toml: faults[1].target: no link "rtsw9:host1" ...; did you mean rtsw1:host1:rxe0?

`load` needs no lab. `faultbed.harness.run.prepare.bind_to_lab` then compares the experiment with a lab's topology.

    [[faults]]     `kind`; `target` (a name, or a list from which the seed chooses); `at` (a time after the workload's
                   start, or a range `["6s", "9s"]` from which the seed draws); `for`; optionally `id` (default: the
                   kind, numbered if it repeats); `exposed` (`none`: the fault must act on nothing that the
                   workload uses); `set = { ... }`, parameters that the injector gets unchanged
    [[stop]]       `metric` (`METRICS` of `harness/experiment/stop.py`); its bound (`min` or `max`); optionally `for`
                   (how long the value must be beyond the bound) and `verdict` (`FAIL` or `INCONCLUSIVE`). Such
                   a value clears all faults at once and ends the run
    [[expect]]     `metric` (`harness/experiment/metrics.py`); its bound (`min`, `max` or `equals`); optionally `of`:
                   `run` (what happened in this run) or `setting` (what runs of this experiment do in general)
    [capture]      `ports`: switch ports whose packets are kept and checked (`rtsw2:host4:rxe0`, or `host4:rxe0` for the
                   port that faces it, or `rtsw1:ctsw1`)
    [fabric]       `routing`: the scheme (`testbed/routing/schemes.py`) that the switches apply while the workload runs;
                   its parameter, if it has one (`faultbed.harness.experiment.fabric_file`)
    [bystander]    a flow beside the workload that no fault should affect (`faultbed.harness.experiment.bystander_file`)
    [probe]        datagrams over every path of the fabric while the workload runs (`traffic/probes/prober.py`). `rate`:
                   datagrams a second on each queue pair; `qps`: queue pairs between two RNICs. It may be empty
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from faultbed.harness.experiment.bystander_file import KEYS as BYSTANDER_KEYS
from faultbed.harness.experiment.bystander_file import BystanderFile, bystander_of
from faultbed.harness.experiment.fabric_file import KEYS as FABRIC_KEYS
from faultbed.harness.experiment.fabric_file import Fabric, FabricFile, fabric_of
from faultbed.harness.experiment.metrics import METRICS, Metric, Of, lookup, nearest
from faultbed.harness.experiment.needs import Need, parse_need
from faultbed.harness.experiment.stop import METRICS as STOP_METRICS
from faultbed.harness.experiment.stop import Condition
from faultbed.harness.experiment.stop import Metric as StopMetric
from faultbed.harness.experiment.workload_file import Workload, workload_of
from faultbed.harness.quantities import parse_duration_ns
from faultbed.harness.strict import Section, convert, fail, one_of, positive, read
from faultbed.harness.verdict import Verdict
from faultbed.testbed.errors import ConfigError
from faultbed.testbed.model.lab_kind import LabKind
from faultbed.testbed.packets.cnp_rule import CnpRule, CnpScope
from faultbed.testbed.text_files import decoded, read_text
from faultbed.traffic.flows.flow_run import FlowSpec
from faultbed.traffic.probes.prober import ProbeSpec

__all__ = ["MOST_SEED", "SECTION_KEYS", "Expectation", "Experiment", "Exposed", "Fault", "Scalar", "decode", "load"]

Scalar = str | int | float | bool
Exposed = Literal["workload", "none"]
"""On what a fault must act: on something that the workload uses, or on nothing that it uses."""

MOST_SEED = 2**63 - 1
_PROBED_S = 24 * 3600.0
"""Duration of probes, longer than any run: the run stops them when its workload has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault as written in the file; `run_plan.py` draws one of `targets` and a time from the seed."""

    id: str
    kind: str
    targets: tuple[str, ...]
    at_earliest_ns: int
    at_latest_ns: int
    duration_ns: int
    exposed: Exposed = "workload"
    parameters: dict[str, Scalar] = field(default_factory=dict)


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


class _LabFile(Section, frozen=True, kw_only=True):
    kind: LabKind | None = None
    needs: tuple[str, ...] = ()


class _FaultFile(Section, frozen=True, kw_only=True):
    kind: str
    target: str | tuple[str, ...]
    at: str | tuple[str, str]
    duration: str = msgspec.field(name="for")
    id: str | None = None
    exposed: Exposed = "workload"
    parameters: dict[str, Scalar] = msgspec.field(name="set", default_factory=dict)


class _CaptureFile(Section, frozen=True, kw_only=True):
    ports: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    cnp_interval: str | None = None
    cnp_per: CnpScope = "qp"


class _ProbeFile(Section, frozen=True, kw_only=True):
    rate: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 0.5
    qps: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4


class _ExpectFile(Section, frozen=True, kw_only=True):
    metric: str
    min: str | int | float | None = None
    max: str | int | float | None = None
    equals: Scalar | None = None
    of: Of | None = None


class _StopFile(Section, frozen=True, kw_only=True):
    metric: str
    min: str | int | float | None = None
    max: str | int | float | None = None
    duration: str = msgspec.field(name="for", default="0s")
    verdict: Literal["FAIL", "INCONCLUSIVE"] = "FAIL"


class _ExperimentFile(Section, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}\Z")]
    workload: dict[str, Any]
    seed: Annotated[int, msgspec.Meta(ge=0, le=MOST_SEED)] = 1
    lab: _LabFile = msgspec.field(default_factory=_LabFile)
    fabric: FabricFile | None = None
    capture: _CaptureFile | None = None
    probe: _ProbeFile | None = None
    bystander: BystanderFile | None = None
    faults: tuple[_FaultFile, ...] = ()
    stop: tuple[_StopFile, ...] = ()
    expect: tuple[_ExpectFile, ...] = ()


_LONGEST_ID = 63
"""Maximum length of a fault's id: `capture-<id>.pcapng` is a file name, and an id is a column of reports."""

SECTION_KEYS = {
    "": ("name", "seed", "lab", "fabric", "workload", "faults", "stop", "expect", "capture", "probe", "bystander"),
    "fabric": FABRIC_KEYS,
    "capture": ("ports", "cnp_interval", "cnp_per"),
    "probe": ("rate", "qps"),
    "bystander": BYSTANDER_KEYS,
    "lab": ("kind", "needs"),
    "faults": ("id", "kind", "target", "at", "for", "exposed", "set"),
    "stop": ("metric", "min", "max", "for", "verdict"),
    "expect": ("metric", "min", "max", "equals", "of"),
}
"""The keys of each section, for hints in messages; `harness/experiment/workload_file.py` has those of `[workload]`."""


def load(path: Path) -> Experiment:
    """Read an experiment file.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has an invalid value, whose path the message names.
    """
    return decode(read_text(path, "name an experiment file (TOML)").encode(), source=str(path))


def decode(content: bytes, *, source: str) -> Experiment:
    """Decode the bytes of an experiment file; `source` is what messages call it.

    Raises:
        ConfigError: as `load`.
    """
    try:
        raw = tomllib.loads(decoded(content, source))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: not TOML: {error}; correct that line") from error
    parsed = convert(raw, _ExperimentFile, source, keys=SECTION_KEYS)
    faults = _faults(parsed.faults, source)
    _refuse_without_bystander(parsed, source)
    cnp = _cnp(parsed, source)
    return Experiment(
        name=parsed.name,
        seed=parsed.seed,
        lab_kind=parsed.lab.kind,
        needs=tuple(
            read(parse_need, text, source, f"lab.needs[{index}]") for index, text in enumerate(parsed.lab.needs)
        ),
        workload=workload_of(parsed.workload, source),
        faults=faults,
        expectations=tuple(
            _expectation(item, f"expect[{index}]", source, faults) for index, item in enumerate(parsed.expect)
        ),
        source=source,
        capture=parsed.capture.ports if parsed.capture else (),
        cnp=cnp,
        probe=ProbeSpec(duration_s=_PROBED_S, per_s=parsed.probe.rate, qps=parsed.probe.qps) if parsed.probe else None,
        fabric=fabric_of(parsed.fabric, source),
        bystander=bystander_of(parsed.bystander, source),
        stops=tuple(_stop(item, f"stop[{index}]", source, faults) for index, item in enumerate(parsed.stop)),
    )


def _cnp(parsed: _ExperimentFile, source: str) -> CnpRule | None:
    capture = parsed.capture
    if capture is not None and capture.cnp_interval is not None:
        interval_ns = positive(parse_duration_ns, capture.cnp_interval, source, "capture.cnp_interval")
        return CnpRule(interval_ns=interval_ns, per=capture.cnp_per)
    for index, item in enumerate(parsed.expect):
        if item.metric.startswith("cnp.") and item.metric in METRICS:
            problem = (
                f"{item.metric} needs the interval between CNPs that the RNIC's documentation names: add it as "
                "cnp_interval to [capture]"
            )
            raise fail(source, f"expect[{index}].metric", problem)
    return None


def _refuse_without_bystander(parsed: _ExperimentFile, source: str) -> None:
    if parsed.bystander is not None:
        return
    for index, item in enumerate(parsed.expect):
        if item.metric.startswith("bystander.") and item.metric in METRICS:
            problem = f"{item.metric} needs a bystander: add [bystander] with src and dst"
            raise fail(source, f"expect[{index}].metric", problem)


def _faults(items: tuple[_FaultFile, ...], source: str) -> tuple[Fault, ...]:
    paths_by_id: dict[str, str] = {}
    faults = []
    for index, item in enumerate(items):
        path = f"faults[{index}]"
        fault = _fault(item, path, source, _fault_id(item, paths_by_id))
        if fault.id in paths_by_id:
            raise fail(source, f"{path}.id", f'"{fault.id}" is also the id of {paths_by_id[fault.id]}; choose another')
        paths_by_id[fault.id] = path
        faults.append(fault)
    return tuple(faults)


def _fault_id(item: _FaultFile, paths_by_id: dict[str, str]) -> str:
    if item.id is not None:
        return item.id
    number = 1
    while (candidate := item.kind if number == 1 else f"{item.kind}-{number}") in paths_by_id:
        number += 1
    return candidate


def _fault(item: _FaultFile, path: str, source: str, fault_id: str) -> Fault:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", fault_id):
        raise fail(source, f"{path}.id", f'"{fault_id}" must be lower-case letters, digits, dots and dashes')
    if len(fault_id) > _LONGEST_ID:
        problem = f"has {len(fault_id)} characters, and at most {_LONGEST_ID} fit; files of the run are named by it"
        raise fail(source, f"{path}.id", f'"{fault_id[:16]}..." {problem}: shorten it')
    if f"recovery.{fault_id}" in METRICS:
        raise fail(source, f"{path}.id", f"recovery.{fault_id} is a metric of its own; call the fault something else")
    targets = (item.target,) if isinstance(item.target, str) else item.target
    if not targets:
        raise fail(source, f"{path}.target", "an empty list: name at least one target")
    bounds = (item.at, item.at) if isinstance(item.at, str) else item.at
    earliest, latest = (read(parse_duration_ns, text, source, f"{path}.at") for text in bounds)
    if latest < earliest:
        raise fail(source, f"{path}.at", f"the range ends ({bounds[1]}) before it begins ({bounds[0]})")
    return Fault(
        id=fault_id,
        kind=item.kind,
        targets=targets,
        at_earliest_ns=earliest,
        at_latest_ns=latest,
        duration_ns=positive(parse_duration_ns, item.duration, source, f"{path}.for"),
        exposed=item.exposed,
        parameters=dict(item.parameters),
    )


def _stop(item: _StopFile, path: str, source: str, faults: tuple[Fault, ...]) -> Condition:
    if not faults:
        raise fail(source, path, "stop conditions are checked while faults are on, and this experiment has none")
    one_of(item.metric, tuple(STOP_METRICS), source, f"{path}.metric")
    metric = STOP_METRICS[item.metric]
    bounds_given = {"min": item.min, "max": item.max}
    if bounds_given[metric.bound] is None or sum(value is not None for value in bounds_given.values()) > 1:
        raise fail(source, path, f"{metric.name} is bounded by {metric.bound} alone")
    bound = _bound(bounds_given[metric.bound], metric, f"{path}.{metric.bound}", source)
    lasting_ns = read(parse_duration_ns, item.duration, source, f"{path}.for")
    return Condition(metric=metric, bound=bound or 0.0, for_ns=lasting_ns, verdict=Verdict(item.verdict))


def _expectation(item: _ExpectFile, path: str, source: str, faults: tuple[Fault, ...]) -> Expectation:
    ids = [fault.id for fault in faults]
    metric = lookup(item.metric, ids)
    if metric is None:
        near = nearest(item.metric, ids)
        hint = f"; did you mean {near}?" if near else ""
        raise fail(source, f"{path}.metric", f'no metric "{item.metric}"{hint}')
    if item.equals is not None and (item.min is not None or item.max is not None):
        raise fail(source, path, "equals stands alone; drop min and max")
    if item.equals is None and item.min is None and item.max is None:
        raise fail(source, path, "no bound: give min, max or equals")
    if item.of is not None and not metric.either:
        always = "the setting" if metric.estimand == "setting" else "this run"
        raise fail(source, f"{path}.of", f'"{item.of}": a bound on {metric.name} is always about {always}; drop it')
    if item.equals is not None and metric.is_noisy and item.of != "run":
        raise fail(source, f"{path}.equals", f"{metric.name} differs from run to run; give min, max or both")
    if metric.unit == "host":
        if not isinstance(item.equals, str):
            raise fail(source, path, f'{metric.name} is a name: write equals = "host3"')
        return Expectation(metric=metric, equals=item.equals)
    minimum = _bound(item.min, metric, f"{path}.min", source)
    maximum = _bound(item.max, metric, f"{path}.max", source)
    if minimum is not None and maximum is not None and minimum > maximum:
        raise fail(source, path, f"min ({item.min}) is above max ({item.max}): no value fits; swap or correct them")
    equals = _bound(item.equals, metric, f"{path}.equals", source)
    return Expectation(metric=metric, minimum=minimum, maximum=maximum, equals=equals, of=item.of)


def _bound(value: str | float | None, metric: Metric | StopMetric, path: str, source: str) -> float | None:
    """Return a bound in the metric's unit: "3s" for a time, a bare number for all others."""
    if value is None:
        return None
    if isinstance(value, bool):
        raise fail(source, path, f"{metric.name} is a number ({metric.unit}), not {str(value).lower()}; write it out")
    if metric.unit == "s":
        if not isinstance(value, str):
            raise fail(source, path, f'a time needs its unit: write "{value}s" if seconds are meant')
        return read(parse_duration_ns, value, source, path) / 1e9
    if isinstance(value, str):
        raise fail(source, path, f"{metric.name} is a plain number ({metric.unit}); drop the quotes and the unit")
    if isinstance(metric, Metric) and metric.most is not None and value > metric.most:
        hint = f"write {value / 100:g} for {value:g} %"
        raise fail(source, path, f"{metric.name} is never above {metric.most:g}: {value:g} decides nothing; {hint}")
    return float(value) if metric.unit != "count" else value
