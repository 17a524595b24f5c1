"""The options of commands that make many runs on several labs: --shard, --on, --workers, --interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from faultbed.harness.run.sweeps.shards import Shard, parse_shard
from faultbed.harness.run.workers.worker_places import JOBS, Place, parse_place

__all__ = ["shard_option", "workers_options"]

F = TypeVar("F", bound=Callable[..., Any])


class _ShardType(click.ParamType[Shard]):
    name = "K/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Shard:  # noqa: ARG002
        return value if isinstance(value, Shard) else parse_shard(value)


class _PlaceType(click.ParamType[Place]):
    name = "PLACE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place:  # noqa: ARG002
        return value if isinstance(value, Place) else parse_place(str(value))


shard_option = click.option(
    "--shard",
    type=_ShardType(),
    metavar="K/N",
    help="Make only the K-th of N equal parts of the runs, on this lab; other labs make the others.",
)


def workers_options(command: F) -> F:
    """Add --on, --workers and --interface to a command."""
    options = (
        click.option(
            "--on",
            "place",
            type=_PlaceType(),
            metavar="PLACE",
            help="Make the runs on several labs at a time: local:N (on this machine), ssh:HOST,..., slurm:PARTITION, "
            "or tls://SCHEDULER:PORT (workers that `faultbed worker` started). Needs the extra `scale`.",
        ),
        click.option(
            "--workers",
            "jobs",
            type=click.IntRange(1, 999),
            help=f"Number of jobs of `--on slurm:PARTITION`, each with a lab. Default: {JOBS}.",
        ),
        click.option(
            "--interface",
            metavar="NAME",
            help="Network interface of this machine that the workers of `--on` reach. Default: loopback.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
