"""The command that fits the model to runs of a lab: calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.model import calibration as calibration_module
from faultbed.harness.model.calibration import Conditions
from faultbed.harness.model.calibration_samples import samples_of
from faultbed.harness.model.experiment_prediction import default_parameters
from faultbed.harness.quantities import format_bytes, format_duration
from faultbed.harness.record.run_files import whole
from faultbed.harness.record.rundir import open_run
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import UsageError

__all__ = ["COMMANDS"]


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the calibration here instead of into the lab's state.",
)
@json_option
@pass_session
def calibrate(session: Session, *, run_dirs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Fit the model of a lab to fault-free runs and twins, and store it for `faultbed predict`.

    RUN_DIRS are runs of collectives or jobs without faults, or any with a fault-free twin, of several sizes. Each
    parameter has its 95 % interval; the band is how far a next run may be from its prediction.
    """
    samples: dict[str, calibration_module.Sample] = {}
    conditions: dict[str, Conditions] = {}
    kind = None
    for path in run_dirs:
        directory = open_run(path)
        run = directory.read_run()
        kind = run.lab.kind
        samples |= samples_of(str(path), run)
        conditions[str(path)] = Conditions(
            lab=run.lab.name,
            inventory=directory.read_plan().inventory,
            accelerator=run.lab.accelerator,
            cpus=directory.read_environment().cpu_count,
        )
    (first, shared), *_ = conditions.items()
    for name, other in conditions.items():
        apart = [field for field in Conditions.__struct_fields__ if getattr(shared, field) != getattr(other, field)]
        if apart:
            raise UsageError(f"{first} and {name} differ in {', '.join(apart)}; calibrate with runs of one lab")
    fitted = calibration_module.fit(samples, shared, default_parameters(kind or "soft"))
    kept = out or lab_dir(shared.lab) / calibration_module.FILE
    kept.parent.mkdir(parents=True, exist_ok=True)
    with whole(kept) as temporary:
        temporary.write_bytes(calibration_module.encode(fitted))
    if as_json:
        session.json({**msgspec.to_builtins(fitted), "kept": kept})
        return
    rows = [
        ("latency of a step", *_interval(fitted.alpha_ns, format_duration)),
        ("overhead of a message", *_interval(fitted.overhead_ns, format_duration)),
        ("rate of links, of nominal", *_interval(fitted.rate, lambda value: f"{value:.2f}")),
        *([] if fitted.compute_ns is None else [("unit of compute", *_interval(fitted.compute_ns, format_duration))]),
    ]
    session.table(("", "fitted", "95 % interval"), rows)
    if fitted.together:
        session.out.print(f"the runs do not tell apart: {', '.join(fitted.together)}; add other sizes or algorithms")
    session.out.print(
        f"band ±{fitted.band:.0%}; {fitted.runs} fault-free series, {fitted.ranks.least:g} to {fitted.ranks.most:g} "
        f"ranks, {format_bytes(fitted.size_bytes.least)} to {format_bytes(fitted.size_bytes.most)}; kept in {kept}",
        soft_wrap=True,
    )


def _interval(estimate: calibration_module.Estimate, form: Any) -> tuple[str, str]:
    return form(estimate.value), f"{form(estimate.low)} to {form(estimate.high)}"


COMMANDS = (calibrate,)
