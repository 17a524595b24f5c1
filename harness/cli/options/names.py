"""Options and arguments that take a file, or the name of one that comes with faultbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from faultbed.testbed import shipped

__all__ = ["experiment_argument", "lab_option"]

lab_option = click.option(
    "--lab",
    type=click.Path(path_type=Path),
    envvar="FAULTBED_LAB",
    metavar="INVENTORY",
    help="The lab: an Ansible inventory, or one that comes with faultbed (soft, soft-mini, soft-3rack, soft-tapered, "
    "soft-zones, soft-zones-8); default: soft.",
)


class _Experiment(click.ParamType[Path]):
    """A file, or the name of an experiment that comes with faultbed; converted to a path that exists."""

    name = "experiment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = shipped.experiment_named(str(value))
        return click.Path(exists=True, dir_okay=False, path_type=Path).convert(path, param, ctx)


experiment_argument = click.argument("experiment", type=_Experiment())
