"""How long a schedule takes, by the alpha-beta model: the third reader of schedules.

A step lasts as long as its slowest rank needs, alpha + o (m - 1) + beta b, where b is the larger one of the bytes that
the rank sends and receives in it and m the number of its messages; a rank's local and far links work side by side,
unless they are one and the same.
That is the model of Hockney (1994) with the overhead of LogP; it knows no congestion, so it is a bound, and good for
choosing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np
import numpy.typing as npt

from traffic.schedules import Moves, Schedule, Shape, algorithms_for, build
from traffic.schedules.schedule import relisted

__all__ = ["NETWORKS", "Link", "Network", "best_algorithm", "predict_ns", "shape_for"]

PIECE_BYTES = 65536
MAX_PIECES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """alpha, o and beta of one kind of way between two ranks."""

    alpha_ns: float
    overhead_ns: float
    ns_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Ways between ranks of one group (`near`: one host, or one rack) and between groups."""

    near: Link
    far: Link


_SOFT = Link(alpha_ns=13_000_000, overhead_ns=6_000_000, ns_per_byte=130)
NETWORKS = {
    "soft": Network(near=_SOFT, far=_SOFT),
    "rack": Network(
        near=Link(alpha_ns=5_000, overhead_ns=500, ns_per_byte=1 / 450),
        far=Link(alpha_ns=12_000, overhead_ns=500, ns_per_byte=1 / 50),
    ),
}
"""By kind of lab. Soft: fitted to all-reduces of 64 KiB to 16 MiB by three to five algorithms over four ranks (2
cores, TCG, two or three measurements of each, 2026-11-22): all VMs share the cores, so that each message costs a
while of a core. Rack: 400 Gb/s RNICs and NVLink of an H100 by their data sheets, not measured by us."""


def predict_ns(schedule: Schedule, size_bytes: float, network: Network, *, group: int = 1) -> float:
    """Predicted time of one operation. `size_bytes` is the whole buffer, as nccl-tests counts it."""
    group = group if schedule.ranks % group == 0 else 1
    period = lcm(schedule.period, group)
    listed = relisted(
        schedule.moves, period=schedule.period, wanted=period, ranks=schedule.ranks, chunks=schedule.chunks
    )
    listed = listed[listed["step"] >= 0]
    block_bytes = size_bytes / schedule.chunks
    if network.near == network.far:  # one way for all: what is near and what is far wait for each other
        return float(_step_times(listed, schedule.steps, period, block_bytes, network.far).sum())
    near = listed["src"] // group == listed["dst"] // group
    times = np.zeros(schedule.steps)
    for link, some in ((network.near, listed[near]), (network.far, listed[~near])):
        np.maximum(times, _step_times(some, schedule.steps, period, block_bytes, link), out=times)
    return float(times.sum())


def _step_times(of: Moves, steps: int, period: int, block_bytes: float, link: Link) -> npt.NDArray[np.float64]:
    times = np.zeros(steps)
    for end in ("src", "dst"):
        # Who is listed is the first `period` ranks; what goes to another one comes to the same place of its period.
        key = of["step"].astype(np.int64) * period + of[end] % period
        order = np.argsort(key, kind="stable")
        key = key[order]
        starts = np.flatnonzero(np.diff(key, prepend=-1))
        if not starts.size:
            continue
        blocks = np.add.reduceat(of["span"][order].astype(np.int64), starts)
        messages = np.diff(starts, append=len(key))
        needed = link.alpha_ns + link.overhead_ns * (messages - 1) + link.ns_per_byte * block_bytes * blocks
        np.maximum.at(times, key[starts] // period, needed)
    return times


def shape_for(ranks: int, size_bytes: int, *, group: int = 1, root: int = 0) -> Shape:
    """The shape of a schedule for a message of this size: pieces of 64 KiB, 16 at most."""
    pieces = max(1, min(MAX_PIECES, size_bytes // PIECE_BYTES))
    return Shape(ranks=ranks, group=group, root=root, pieces=pieces)


def best_algorithm(collective: str, shape: Shape, size_bytes: int, network: Network) -> str:
    """The algorithm that the model says is quickest: what `auto` means.

    Raises:
        UsageError: there is no such collective, or it cannot be had in this shape.
    """
    names = [name for name in algorithms_for(collective) if name != "hierarchical" or _has_groups(shape)]

    def time_ns(name: str) -> float:
        return predict_ns(build(collective, name, shape), size_bytes, network, group=shape.group)

    return min(names, key=time_ns)


def _has_groups(shape: Shape) -> bool:
    return 1 < shape.group < shape.ranks and shape.ranks % shape.group == 0
