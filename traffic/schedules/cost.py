"""Predict the duration of a schedule by the alpha-beta model.

A step lasts as long as its slowest rank needs: alpha + o (m - 1) + beta b. Here b is the larger of the bytes that the
rank sends and receives in the step, and m is the number of its messages. A rank's near and far links work in parallel,
unless they are the same link. This is the model of Hockney (1994) with the overhead of LogP. It ignores congestion, so
it is a lower bound that serves to choose an algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm

import numpy as np
import numpy.typing as npt

from faultbed.traffic.schedules import Moves, Schedule, Shape, algorithms_for, build
from faultbed.traffic.schedules.schedule import relisted

__all__ = ["NETWORKS", "Link", "Network", "best_algorithm", "predict_ns", "shape_for"]

PIECE_BYTES = 65536
MAX_PIECES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """alpha, o and beta of one kind of link between two ranks."""

    alpha_ns: float
    overhead_ns: float
    ns_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links between ranks of one group (`near`: one host or one rack) and between groups (`far`)."""

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
"""Parameters by kind of lab. Soft: fitted to all-reduces of 64 KiB to 16 MiB by three to five algorithms over four
ranks (2 cores, TCG, two or three measurements each, 2026-11-22). All VMs share the cores, so each message costs CPU
time. Rack: from the data sheets of 400 Gb/s RNICs and the NVLink of an H100, not measured."""


def predict_ns(schedule: Schedule, size_bytes: float, network: Network, *, group: int = 1) -> float:
    """Return the predicted time of one operation. `size_bytes` is the whole buffer, as nccl-tests counts it."""
    group = group if schedule.ranks % group == 0 else 1
    period = lcm(schedule.period, group)
    listed = relisted(
        schedule.moves, period=schedule.period, new_period=period, ranks=schedule.ranks, chunks=schedule.chunks
    )
    listed = listed[listed["step"] >= 0]
    block_bytes = size_bytes / schedule.chunks
    if network.near == network.far:  # one shared link: near and far messages queue behind each other
        return float(_step_times(listed, schedule.steps, period, block_bytes, network.far).sum())
    near = listed["src"] // group == listed["dst"] // group
    times = np.zeros(schedule.steps)
    for link, rows in ((network.near, listed[near]), (network.far, listed[~near])):
        np.maximum(times, _step_times(rows, schedule.steps, period, block_bytes, link), out=times)
    return float(times.sum())


def _step_times(rows: Moves, steps: int, period: int, block_bytes: float, link: Link) -> npt.NDArray[np.float64]:
    times = np.zeros(steps)
    for end in ("src", "dst"):
        # Only the first `period` ranks are listed. A message to any other rank counts for the same position in its
        # period.
        key = rows["step"].astype(np.int64) * period + rows[end] % period
        order = np.argsort(key, kind="stable")
        key = key[order]
        starts = np.flatnonzero(np.diff(key, prepend=-1))
        if not starts.size:
            continue
        blocks = np.add.reduceat(rows["span"][order].astype(np.int64), starts)
        messages = np.diff(starts, append=len(key))
        needed = link.alpha_ns + link.overhead_ns * (messages - 1) + link.ns_per_byte * block_bytes * blocks
        np.maximum.at(times, key[starts] // period, needed)
    return times


def shape_for(ranks: int, size_bytes: int, *, group: int = 1, root: int = 0) -> Shape:
    """Return the shape of a schedule for a message of this size: pieces of 64 KiB, at most 16."""
    pieces = max(1, min(MAX_PIECES, size_bytes // PIECE_BYTES))
    return Shape(ranks=ranks, group=group, root=root, pieces=pieces)


@lru_cache(maxsize=1024)
def best_algorithm(collective: str, shape: Shape, size_bytes: int, network: Network) -> str:
    """Return the algorithm with the shortest predicted time, for `algorithm = "auto"`.

    Raises:
        UsageError: there is no such collective, or it does not support the shape.
    """
    names = [name for name in algorithms_for(collective) if name != "hierarchical" or _has_groups(shape)]

    def time_ns(name: str) -> float:
        return predict_ns(build(collective, name, shape), size_bytes, network, group=shape.group)

    return min(names, key=time_ns)


def _has_groups(shape: Shape) -> bool:
    return 1 < shape.group < shape.ranks and shape.ranks % shape.group == 0
