"""Options and output of `faultbed predict --preset`: a training step on a fabric of tens of thousands of GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from faultbed.harness.analysis.power.dips import PhaseSpan, Sample, levels
from faultbed.harness.cli.context import Session
from faultbed.harness.cli.options.parsed import parsed
from faultbed.harness.model.preset_fabric import PRESETS, PresetFabric, preset_named
from faultbed.harness.model.step_power import H100_WATTS, PowerTrace, Watts, dips_by_phase, measured_watts, step_power
from faultbed.harness.model.training_step import (
    LLAMA3_405B,
    PUBLISHED,
    PUBLISHED_TFLOPS,
    Layout,
    StepTime,
    calibrated_micro_batch_s,
    step_time,
)
from faultbed.harness.quantities import format_duration, format_rate
from faultbed.testbed.errors import UsageError
from faultbed.testbed.units import parse_duration_ns

__all__ = ["PresetOptions", "preset_options", "show_preset"]

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--preset",
        type=click.Choice(tuple(PRESETS)),
        help="Predict a training step of Llama 3 405B on this fabric; the options below apply only to it.",
    ),
    click.option(
        "--taper",
        "tapers",
        default="",
        metavar="T1,T2,...",
        help="Capacity below a spine over that of its uplinks, such as 1,2.8,7. Default: the preset's.",
    ),
    click.option(
        "--placement",
        default="ordered",
        show_default=True,
        type=click.Choice(("ordered", "random")),
        help="Hosts of the job: neighbours, or random ones.",
    ),
    click.option(
        "--preset-routing",
        "scheme",
        default="ecmp",
        show_default=True,
        type=click.Choice(("ecmp", "pinned")),
        help="Routing scheme of the preset.",
    ),
    click.option("--qps", default=16, show_default=True, type=click.IntRange(1, 64), help="Queue pairs to a peer."),
    click.option("--dp", type=click.IntRange(1, 8192), help="Size of DP groups; default: all GPUs with TP 8, PP 16."),
    click.option(
        "--micro-batches",
        default=16,
        show_default=True,
        type=click.IntRange(1, 4096),
        help="Micro-batches in a step, for each DP rank.",
    ),
    click.option(
        "--micro-batch-time",
        metavar="TIME",
        help="Compute time of one micro-batch in one stage. Default: from the published 430 TFLOP/s on 8,192 GPUs.",
    ),
    click.option("--power", is_flag=True, help="Also the power of the step: dips, ramps and spectrum."),
    click.option(
        "--power-from",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="power.parquet",
        help="Watts of each phase from this recording of a GPU.",
    ),
)


def preset_options(command: F) -> F:
    """Add the options of a preset to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetOptions:
    """The options of a preset, as given."""

    preset: str | None
    tapers: str
    placement: Literal["ordered", "random"]
    scheme: Literal["ecmp", "pinned"]
    qps: int
    dp: int | None
    micro_batches: int
    micro_batch_time: str | None
    power: bool
    power_from: Path | None


def show_preset(session: Session, options: PresetOptions, *, seed: int, as_json: bool) -> None:
    """Print the predicted step for each taper.

    Raises:
        UsageError: a value is invalid, or the job does not fit the fabric.
    """
    name = str(options.preset)
    fabrics = [preset_named(name, taper=taper) for taper in _tapers(options.tapers) or (None,)]
    micro_batch_s = (
        calibrated_micro_batch_s(LLAMA3_405B, PUBLISHED, tflops=PUBLISHED_TFLOPS)
        if options.micro_batch_time is None
        else parsed("--micro-batch-time", parse_duration_ns, options.micro_batch_time) / 1e9
    )
    steps = [_step(fabric, options, micro_batch_s, seed) for fabric in fabrics]
    watts = H100_WATTS if options.power_from is None else _watts_in(options.power_from)
    power = step_power(steps[0], watts) if options.power or options.power_from is not None else None
    if as_json:
        rows = [_row(fabric, step) for fabric, step in zip(fabrics, steps, strict=True)]
        session.json({"fidelity": "modelled", "points": rows, "power": None if power is None else _power_row(power)})
        return
    session.table(
        ("taper", "GPUs", "compute", "PP", "DP", "step", "TFLOP/s", "slowest ring", "step of first"),
        [
            (
                f"{fabric.taper:g}",
                f"{step.gpus:,}",
                _time(step.compute_s),
                _time(step.pp_s),
                _time(step.dp_s),
                f"{_time(step.least_s)} to {_time(step.most_s)}",
                f"{step.tflops(step.most_s):.0f} to {step.tflops(step.least_s):.0f}",
                format_rate(float(step.dp_bytes_per_s.min())),
                f"{step.least_s / steps[0].least_s:.2f} to {step.most_s / steps[0].most_s:.2f}",
            )
            for fabric, step in zip(fabrics, steps, strict=True)
        ],
    )
    session.out.print(
        "modelled; all communication overlaps with compute, to none of it; compute of a micro-batch "
        f"{_time(micro_batch_s)}"
        + (" from 430 TFLOP/s on 8,192 GPUs (arXiv 2407.21783)" if options.micro_batch_time is None else ", as given"),
        soft_wrap=True,
    )
    if power is not None:
        _show_power(session, power)


def _step(fabric: PresetFabric, options: PresetOptions, micro_batch_s: float, seed: int) -> StepTime:
    dp = options.dp or fabric.gpus // (PUBLISHED.tp * PUBLISHED.pp)
    layout = Layout(dp=dp, micro_batches=options.micro_batches)
    return step_time(
        LLAMA3_405B,
        layout,
        fabric,
        micro_batch_s=micro_batch_s,
        placement=options.placement,
        qps=options.qps,
        scheme=options.scheme,
        seed=seed,
    )


def _watts_in(path: Path) -> Watts:
    """Return the watts of each phase in a recording of a GPU."""
    from faultbed.harness.record import power_file  # noqa: PLC0415 - pyarrow takes long to import

    samples, spans, _ = power_file.read(path)
    drawn = [
        Sample(t_ns=int(sample["t_ns"]), watts=sample["instant_mw"] / 1e3)
        for sample in samples
        if sample["instant_mw"] is not None
    ]
    try:
        of_phases = levels(drawn, [PhaseSpan(**span) for span in spans])
    except TypeError as error:
        raise UsageError(f"--power-from {path}: its phases cannot be read: {error}; record it again") from error
    if not of_phases:
        raise UsageError(f"--power-from {path}: no phase has a sample; record a longer load")
    return measured_watts({name: level.watts for name, level in of_phases.items()})


def _row(fabric: PresetFabric, step: StepTime) -> dict[str, Any]:
    return {
        "preset": fabric.name,
        "taper": fabric.taper,
        "gpus": step.gpus,
        "compute_s": step.compute_s,
        "tp_s": step.tp_s,
        "pp_s": step.pp_s,
        "dp_s": step.dp_s,
        "least_s": step.least_s,
        "most_s": step.most_s,
        "tflops": [step.tflops(step.most_s), step.tflops(step.least_s)],
        "ring_bytes_per_s": [float(step.dp_bytes_per_s.min()), float(step.dp_bytes_per_s.max())],
    }


def _power_row(power: PowerTrace) -> dict[str, Any]:
    return {
        "mean_mw": power.mean_mw,
        "peak_mw": power.peak_mw,
        "largest_ramp_mw_per_s": power.largest_ramp_mw_per_s,
        "dips_mw": dips_by_phase(power),
        "strongest_hz": power.strongest_hz,
    }


def _show_power(session: Session, power: PowerTrace) -> None:
    dips = ", ".join(f"{name} {dip:.1f} MW" for name, dip in dips_by_phase(power).items())
    session.out.print(
        f"power of {power.gpus:,} GPUs: mean {power.mean_mw:.1f} MW, peak {power.peak_mw:.1f} MW; dips: {dips}; "
        f"largest ramp {power.largest_ramp_mw_per_s:.0f} MW/s; strongest line of the spectrum at "
        f"{power.strongest_hz:.3g} Hz; a restart and a checkpoint are part of the trace",
        soft_wrap=True,
    )


def _time(seconds: float) -> str:
    return format_duration(seconds * 1e9)


def _tapers(text: str) -> tuple[float, ...]:
    values = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UsageError(f'--taper {text}: "{word}" is no number; write such as 1,2.8,7')
        values.append(value)
    return tuple(values)
