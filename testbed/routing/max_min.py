"""Max-min fair rates over link arrays, by water-filling many links at once. Pure.

A *unit* makes progress at one rate and loads each of its links by a weight times that rate. A plain flow is a unit with
weight 1. A ring or tree whose ranks wait for each other is one unit: its weights are the bytes that it puts on each
link for one unit of progress.

Progressive filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2) raises all rates together and fixes
those of one saturated link at a time. A link whose fair share is the smallest on every link of each of its units can be
fixed without waiting for the others, so that one round fixes all such links. The result is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Loads", "completion_times", "link_rates", "loads_of_paths", "max_min_rates", "merged"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_EQUAL = 1 + 1e-12
"""Fair shares of two links that differ by less are equal."""
_ENDED = 1 + 1e-9
"""Ends that differ by less are one event."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loads:
    """Which unit loads which link: parallel arrays of shape (entries,), sorted by unit; a pair (unit, link) once.

    Attributes:
        unit: number of the unit, from 0 to `units` - 1.
        link: number of the link.
        weight: load on the link for each unit of progress, above 0.
        units: number of units. A unit without links has an infinite rate.
    """

    unit: npt.NDArray[np.int32]
    link: npt.NDArray[np.int32]
    weight: Floats
    units: int

    def of(self, chosen: npt.NDArray[np.bool_]) -> Loads:
        """Return the loads of the units for which `chosen` is true; they keep their numbers."""
        kept = chosen[self.unit]
        return Loads(unit=self.unit[kept], link=self.link[kept], weight=self.weight[kept], units=self.units)


def merged(unit: npt.ArrayLike, link: npt.ArrayLike, weight: npt.ArrayLike, *, units: int) -> Loads:
    """Return loads from entries in any order. Weights of one unit on one link are added; those of 0 are left out.

    Raises:
        ValueError: a weight is negative or not finite, or a number is out of range.
    """
    of_unit, of_link = np.asarray(unit, dtype=np.int64), np.asarray(link, dtype=np.int64)
    weights = np.broadcast_to(np.asarray(weight, dtype=np.float64), of_unit.shape)
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("a weight on a link is negative or not finite")
    if of_unit.size and not (of_unit.min() >= 0 and of_unit.max() < units and of_link.min() >= 0):
        raise ValueError("the number of a unit or of a link is out of range")
    links = int(of_link.max(initial=0)) + 1
    key = of_unit * links + of_link
    order = np.argsort(key, kind="stable")
    key, weights = key[order], weights[order]
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    if starts.size:
        weights, key = np.add.reduceat(weights, starts), key[starts]
    loaded = weights > 0
    number, at = np.divmod(key[loaded], links)
    return Loads(unit=number.astype(np.int32), link=at.astype(np.int32), weight=weights[loaded], units=units)


def loads_of_paths(paths: npt.NDArray[np.int32]) -> Loads:
    """Return the loads of flows with weight 1. `paths` are link numbers, shape (flows, hops); -1: no link.

    The links of one flow must differ.
    """
    used = paths >= 0
    unit = np.repeat(np.arange(len(paths), dtype=np.int32), used.sum(axis=1))
    return Loads(unit=unit, link=paths[used], weight=np.ones(len(unit)), units=len(paths))


def max_min_rates(loads: Loads, capacity: Floats) -> Floats:
    """Return the max-min fair rate of each unit, shape (units,), in the unit of `capacity` per weight.

    `capacity` has one value for each link; infinity: the link limits nothing. Rates of units that nothing limits are
    infinite.

    Raises:
        ValueError: a capacity is negative or NaN.
    """
    if np.isnan(capacity).any() or (capacity < 0).any():
        raise ValueError("the capacity of a link is negative or NaN")
    links = len(capacity)
    left = capacity.astype(np.float64)
    rates = np.full(loads.units, math.inf)
    # Links without a limit decide nothing.
    limited = np.isfinite(left[loads.link])
    unit, link, weight = loads.unit[limited], loads.link[limited], loads.weight[limited]
    while unit.size:
        demand = np.bincount(link, weights=weight, minlength=links)
        share = np.full(links, math.inf)
        np.divide(left, demand, out=share, where=demand > 0)
        starts = np.flatnonzero(np.diff(unit, prepend=-1))
        of_entry = share[link]
        least = np.minimum.reduceat(of_entry, starts)  # the smallest share of each live unit
        spans = np.diff(starts, append=unit.size)
        least_of_entry = np.repeat(least, spans)
        # A link is a bottleneck if no unit on it has a smaller share elsewhere.
        is_bottleneck = demand > 0
        is_bottleneck[link[of_entry > least_of_entry * _EQUAL]] = False
        fixed = np.logical_or.reduceat(is_bottleneck[link], starts)
        rates[unit[starts[fixed]]] = least[fixed]
        entry_fixed = np.repeat(fixed, spans)
        gone = np.bincount(
            link[entry_fixed], weights=weight[entry_fixed] * least_of_entry[entry_fixed], minlength=links
        )
        left = np.maximum(left - gone, 0.0)
        unit, link, weight = unit[~entry_fixed], link[~entry_fixed], weight[~entry_fixed]
    return rates


def completion_times(loads: Loads, capacity: Floats, size: npt.ArrayLike, *, grid: float = 0.02) -> Floats:
    """Return when each unit has made progress `size`, if all begin at 0; capacity that one releases goes to the others.

    Units that would end within `grid` of the next end share one solution: their own ends are exact for the rates at
    that moment. With equal sizes and rates one solution is enough. `grid` 0 solves at every end.

    Raises:
        ValueError: a size is negative or not finite, or a unit crosses a link without capacity and never ends.
    """
    remaining = np.array(size, dtype=np.float64)
    if not np.isfinite(remaining).all() or (remaining < 0).any():
        raise ValueError("the size of a flow is negative or not finite")
    ends = np.zeros(loads.units)
    live = remaining > 0
    now = 0.0
    while live.any():
        rates = max_min_rates(loads.of(live), capacity)
        if not (rates[live] > 0).all():
            raise ValueError("a flow crosses a link without capacity and never ends")
        needed = np.where(live, remaining / rates, math.inf)
        last = float(needed.min()) * (1 + grid) * _ENDED
        ending = needed <= last
        ends[ending] = now + needed[ending]
        step = min(last, float(needed[ending].max()))
        live &= ~ending
        remaining[live] -= rates[live] * step
        now += step
    return ends


def link_rates(loads: Loads, rates: Floats, links: int) -> Floats:
    """Return the load on each of `links` links, in the unit of their capacity; units without a limit are left out."""
    finite = np.where(np.isfinite(rates), rates, 0.0)
    used: Floats = np.bincount(loads.link, weights=loads.weight * finite[loads.unit], minlength=links).astype(
        np.float64
    )
    return used
