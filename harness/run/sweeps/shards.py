"""Shards: every N-th run of a sweep, a campaign or a repeated run, so that N labs share the work without a scheduler.

Each shard decides by itself which runs are its own: the runs are sorted by a digest of experiment and plan, and each
N-th is taken. So all shards have equally many, give or take one, and neighbouring points, which cost alike, are apart.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from faultbed.harness.experiment import run_plan
from faultbed.harness.run.prepare.resolve import ResolvedRun
from faultbed.testbed.errors import UsageError

__all__ = ["Shard", "parse_shard", "shard_of"]

_SHARD = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Shard `number` (from 1) of `count`."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_shard(text: str) -> Shard:
    """Read `K/N`.

    Raises:
        UsageError: it is not a shard from 1/N to N/N.
    """
    match = _SHARD.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {text}: no shard; give K/N with K from 1 to N, such as 2/4")
    return Shard(number=int(match[1]), count=int(match[2]))


def shard_of(shard: Shard, items: Iterable[T], run_of: Callable[[T], ResolvedRun]) -> list[T]:
    """Return the items of a shard, in their order. Each item stands for the run that `run_of` returns.

    Raises:
        UsageError: there are fewer items than shards.
    """
    listed = list(items)
    if shard.count > len(listed):
        raise UsageError(f"--shard {shard}: {len(listed)} runs are too few for it; give at most {len(listed)} shards")
    by_key = sorted(range(len(listed)), key=lambda index: _digest(run_of(listed[index])))
    own = {index for rank, index in enumerate(by_key) if rank % shard.count == shard.number - 1}
    return [item for index, item in enumerate(listed) if index in own]


def _digest(run: ResolvedRun) -> bytes:
    """Return what the key of a run has before it is made: the kind of machine may differ between shards."""
    return hashlib.sha256(run.source + b"\0" + run_plan.encode(run.plan)).digest()
