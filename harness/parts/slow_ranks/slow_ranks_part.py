"""The part `slow_ranks`: it finds slow ranks in the measured pass while the job runs; `slow_ranks` is a live value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from faultbed.harness.parts.part import Part
from faultbed.harness.parts.passes import Active, Pass
from faultbed.harness.parts.slow_ranks.online import Online

__all__ = ["PART"]


class _SlowRanks(Active):
    def __init__(self, run: Pass) -> None:
        self._online = Online(run.setting.ranks, run.setting.lab.topology, run.progress)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        with self._online:
            yield

    def on_event(self, event: dict[str, Any]) -> None:
        self._online.on_event(event)

    def value(self, name: str) -> float | None:
        return self._online.count() if name == "slow_ranks" else None


def _active(run: Pass) -> Active | None:
    return _SlowRanks(run) if run.phase == "measured" else None


PART = Part(name="slow_ranks", active=_active)
