"""Commands over several runs: noise."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from harness import noise as noise_module
from harness.cli.context import Session, json_option, pass_session
from harness.rundir import open_run
from testbed.paths import lab_dir

__all__ = ["COMMANDS"]

_RUN_DIR = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=_RUN_DIR)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the floor here instead of into the lab's state.",
)
@json_option
@pass_session
def noise(session: Session, *, run_dirs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Measure a lab's noise floor (A/A) from fault-free runs of one experiment, and keep it.

    RUN_DIRS are runs without faults, or any runs with a fault-free twin. The judge widens intervals by what it finds.
    """
    floor = noise_module.measure({str(path): open_run(path).read_measurements() for path in run_dirs})
    kept = out or lab_dir(floor.lab) / noise_module.FILE
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(noise_module.encode(floor))
    if as_json:
        pairs = {name: spread.pair for name, spread in floor.spreads.items()}
        session.json({**msgspec.to_builtins(floor), "pair": pairs, "kept": kept})
        return
    rows = [
        (
            name,
            str(spread.runs),
            f"{spread.middle:.4g} {spread.unit}",
            f"{100 * spread.log_sd:.1f} %",
            f"{spread.pair:.2f}",
        )
        for name, spread in floor.spreads.items()
    ]
    session.table(("", "runs", "middle", "deviation", "two runs differ by at most"), rows)
    session.out.print(f"{floor.iterations} iterations each; kept in {kept}", soft_wrap=True)


COMMANDS = (noise,)
