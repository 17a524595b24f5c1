"""The option --shard of the commands that make many runs."""

from __future__ import annotations

from typing import Any

import click

from faultbed.harness.run.sweeps.shards import Shard, parse_shard

__all__ = ["shard_option"]


class _ShardType(click.ParamType[Shard]):
    name = "K/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Shard:  # noqa: ARG002
        return value if isinstance(value, Shard) else parse_shard(value)


shard_option = click.option(
    "--shard",
    type=_ShardType(),
    metavar="K/N",
    help="Make only the K-th of N equal parts of the runs, on this lab; other labs make the others.",
)
