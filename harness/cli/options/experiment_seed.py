"""The seed of an experiment on the command line. Commands that run no experiment do without its modules."""

from __future__ import annotations

import click

from faultbed.harness.experiment.experiment_file import MOST_SEED

__all__ = ["SEED"]

SEED = click.IntRange(0, MOST_SEED)
"""Type of an experiment's seed."""
