"""The command that predicts an experiment, or a training step on a preset fabric: predict."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import msgspec

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.model.predicting_preset import PresetOptions, preset_options, show_preset
from faultbed.harness.experiment import experiment_file as experiment_module
from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.experiment.parameters import Parameter, parse, with_values
from faultbed.harness.experiment.workload_file import Collective, Job
from faultbed.harness.model import calibration as calibration_module
from faultbed.harness.model.calibration import Calibration, outside
from faultbed.harness.model.experiment_prediction import (
    DRAWS,
    Draw,
    ExperimentPrediction,
    Phase,
    default_parameters,
    predict,
)
from faultbed.harness.model.fault_effects import drained_links
from faultbed.harness.quantities import format_bytes, format_duration, format_rate
from faultbed.harness.run.prepare.resolve import resolve
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["COMMANDS"]

MOST_POINTS = 200
OUTSIDE = 2
"""Exit code if a prediction lies outside the range of the calibration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A combination of values: its prediction, and in which ways it lies outside the calibration."""

    values: Mapping[str, str]
    prediction: ExperimentPrediction
    outside: tuple[str, ...]


@click.command("predict")
@click.argument("experiment", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--over",
    "overs",
    multiple=True,
    metavar="PATH=V1,V2,...",
    help="A parameter of the experiment and its values, as in `sweep`. Repeatable.",
)
@click.option(
    "--drain", "drained", multiple=True, metavar="SWITCH|LINK", help="A switch or link that is out of use. Repeatable."
)
@click.option(
    "--draws",
    default=DRAWS,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="Draws of queue pair numbers for routing schemes that hash.",
)
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Seed of the draws.")
@preset_options
@json_option
@pass_session
def predict_command(
    session: Session,
    /,
    *,
    experiment: Path | None,
    overs: tuple[str, ...],
    drained: tuple[str, ...],
    draws: int,
    seed: int,
    as_json: bool,
    **preset: Any,
) -> int:
    """Predict the time of an EXPERIMENT on a lab, or of a training step on a preset fabric; no lab is touched.

    Every number is modelled, and there is no verdict: bounds of [[expect]] are shown and not judged. The exit code is 2
    if a point lies outside the range of the lab's calibration (`faultbed calibrate`). Then there is no error band.

    \b
      faultbed --lab soft-3rack predict odd-even.toml --over fabric.routing=static-parity,e-ecmp
      faultbed predict --preset llama3-24k
    """  # noqa: D301 - that is click's sign for a paragraph that keeps its lines, and must be the character itself
    options = PresetOptions(**preset)
    if options.preset is not None:
        if experiment is not None or overs or drained:
            raise UsageError("predict: --preset is a whole fabric and job; leave out EXPERIMENT, --over and --drain")
        show_preset(session, options, seed=seed, as_json=as_json)
        return 0
    if experiment is None:
        raise UsageError("predict: name an experiment file, or a --preset")
    inventory = session.inventory()
    content = experiment.read_bytes()
    experiment_module.decode(content, source=str(experiment))
    parameters = [parse(text) for text in overs]
    failed = drained_links(inventory.topology, drained)
    calibration = calibration_module.load(lab_dir(inventory.name), inventory=inventory.digest)
    points = [
        _point(values, content, str(experiment), inventory, calibration, failed=failed, draws=draws, seed=seed)
        for values in _combinations(parameters)
    ]
    fitted = resolve_without_fabric(experiment_module.decode(content, source=str(experiment)), content, inventory)[0]
    if as_json:
        session.json(_document(points, fitted, calibration, drained))
    else:
        _show(session, points, fitted, inventory, calibration)
    return OUTSIDE if any(point.outside for point in points) else 0


def _combinations(parameters: Sequence[Parameter]) -> list[dict[str, str]]:
    paths = [parameter.path for parameter in parameters]
    if len(set(paths)) < len(paths):
        raise UsageError(f"--over: {max(paths, key=paths.count)} is given twice; put its values after one --over")
    combinations = list(itertools.product(*(parameter.values for parameter in parameters)))
    if len(combinations) > MOST_POINTS:
        raise UsageError(f"--over: {len(combinations)} points, of at most {MOST_POINTS}; give fewer values")
    return [dict(zip(paths, values, strict=True)) for values in combinations]


def resolve_without_fabric(
    experiment: Experiment, content: bytes, inventory: Inventory
) -> tuple[Experiment, tuple[Any, ...]]:
    """Return a fitted experiment and its planned faults. A lab need not be able to apply the routing scheme."""
    resolved = resolve(replace(experiment, fabric=None), content, inventory)
    return replace(resolved.experiment, fabric=experiment.fabric), resolved.faults


def _point(
    values: Mapping[str, str],
    content: bytes,
    source: str,
    inventory: Inventory,
    calibration: Calibration | None,
    *,
    failed: frozenset[str],
    draws: int,
    seed: int,
) -> _Point:
    content_of_point, experiment = with_values(content, values, source=source)
    fitted, faults = resolve_without_fabric(experiment, content_of_point, inventory)
    parameters = default_parameters(inventory.kind) if calibration is None else calibration.parameters
    prediction = predict(fitted, faults, inventory, parameters, failed=failed, draws=draws, seed=seed)
    reasons: tuple[str, ...] = ()
    if calibration is not None:
        work = fitted.workload
        if isinstance(work, Collective | Job):
            reasons = outside(
                calibration,
                ranks=prediction.ranks,
                size_bytes=prediction.size_bytes,
                qps=work.qps_per_peer,
                compute_units=work.compute_units,
            )
        else:
            reasons = ("flows, calibrated by collectives and jobs",)
    return _Point(values=values, prediction=prediction, outside=reasons)


def _document(
    points: Sequence[_Point], fitted: Experiment, calibration: Calibration | None, drained: Sequence[str]
) -> dict[str, Any]:
    return {
        "fidelity": "modelled",
        "drained": drained,
        "calibration": None if calibration is None else msgspec.to_builtins(calibration),
        "bounds": _bounds(fitted),
        "points": [
            {
                "parameters": dict(point.values),
                **dataclasses.asdict(point.prediction),
                "band": None if calibration is None or point.outside else calibration.band,
                "outside": point.outside,
            }
            for point in points
        ],
    }


def _show(
    session: Session,
    points: Sequence[_Point],
    fitted: Experiment,
    inventory: Inventory,
    calibration: Calibration | None,
) -> None:
    first = points[0].prediction
    paths = list(points[0].values)
    with_routing = [] if "fabric.routing" in paths else ["routing"]
    faults = list(dict.fromkeys(phase.faults for point in points for phase in point.prediction.phases[1:]))
    faults = [names for names in faults if names]
    switch = max(first.fault_free.mmr, key=lambda name: first.fault_free.mmr[name], default=None)
    what = "iteration" if first.fault_free.iteration_s is not None else "goodput"
    rows = []
    for point in points:
        prediction = point.prediction
        band = None if calibration is None or point.outside else calibration.band
        by_faults = {phase.faults: phase for phase in prediction.phases}
        rows.append(
            (
                *point.values.values(),
                *(prediction.routing for _ in with_routing),
                _value(prediction.fault_free, band),
                *(_value(by_faults[names], None) if names in by_faults else "" for names in faults),
                *([_ratio(prediction.job_s, prediction.fault_free_s)] if faults and first.job_s is not None else []),
                prediction.fault_free.worst_link or "none limits",
                f"{prediction.fault_free.worst_share:.0%}" if prediction.fault_free.worst_link else "",
                *([f"{prediction.fault_free.mmr.get(switch, 1.0):.2f}"] if switch else []),
                f"{_middle(prediction.fault_free) / _middle(first.fault_free):.2f}",
            )
        )
    columns = (
        *(path.removeprefix("fabric.") for path in paths),
        *with_routing,
        what,
        *(f"with {', '.join(names)}" for names in faults),
        *(["jct_ratio"] if faults and first.job_s is not None else []),
        "worst link",
        "busy",
        *([f"mmr.{switch}"] if switch else []),
        "of first",
    )
    session.table(columns, rows)
    session.out.print(_origin(inventory, calibration), soft_wrap=True)
    for line in _notes(points, fitted):
        session.out.print(line, soft_wrap=True)


def _notes(points: Sequence[_Point], fitted: Experiment) -> list[str]:
    notes = [f"outside calibration: {'; '.join(point.outside)}" for point in points if point.outside]
    notes += [f"not included: {name}" for point in points for name in point.prediction.unknown]
    if any(point.prediction.draws > 1 for point in points):
        notes.append(
            "brackets: 5th to 95th percentile over draws of queue pair numbers, which decide the paths of a hash"
        )
    notes += [f"bound of [[expect]], modelled and not judged: {bound}" for bound in _bounds(fitted)]
    return list(dict.fromkeys(notes))


def _bounds(fitted: Experiment) -> list[str]:
    bounds = []
    for expectation in fitted.expectations:
        limits = {"min": expectation.minimum, "max": expectation.maximum, "equals": expectation.equals}
        text = ", ".join(f"{name} {value}" for name, value in limits.items() if value is not None)
        bounds.append(f"{expectation.metric.name} {text}")
    return bounds


def _origin(inventory: Inventory, calibration: Calibration | None) -> str:
    """Return where the numbers come from."""
    if calibration is None:
        return (
            f"modelled; not calibrated: default latency and overhead of a {inventory.kind} lab, nominal capacity of "
            "its links, no error band; see `faultbed calibrate`"
        )
    sizes = (format_bytes(calibration.size_bytes.least), format_bytes(calibration.size_bytes.most))
    ranks = (f"{calibration.ranks.least:g}", f"{calibration.ranks.most:g}")
    return (
        f"modelled; calibrated by {calibration.runs} runs on {inventory.name} "
        f"({' to '.join(dict.fromkeys(ranks))} ranks, {' to '.join(dict.fromkeys(sizes))})"
    )


def _middle(phase: Phase) -> float:
    drawn = phase.iteration_s or phase.goodput_bps
    return drawn.median if drawn is not None and drawn.median > 0 else 1.0


def _value(phase: Phase, band: float | None) -> str:
    if phase.iteration_s is not None:
        return _text(phase.iteration_s, band, lambda value: format_duration(value * 1e9))
    return "" if phase.goodput_bps is None else _text(phase.goodput_bps, band, lambda value: format_rate(value / 8))


def _text(drawn: Draw, band: float | None, form: Any) -> str:
    low, high = form(drawn.low), form(drawn.high)
    spread = "" if low == high else f" ({low} to {high})"
    return f"{form(drawn.median)}{'' if band is None else f' ±{band:.0%}'}{spread}"


def _ratio(job_s: float | None, fault_free_s: float | None) -> str:
    return "" if job_s is None or not fault_free_s else f"{job_s / fault_free_s:.2f}"


COMMANDS = (predict_command,)
