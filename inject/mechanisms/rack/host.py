"""Hosts of a rack lab: what the kernel does alone, or our own programs, is done as in a soft lab.

Not all of it: a terabyte of memory takes minutes to hold, a VM's reset has no like but the BMC, and the control groups
that slow down programs of ours are made by a soft lab's provisioning.

The witnesses are hardware RNICs'. One of mlx5 that finds no receive counts `out_of_buffer`, and the one that it tells
counts `rnr_nak_retry_err` (drivers/infiniband/hw/mlx5/counters.c). Not yet run on hardware.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from inject.kinds.kind import Fidelity
from inject.mechanisms.mechanism import Request, Shot, Witness
from inject.mechanisms.rack.rack_mechanism import Way, hardware
from inject.mechanisms.soft import congestion, host, storage
from testbed.observe.counters import MLX5

__all__ = ["BY_KIND", "WAYS"]

_LATE = Way(
    kind="congestion.late-receives",
    fidelity="real",
    by="the file that our traffic engine looks for, as in a soft lab; out_of_buffer of the host's RNICs must move, too",
)
_BY_KERNEL: Mapping[str, Fidelity] = {
    "congestion.background": "real",
    "host.cpu-steal": "emulated",
    "host.clock-step": "real",
    "host.disk-full": "real",
    "host.rank-kill": "real",
    "host.rank-hang": "real",
    "storage.stall": "emulated",
    "storage.burst": "emulated",
}
WAYS = (
    _LATE,
    *(Way(kind=kind, fidelity=worth, by="the kernel, as in a soft lab") for kind, worth in _BY_KERNEL.items()),
)

_SOFT = {**congestion.BY_KIND, **host.BY_KIND, **storage.BY_KIND}


def _as_soft(asked: Request) -> Shot:
    return _on_hardware(_SOFT[asked.kind](asked))


def _late(asked: Request) -> Shot:
    shot, node = _as_soft(asked), asked.target.node
    own = tuple(f"{node}/{rnic.name}.{MLX5['send_rnr_err']}" for rnic in asked.topology.host_by_name[node].rnics)
    return dataclasses.replace(shot, must_move=(*shot.must_move, Witness(any_of=own)))


def _on_hardware(shot: Shot) -> Shot:
    moved = tuple(
        Witness(any_of=tuple(hardware(key) for key in witness.any_of), at_least=witness.at_least)
        for witness in shot.must_move
    )
    # `send_err` tells of rxe's own egress; hardware has none.
    return dataclasses.replace(shot, must_move=moved, must_not_move=())


BY_KIND: Mapping[tuple[str, str], Callable[[Request], Shot]] = {
    (_LATE.kind, "host"): _late,
    **{(kind, "rnic" if kind == "congestion.background" else "host"): _as_soft for kind in _BY_KERNEL},
}
