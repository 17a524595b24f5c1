"""The options of commands that make many runs on several labs: --shard, --on."""

from __future__ import annotations

import re
from typing import Any

import click

from faultbed.harness.run.sweeps.shards import Shard, parse_shard
from faultbed.testbed.errors import UsageError

__all__ = ["LocalWorkers", "shard_option"]

_LOCAL = re.compile(r"local:([1-9][0-9]{0,2})")


class _ShardType(click.ParamType[Shard]):
    name = "K/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Shard:  # noqa: ARG002
        return value if isinstance(value, Shard) else parse_shard(value)


class LocalWorkers(click.ParamType[int]):
    """`local:N`, as the number of workers on this machine."""

    name = "local:N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002
        """Return N.

        Raises:
            UsageError: it is anything else.
        """
        match = _LOCAL.fullmatch(str(value))
        if match is None:
            raise UsageError(f"--on {value}: no workers; give local:N, or share the runs of other machines by --shard")
        return int(match[1])


shard_option = click.option(
    "--shard",
    type=_ShardType(),
    metavar="K/N",
    help="Make only the K-th of N equal parts of the runs, on this lab; other labs make the others.",
)
