"""Hosts of a rack lab: what the kernel does alone, or our own programs, is done as in a soft lab.

The witnesses are hardware RNICs'. One of mlx5 that finds no receive counts `out_of_buffer`, and the one that it tells
counts `rnr_nak_retry_err` (drivers/infiniband/hw/mlx5/counters.c). Not yet run on hardware.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from inject.aim import congestion, host
from inject.aim.shot import Request, Shot, Witness
from inject.rack.way import Way
from testbed.counters import MLX5

__all__ = ["BY_KIND", "WAYS"]

_LATE = Way(
    kind="congestion.late-receives",
    fidelity="real",
    by="the file that our traffic engine looks for, as in a soft lab; out_of_buffer of the host's RNICs must move, too",
)
_BY_KERNEL = (
    Way(kind="host.cpu-steal", fidelity="emulated", by="the kernel, as in a soft lab"),
    Way(kind="host.rank-kill", fidelity="real", by="the kernel, as in a soft lab"),
    Way(kind="host.rank-hang", fidelity="real", by="the kernel, as in a soft lab"),
)
WAYS = (_LATE, *_BY_KERNEL)


def _as_soft(asked: Request) -> Shot:
    return _on_hardware(host.BY_KIND[asked.kind](asked))


def _late(asked: Request) -> Shot:
    shot, node = _on_hardware(congestion.BY_KIND[asked.kind](asked)), asked.target.node
    own = tuple(f"{node}/{rnic.name}.{MLX5['send_rnr_err']}" for rnic in asked.topology.host_by_name[node].rnics)
    return dataclasses.replace(shot, must_move=(*shot.must_move, Witness(any_of=own)))


def _on_hardware(shot: Shot) -> Shot:
    moved = tuple(
        Witness(any_of=tuple(_hardware(key) for key in witness.any_of), at_least=witness.at_least)
        for witness in shot.must_move
    )
    # `send_err` tells of rxe's own egress; hardware has none.
    return dataclasses.replace(shot, must_move=moved, must_not_move=())


def _hardware(key: str) -> str:
    head, _, name = key.rpartition(".")
    return f"{head}.{MLX5.get(name, name)}"


BY_KIND: Mapping[tuple[str, str], Callable[[Request], Shot]] = {
    (_LATE.kind, "host"): _late,
    **{(way.kind, "host"): _as_soft for way in _BY_KERNEL},
}
