"""Hosts of a rack lab: what is done by the kernel alone is done as in a soft lab; the witnesses are hardware RNICs'."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from inject.aim import host
from inject.aim.shot import Request, Shot, Witness
from inject.rack.way import COUNTERS, Way

__all__ = ["BY_KIND", "WAYS"]

WAYS = (
    Way(kind="host.cpu-steal", fidelity="emulated", by="the kernel, as in a soft lab"),
    Way(kind="host.rank-kill", fidelity="real", by="the kernel, as in a soft lab"),
    Way(kind="host.rank-hang", fidelity="real", by="the kernel, as in a soft lab"),
)


def _as_soft(asked: Request) -> Shot:
    shot = host.BY_KIND[asked.kind](asked)
    moved = tuple(
        Witness(any_of=tuple(_hardware(key) for key in witness.any_of), at_least=witness.at_least)
        for witness in shot.must_move
    )
    # `send_err` tells of rxe's own egress; hardware has none.
    return dataclasses.replace(shot, must_move=moved, must_not_move=())


def _hardware(key: str) -> str:
    head, _, name = key.rpartition(".")
    return f"{head}.{COUNTERS.get(name, name)}"


BY_KIND: Mapping[tuple[str, str], Callable[[Request], Shot]] = {(way.kind, "host"): _as_soft for way in WAYS}
